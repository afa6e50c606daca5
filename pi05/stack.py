"""Can this machine's CUDA stack be trusted with training? Versions as each framework sees them, and attention kernels against float64.

`check_stack` is the gate before production training (scripts/check_cuda_stack.py, docs/cuda-stack.md): each framework runs in a process of its
own, so that neither takes the other's memory or libraries. `check_before_training` is its short form, in the process that is about to train.
The versions that are known to work stand in pyproject.toml, [tool.pi05.tested], which the wheel carries.
"""

import argparse
import concurrent.futures
import ctypes
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pi05 import kernel_check
from pi05.backend import BACKENDS
from pi05.config import TrainConfig
from pi05.errors import ConfigError
from pi05.kernel_check import LIMIT, SCENES, Shape, Verdict, judge, shapes_of
from pi05.spec import Compute, ModelSpec

SCENES_AT_START = ("common key mean", "log-sum-exp < -88", "cotangent on dead rows")  # of a wrong dq, of NaN, of garbage in dead rows
CHILD_SECONDS = 300  # a framework that takes longer hangs
TILE, BAD_REMAINDER = 128, 64  # lengths of which cuDNN 9.19's dq was NaN
PACKAGE = Path(__file__).resolve().parent
LIBRARIES = {"cudnn": "libcudnn.so.", "nvrtc": "libnvrtc.so."}

Range = tuple[str, str]
Run = Callable[..., Mapping]  # of kernel_check.run


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the driver itself says. driver: its version, None where nothing tells it."""

    name: str
    count: int
    driver: str | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will ask of the attention kernels. strategy: of the backends' attention.py."""

    strategy: str
    shapes: tuple[Shape, ...]


