"""The gate before production training: are this machine's driver, libraries and attention kernels the ones to trust a run with?

    python scripts/check_cuda_stack.py [--config NAME] [--backends jax torch] [--any.field value]

Without --config: the published model with three cameras, the longest prompt and fused attention. Exit code: 0 GO, 1 NO-GO, 2 cannot check (no GPU,
or a config that does not exist). docs/cuda-stack.md says what is checked.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import rich.box
import rich.console
import rich.markup
import rich.table

from pi05.backend import BACKENDS
from pi05.config import get_config
from pi05.config_cli import split_arguments
from pi05.errors import ConfigError, Pi05Error
from pi05.spec import Compute, ModelSpec
from pi05.stack import Finding, Plan, check_stack, find_gpu, make_plan, plan_of, read_tested_ranges

GO, NO_GO, CANNOT_CHECK = 0, 1, 2
MIN_WIDTH = 150  # a file or a pipe counts as 80 columns


def main(arguments: Sequence[str], console: rich.console.Console) -> int:
    """Checks and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a config's name or the path of its file")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="frameworks to check")
    given, rest = parser.parse_known_args(arguments)
    started = time.perf_counter()
    try:
        plan, tested = _plan(given.config, rest), read_tested_ranges()
    except Pi05Error as error:
        console.print(f"cannot check: {error}", style="bold red", markup=False)
        return CANNOT_CHECK
    gpu = find_gpu()
    if gpu is None:
        console.print(
            "cannot check: the NVIDIA driver lists no GPU for this process (no libcuda.so.1, no device, or CUDA_VISIBLE_DEVICES hides it).", style="bold red"
        )
        return CANNOT_CHECK
    findings = check_stack(plan, gpu, tested, frameworks=given.backends)
    return show(findings, f"{time.perf_counter() - started:.0f} s", console)


def show(findings: Sequence[Finding], took: str, console: rich.console.Console) -> int:
    """Prints one table and the verdict; returns GO or NO_GO."""
    table = rich.table.Table("part", "what", "seen", "wanted", "", box=rich.box.SIMPLE_HEAD)
    for number, found in enumerate(findings):
        last = number + 1 == len(findings) or findings[number + 1].section != found.section
        cells = [rich.markup.escape(text) for text in (found.section, found.what, found.seen, found.wanted)]
        table.add_row(*cells, "[bold red]NO-GO" if found.problem else "[green]ok", end_section=last)
    console.print(table)
    problems = [f"{found.section}, {found.what}: {found.problem}" for found in findings if found.problem]
    for problem in problems:
        console.print(problem, style="red", markup=False)
    verdict = f"NO-GO: {len(problems)} of {len(findings)} checks failed" if problems else f"GO: {len(findings)} checks passed"
    console.print(f"{verdict}, {took}", style="bold red" if problems else "bold green", markup=False)
    return NO_GO if problems else GO


def _plan(name: str | None, rest: Sequence[str]) -> Plan:
    surplus, overrides, _ = split_arguments(rest)
    if surplus is not None or (overrides and name is None):
        raise ConfigError(f"{surplus or sorted(overrides)[0]!r} belongs to a config: give its name with --config.")
    if name is not None:
        return plan_of(get_config(name, overrides))
    spec = ModelSpec.pi05()
    return make_plan(spec, Compute(attention="fused"), len(spec.cameras))


if __name__ == "__main__":
    console = rich.console.Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, MIN_WIDTH)
    sys.exit(main(sys.argv[1:], console))
