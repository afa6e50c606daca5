"""python -m parity.goldens [--write REASON]: derives the goldens anew and shows how the files differ. Status 1 if they do."""

import argparse
import os
import sys

from rich.console import Console
from rich.table import Table

from pi05.errors import DataError

from ..session import configure


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if the files are what the reference says (now, with --write), else 1."""
    parser = argparse.ArgumentParser(prog="python -m parity.goldens", description=__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="derive, compare, change nothing (the default)")
    choice.add_argument("--write", metavar="REASON", help="replace the files; REASON goes into the manifest's history")
    options = parser.parse_args(arguments)
    configure()
    from .derive import DERIVATIONS, derive, input_hashes
    from .store import FOLDER, LIMIT, differences, limits, read_goldens, read_manifest, write_goldens

    console, stored, problems = Console(), {}, []
    for level in DERIVATIONS:
        try:
            stored[level] = read_goldens(level)
        except (DataError, FileNotFoundError) as error:
            problems.append(f"{level}: {error}")
    made = write_goldens(options.write) if options.write else {level: derive(level) for level in DERIVATIONS}
    table = Table("golden", "tensors", "differ", "largest difference", "where", title=f"files in {FOLDER} against the reference, limit {LIMIT:.0e}")
    differ = 0
    for level, derived in made.items():
        changed = differences(stored.get(level, {}), derived)
        where, worst = next(iter(changed.items()), ("", 0.0))
        differ += len(changed)
        table.add_row(level, str(len(derived)), str(len(changed)), f"{worst:.1e}", where)
    console.print(table)
    if not options.write and (FOLDER / "manifest.json").is_file():
        known = read_manifest()
        problems += [f"inputs of {name} are not those of the manifest" for name, parts in input_hashes().items() if parts != known["inputs"].get(name)]
        problems += [] if limits() == known["tolerances"] else ["the limits of tolerances.py are not those of the manifest"]
    for problem in problems:
        console.print(problem, style="yellow" if options.write else "red", markup=False)
    if options.write:
        console.print(f"written: {sum(path.stat().st_size for path in FOLDER.glob('*.safetensors')) / 1e6:.2f} MB")
        return 0
    return 1 if differ or problems else 0


if __name__ == "__main__":
    if "OPENBLAS_NUM_THREADS" not in os.environ:  # NumPy is loaded already, and small complex products are 7 times slower with threads
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    sys.exit(main())