@dataclasses.dataclass(frozen=True)
class Probe:
    """What one framework reports from its own process.

    versions: of itself and the libraries that it has loaded, by their name in [tool.pi05.tested]; None: not installed, or not loaded.
    gpu: the device it sees, or None. kernels: verdicts, by shape. failure: why it stopped before its end; empty if it did not.
    """

    framework: str
    versions: Mapping[str, str | None]
    gpu: str | None
    kernels: tuple[tuple[str, Verdict], ...] = ()
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. problem: what is wrong and what to do; empty if nothing is."""

    section: str
    what: str
    seen: str
    wanted: str
    problem: str = ""


def plan_of(config: TrainConfig) -> Plan:
    """What training as `config` says asks of the kernels: the longest prompt, and one of the length that has broken a kernel.

    Raises:
        DataError: the robot's description contradicts itself.
    """
    spec, cameras = config.spec(), config.data.load_robot().cameras
    return make_plan(spec, config.compute, sum(cameras.get(slot) is not None for slot in spec.cameras))


def make_plan(spec: ModelSpec, compute: Compute, cameras: int) -> Plan:
    """As plan_of, for a model that sees `cameras` cameras."""
    over = (spec.prefix_len(cameras, spec.max_token_len) - BAD_REMAINDER) % TILE
    lengths = [length for length in (spec.max_token_len, spec.max_token_len - over) if length > 0]
    shapes = [shape for length in lengths for shape in shapes_of(spec, cameras, length)]
    return Plan(compute.strategy, tuple(dict.fromkeys(shapes)))


def read_tested_ranges(package: Path = PACKAGE) -> dict[str, Range]:
    """Component -> lowest and highest version that are known to work, inclusive; a version is compared to the depth at which they are written.

    package: the folder of pi05, which holds pyproject.toml in a wheel and lies beside it in the repository.

    Raises:
        ConfigError: pyproject.toml is not there or has no such table.
    """
    for path in (package / "pyproject.toml", package.parent / "pyproject.toml"):
        content = tomllib.loads(path.read_text()) if path.is_file() else {}
        if content.get("project", {}).get("name") == "pi05":
            table = content.get("tool", {}).get("pi05", {}).get("tested", {})
            if not table or any(len(ends) != 2 for ends in table.values()):
                raise ConfigError(f"{path}: [tool.pi05.tested] must hold a [lowest, highest] pair for each component. Restore it.")
            return {name: tuple(ends) for name, ends in table.items()}
    raise ConfigError(f"There is no pyproject.toml of pi05 in or beside {package}, so no version is known to work. Install pi05 again.")


def in_range(version: str, ends: Range) -> bool:
    """Whether lowest <= version <= highest, each compared to its own depth: 2.11.3 is in ["2.10", "2.11"], 580.95 in ["570", "580"]."""
    low, high, seen = (tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])) for text in (*ends, version))
    return low <= seen[: len(low)] and seen[: len(high)] <= high


def find_gpu() -> Gpu | None:
    """The first GPU that this process may use, asked of the driver and not of a framework; None where there is none."""
    count, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value or cuda.cuDeviceGetName(name, len(name), 0):
        return None
    return Gpu(name.value.decode(), count.value, _driver_version())


def versions_of(framework: str) -> tuple[dict[str, str | None], str | None]:
    """Probe.versions and Probe.gpu of a framework in this process; imports it."""
    if framework == "torch":
        import torch

        cudnn = torch.backends.cudnn.version()  # as torch sees it, which is what it has linked
        found = {"torch": torch.__version__, "torch-cuda": torch.version.cuda, "cudnn": _cudnn_text(cudnn) if cudnn else None}
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    else:
        import jax
        import jaxlib

        gpu = next((device.device_kind for device in jax.devices() if device.platform == "gpu"), None)  # loads cuDNN and NVRTC
        plugins = {d.name: d.version for d in importlib.metadata.distributions() if re.fullmatch(r"jax-cuda\d+-(plugin|pjrt)", d.name)}
        parts = {f"jax-cuda-{part}": next((plugins[name] for name in sorted(plugins) if name.endswith(part)), None) for part in ("plugin", "pjrt")}
        found = {"jax": jax.__version__, "jaxlib": jaxlib.__version__} | parts | {"cudnn": loaded_version("cudnn")}
    return found | {"nvrtc": loaded_version("nvrtc")}, gpu


def loaded_version(library: str) -> str | None:
    """The version of cuDNN ("cudnn") or NVRTC ("nvrtc") that this process has loaded, told by the library itself; None if it has not."""
    maps = Path("/proc/self/maps")
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if f"/{LIBRARIES[library]}" in line} if maps.is_file() else ()
    for path in sorted(paths):
        loaded = ctypes.CDLL(path)
        if library == "cudnn":
            loaded.cudnnGetVersion.restype = ctypes.c_size_t
            return _cudnn_text(loaded.cudnnGetVersion())
        major, minor = ctypes.c_int(), ctypes.c_int()
        if loaded.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:
            return f"{major.value}.{minor.value}"
    return None


def run_kernels(framework: str, plan: Plan, scenes: Sequence[str] = tuple(SCENES), run: Run = kernel_check.run) -> Iterator[tuple[str, Verdict]]:
    """(shape, verdict) of forward and backward pass, for every shape and scene, in this process. run: what computes them."""
    for shape in plan.shapes:
        for scene in scenes:
            yield str(shape), judge(functools.partial(run, framework, plan.strategy), scene, shape)


def probe_framework(framework: str, plan: Plan, *, on_cpu: bool = False, seconds: float = CHILD_SECONDS) -> Probe:
    """Versions and kernels of a framework, from a process of its own; whatever stops that one is the probe's `failure`.

    on_cpu: runs the kernels where it sees no GPU, too.
    """
    shapes = json.dumps([dataclasses.asdict(shape) for shape in plan.shapes])
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # JAX and torch share the card here
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "probe.jsonl"
        out.touch()
        command = [sys.executable, "-m", "pi05.stack", framework, plan.strategy, shapes, str(out), *(["--on-cpu"] if on_cpu else [])]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            failure = "" if done.returncode == 0 else f"its process ended with {done.returncode}: {last}"
        except subprocess.TimeoutExpired:
            failure = f"its process did not end within {seconds:.0f} s: a kernel or the driver hangs"
        return read_probe(framework, out.read_text(), failure)


def read_probe(framework: str, lines: str, failure: str) -> Probe:
    """The probe that the child process has written down, as far as it came. failure: what is known of its end, unless it says so itself."""
    versions, gpu, kernels = {}, None, []
    for line in lines.splitlines():
        entry = json.loads(line)
        if "versions" in entry:
            versions, gpu = entry["versions"], entry["gpu"]
        elif "failure" in entry:
            failure = entry["failure"]
        else:
            kernels.append((entry["shape"], Verdict(**entry["verdict"])))
    return Probe(framework, versions, gpu, tuple(kernels), failure)


def judge_versions(probe: Probe, tested: Mapping[str, Range], *, needs_gpu: bool = True) -> list[Finding]:
    """Whether the versions that a framework sees are tested ones, and whether it is made for a GPU and sees one."""
    section, findings = f"{probe.framework} versions", []
    for name, version in probe.versions.items():
        problem = _missing(name) if needs_gpu and version is None else ""
        if version is not None and not in_range(version, tested[name]):
            problem = f"{name} {version} is outside the tested {_range_text(tested[name])}. {UNTESTED}"
        if name.startswith("jax-cuda") and version is not None and version != probe.versions["jaxlib"]:
            problem = f"{name} {version} is not for jaxlib {probe.versions['jaxlib']}, so JAX may ignore it. Install the same version of both."
        absent = "not loaded" if name in LIBRARIES else "none"
        findings.append(Finding(section, name, version or absent, _range_text(tested[name]), problem))
    if needs_gpu and probe.versions:
        blind = f"{probe.framework} sees no GPU although the driver has one. Look for a CPU wheel above, JAX_PLATFORMS and CUDA_VISIBLE_DEVICES."
        findings.append(Finding(section, "device", probe.gpu or "none", "a GPU", "" if probe.gpu else blind))
    return findings


def judge_kernels(probe: Probe, plan: Plan) -> list[Finding]:
    """Whether every scene was computed, and as exactly as plain bfloat16 attention, in every shape."""
    section, findings = f"{probe.framework} kernels", []
    for shape in map(str, plan.shapes):
        verdicts = [verdict for name, verdict in probe.kernels if name == shape]
        worst = max(verdicts, key=lambda verdict: (not verdict.safe, verdict.ratio), default=None)
        seen = f"{len(verdicts)} of {len(SCENES)} scenes" + (f", worst {worst.ratio:.2f} ({worst.where}, {worst.scene})" if worst else "")
        problem = "" if len(verdicts) == len(SCENES) else "not every scene was computed, so nothing is known of this shape."
        if unsafe := [verdict for verdict in verdicts if not verdict.safe]:
            problem = "; ".join(f"{verdict.scene}: {verdict.reason}" for verdict in unsafe)
        findings.append(Finding(section, f"{plan.strategy} {shape}", seen, f"at most {LIMIT:.2f}", problem))
    if probe.failure:
        findings.append(Finding(section, "process", "stopped", "runs to its end", f"{probe.framework}: {probe.failure}"))
    return findings


def check_stack(
    plan: Plan,
    gpu: Gpu,
    tested: Mapping[str, Range],
    *,
    frameworks: Sequence[str] = BACKENDS,
    probe: Callable[[str, Plan], Probe] = probe_framework,
) -> list[Finding]:
    """The whole gate; all frameworks at once. GO means that no finding has a problem. probe: how a framework is asked."""
    driver = gpu.driver or "unknown"
    known = gpu.driver is not None and in_range(gpu.driver, tested["driver"])
    wrong = f"driver {driver} is outside the tested {_range_text(tested['driver'])}. {UNTESTED}"
    findings = [Finding("driver", f"{gpu.count} x {gpu.name}", driver, _range_text(tested["driver"]), "" if known else wrong)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for found in pool.map(lambda framework: probe(framework, plan), frameworks):
            findings += judge_versions(found, tested) + judge_kernels(found, plan)
    return findings


def check_before_training(
    config: TrainConfig, backend_name: str, data_cameras: int, token_len: int, *, tested: Mapping[str, Range] | None = None, run: Run = kernel_check.run
) -> list[str]:
    """Warnings to print before a run's first step: versions outside the tested ranges, and what `allow_unsafe` lets through.

    With fused attention (whose backend has found its GPU) it also runs the most dangerous scenes at the run's shapes, which takes seconds.

    data_cameras, token_len: how many cameras a sample has, and how long its text can be. tested: None takes pyproject.toml's. run: what
        computes attention.

    Raises:
        ConfigError: a kernel is wrong, or stops.
        SpecError: this GPU or these libraries have no such kernel.
    """
    found = judge_versions(Probe(backend_name, *versions_of(backend_name)), tested or read_tested_ranges(), needs_gpu=False)
    warnings = [f"warning: {finding.problem}" for finding in found if finding.problem]
    if config.compute.attention != "fused":
        return warnings
    plan = Plan(config.compute.strategy, tuple(shapes_of(config.spec(), data_cameras, token_len)))
    cure = "Set compute.attention to explicit, and find out why with scripts/check_cuda_stack.py (docs/cuda-stack.md)."
    try:
        for shape, verdict in run_kernels(backend_name, plan, SCENES_AT_START, run):
            text = f"compute.attention is 'fused', whose {backend_name} kernel is wrong here ({shape}, {verdict.scene}): {verdict.reason}."
            if not verdict.safe and not (plan.strategy == "fused_bfloat16" and math.isfinite(verdict.ratio)):
                raise ConfigError(f"{text} {cure}")
            warnings += [] if verdict.safe else [f"warning: {text} compute.allow_unsafe lets it train."]
    except RuntimeError as error:  # of either framework: no plan, no memory, a fault on the device
        raise ConfigError(f"compute.attention is 'fused', whose {backend_name} kernel stopped: {error}. {cure}") from error
    return warnings


UNTESTED = "Run `pytest parity --device cuda` with it, then widen [tool.pi05.tested] in pyproject.toml, or install a tested version."


def _missing(name: str) -> str:
    if name == "torch-cuda":
        return "this torch is a CPU wheel. Install one for CUDA (https://pytorch.org/get-started)."
    return f"{name} is not installed, so this JAX computes on the CPU. Install pi05[cuda]." if name.startswith("jax-cuda") else ""


def _range_text(ends: Range) -> str:
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _cudnn_text(number: int) -> str:
    """91900 -> 9.19.0; before version 9, 8907 -> 8.9.7."""
    major, rest = divmod(number, 10_000 if number >= 10_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _driver_version() -> str | None:
    text = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    failed = nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    return None if failed else text.value.decode()


def _child(arguments: Sequence[str]) -> None:
    """The process that probe_framework starts: writes one JSON object a line, so that what was found before a crash is known."""
    parser = argparse.ArgumentParser(prog="pi05.stack", description="a part of scripts/check_cuda_stack.py")
    for name in ("framework", "strategy", "shapes", "out"):
        parser.add_argument(name)
    parser.add_argument("--on-cpu", action="store_true")
    given = parser.parse_args(arguments)
    plan = Plan(given.strategy, tuple(Shape(**sizes) for sizes in json.loads(given.shapes)))
    with Path(given.out).open("w", buffering=1) as file:
        versions, gpu = versions_of(given.framework)
        file.write(json.dumps({"versions": versions, "gpu": gpu}) + "\n")
        if gpu is None and not given.on_cpu:
            return
        try:
            for shape, verdict in run_kernels(given.framework, plan):
                file.write(json.dumps({"shape": shape, "verdict": dataclasses.asdict(verdict)}) + "\n")
        except Exception as error:
            file.write(json.dumps({"failure": textwrap.shorten(f"{type(error).__name__}: {error}", 600)}) + "\n")
            raise
        file.write(json.dumps({"versions": versions_of(given.framework)[0], "gpu": gpu}) + "\n")  # kernels have loaded more libraries


if __name__ == "__main__":
    _child(sys.argv[1:])
