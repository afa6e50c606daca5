"""The gate before training: what it lets through, and that each of its parts can say no."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import rich.console

from pi05 import kernel_check
from pi05.config import TrainConfig, get_config
from pi05.config_cli import RunFlags
from pi05.errors import ConfigError, SpecError
from pi05.kernel_check import SCENES, Scene, Shape, Verdict, shapes_of
from pi05.spec import Compute, ModelSpec
from pi05.stack import (
    SCENES_AT_START,
    Finding,
    Gpu,
    Plan,
    Probe,
    check_before_training,
    check_stack,
    in_range,
    judge_kernels,
    judge_versions,
    make_plan,
    plan_of,
    probe_framework,
    read_probe,
    read_tested_ranges,
    run_kernels,
    versions_of,
)
from pi05.train import train

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "check_cuda_stack.py"
PLAN = Plan("explicit", (Shape(24, 24, 4, 2, 16), Shape(5, 24, 4, 2, 16)))
GPU = Gpu("NVIDIA H200", 1, "580.159.04")
VERSIONS = {
    "torch": {"torch": "2.11.0+cu130", "torch-cuda": "13.0", "cudnn": "9.19.0", "nvrtc": "13.0"},
    "jax": {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda-plugin": "0.11.2", "jax-cuda-pjrt": "0.11.2", "cudnn": "9.19.0", "nvrtc": None},
}


def healthy(framework: str, plan: Plan) -> Probe:
    """What a probe reports where all is well."""
    verdicts = tuple((str(shape), Verdict(scene, 1.0, "dq", "")) for shape in plan.shapes for scene in SCENES)
    return Probe(framework, VERSIONS[framework], "NVIDIA H200", verdicts)


def with_versions(framework: str, **changes: str | None) -> Probe:
    return dataclasses.replace(healthy(framework, PLAN), versions=VERSIONS[framework] | {name.replace("_", "-"): value for name, value in changes.items()})


def problems(findings: list[Finding]) -> dict[str, str]:
    return {found.what: found.problem for found in findings if found.problem}


def spoiled(tensor: str, value: Callable[[np.ndarray], None]) -> Callable:
    """A kernel that is right but for what `value` does to one of its results."""

    def run(framework: str, strategy: str, scene: Scene) -> dict[str, np.ndarray]:
        got = kernel_check.exact_attention(scene)
        value(got[tensor])
        return got

    return run


def put(place: tuple, number: float) -> Callable[[np.ndarray], None]:
    return lambda array: array.__setitem__(place, number)


GARBAGE = {
    "random dq": ("dq", put(..., 170.0)),
    "NaN": ("dk", put((0, 0, 0, 0), np.nan)),
    "dq of a dead row": ("dq", put((1, -1, 0, 0), 1e-30)),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.util.spec_from_file_location("check_cuda_stack", SCRIPT)
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


@pytest.fixture
def console() -> rich.console.Console:
    return rich.console.Console(width=200, record=True, file=open(os.devnull, "w"), soft_wrap=True)


# The tested ranges


def test_the_tested_ranges_are_the_same_in_the_repository_and_in_a_wheel(tmp_path: Path) -> None:
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]["pyproject.toml"]
    installed = tmp_path / "site-packages" / target
    installed.parent.mkdir(parents=True)
    installed.write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / "site-packages" / "pyproject.toml").write_text('[project]\nname = "other"\n[tool.pi05.tested]\ntorch = ["0", "99"]\n')
    assert read_tested_ranges(tmp_path / "site-packages" / "pi05") == read_tested_ranges()
    installed.unlink()
    with pytest.raises(ConfigError, match="Install pi05 again"):  # not another project's
        read_tested_ranges(tmp_path / "site-packages" / "pi05")


@pytest.mark.parametrize("table", ["", '[tool.pi05.tested]\ntorch = ["2.11"]\n'])
def test_a_table_that_says_nothing_is_refused(tmp_path: Path, table: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "pi05"\n{table}')
    with pytest.raises(ConfigError, match=r"tool\.pi05\.tested"):
        read_tested_ranges(tmp_path)


def test_what_uv_installs_is_tested_and_every_component_has_a_range() -> None:
    tested, pins = read_tested_ranges(), tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    versions = dict(pin.split("==") for pin in pins)
    assert all(in_range(versions[name], tested[name]) for name in ("torch", "jax", "jaxlib"))
    for framework, known in VERSIONS.items():
        versions, _ = versions_of(framework)
        assert set(versions) == set(known) <= set(tested) and versions[framework]


@pytest.mark.parametrize(
    ("version", "ends", "inside"),
    [
        ("2.11.3", ("2.10", "2.11"), True),
        ("2.11.0+cu130", ("2.11", "2.11"), True),
        ("2.9.1", ("2.10", "2.11"), False),  # as numbers, not as text
        ("2.12.0", ("2.10", "2.11"), False),
        ("3.0", ("2.10", "2.11"), False),
        ("580.159.04", ("580", "580"), True),
        ("570.1", ("580", "590"), False),
        ("9.26.0", ("9.19", "9.19"), False),
        ("2.12.0.dev20261201+cu130", ("2.11", "2.11"), False),
        ("2", ("2.11", "2.11"), False),
    ],
)
def test_versions_are_compared_to_the_depth_of_the_range(version: str, ends: tuple[str, str], inside: bool) -> None:
    assert in_range(version, ends) is inside


# Versions


@pytest.mark.parametrize("framework", VERSIONS)
def test_tested_versions_pass(framework: str) -> None:
    findings = judge_versions(healthy(framework, PLAN), read_tested_ranges())
    assert not problems(findings) and {found.what for found in findings} == {*VERSIONS[framework], "device"}


@pytest.mark.parametrize(
    ("framework", "name", "version"),
    [("torch", "torch", "2.12.0+cu130"), ("torch", "torch-cuda", "12.8"), ("torch", "cudnn", "9.26.0"), ("torch", "nvrtc", "13.1")]
    + [("jax", "jax", "0.12.0"), ("jax", "jaxlib", "0.10.1"), ("jax", "jax-cuda-pjrt", "0.12.0"), ("jax", "cudnn", "9.12.0")],
)
def test_an_untested_version_is_refused_by_name(framework: str, name: str, version: str) -> None:
    found = problems(judge_versions(with_versions(framework, **{name: version}), read_tested_ranges()))
    assert name in found and (found.keys() == {name} or name == "jaxlib")  # another jaxlib fits the plugins no more
    assert version in found[name]


def test_a_cpu_wheel_is_refused() -> None:
    torch = dataclasses.replace(with_versions("torch", torch="2.11.0+cpu", torch_cuda=None, cudnn=None, nvrtc=None), gpu=None)
    found = problems(judge_versions(torch, read_tested_ranges()))
    assert found.keys() == {"torch-cuda", "device"} and "CPU wheel" in found["torch-cuda"]
    jax = dataclasses.replace(with_versions("jax", jax_cuda_plugin=None, jax_cuda_pjrt=None, cudnn=None), gpu=None)
    found = problems(judge_versions(jax, read_tested_ranges()))
    assert found.keys() == {"jax-cuda-plugin", "jax-cuda-pjrt", "device"} and "pi05[cuda]" in found["jax-cuda-plugin"]


def test_a_plugin_for_another_jaxlib_is_refused() -> None:
    found = problems(judge_versions(with_versions("jax", jax_cuda_plugin="0.11.1"), read_tested_ranges()))  # within the tested range
    assert found.keys() == {"jax-cuda-plugin"} and "jaxlib 0.11.2" in found["jax-cuda-plugin"]


def test_a_framework_that_does_not_see_the_gpu_is_refused() -> None:
    found = problems(judge_versions(dataclasses.replace(healthy("jax", PLAN), gpu=None), read_tested_ranges()))
    assert found.keys() == {"device"} and "JAX_PLATFORMS" in found["device"]


# Kernels


def test_the_plan_has_the_shapes_of_the_config_and_the_dangerous_length() -> None:
    spec = ModelSpec.pi05()
    plan = make_plan(spec, Compute(attention="fused"), 3)
    assert plan.strategy == "fused_float16" and set(plan.shapes) == {*shapes_of(spec, 3, 200), *shapes_of(spec, 3, 192)}
    assert [shape.keys % 128 for shape in plan.shapes if shape.queries == shape.keys and shape.padded] == [72, 64]
    config = get_config("tiny", {"data.cameras.base_0_rgb": "null"})
    cameras = len(config.data.load_robot().cameras)
    assert plan_of(config) == make_plan(config.spec(), config.compute, cameras) and plan_of(config).strategy == "explicit"
    assert plan_of(config).shapes[0].keys == config.spec().prefix_len(cameras, config.spec().max_token_len)


def test_honest_kernels_pass() -> None:
    probe = Probe("torch", VERSIONS["torch"], "a GPU", tuple(run_kernels("torch", PLAN)))
    findings = judge_kernels(probe, PLAN)
    assert len(probe.kernels) == len(PLAN.shapes) * len(SCENES) and not problems(findings)
    assert [found.what for found in findings] == [f"explicit {shape}" for shape in PLAN.shapes]


@pytest.mark.parametrize("name", GARBAGE)
def test_a_kernel_that_returns_garbage_is_refused(name: str) -> None:
    tensor, value = GARBAGE[name]
    plan = Plan("fused_float16", PLAN.shapes[:1])
    found = problems(judge_kernels(Probe("jax", {}, "a GPU", tuple(run_kernels("jax", plan, run=spoiled(tensor, value)))), plan))
    assert found.keys() == {f"fused_float16 {PLAN.shapes[0]}"} and tensor in next(iter(found.values()))


def test_a_scene_that_was_not_computed_is_refused() -> None:
    probe = healthy("torch", PLAN)
    found = problems(judge_kernels(dataclasses.replace(probe, kernels=probe.kernels[:-1]), PLAN))
    assert found.keys() == {f"explicit {PLAN.shapes[1]}"} and "not every scene" in next(iter(found.values()))
    assert len(problems(judge_kernels(dataclasses.replace(probe, kernels=()), PLAN))) == len(PLAN.shapes)


def test_a_process_that_stopped_is_refused_though_all_was_written() -> None:
    assert problems(judge_kernels(dataclasses.replace(healthy("torch", PLAN), failure="its process ended with -11"), PLAN)).keys() == {"process"}


# The processes


def test_a_framework_is_probed_in_a_process_of_its_own() -> None:
    plan = Plan("explicit", PLAN.shapes[1:])
    probe = probe_framework("torch", plan, on_cpu=True)
    assert not probe.failure and probe.versions == versions_of("torch")[0]
    assert not problems(judge_kernels(probe, plan))


def test_what_stops_a_process_is_reported_with_what_it_had_found() -> None:
    probe = probe_framework("jax", Plan("fused_float16", PLAN.shapes[:1]), on_cpu=True)
    if probe.gpu is None:  # on a GPU it passes
        assert probe.versions["jax"] and probe.failure.startswith("SpecError: compute.attention is 'fused'") and not probe.kernels


def test_a_process_that_hangs_is_ended() -> None:
    assert "did not end within" in probe_framework("torch", PLAN, seconds=0.01).failure


def test_a_probe_is_read_as_far_as_it_came() -> None:
    lines = '{"versions": {"torch": "2.11.0"}, "gpu": "x"}\n{"shape": "s", "verdict": {"scene": "gauss", "ratio": Infinity, "where": "dq", "reason": "NaN"}}\n'
    assert read_probe("torch", lines, "f") == Probe("torch", {"torch": "2.11.0"}, "x", (("s", Verdict("gauss", np.inf, "dq", "NaN")),), "f")


# The whole gate


def test_all_well_is_go(script: ModuleType, console: rich.console.Console) -> None:
    findings = check_stack(PLAN, GPU, read_tested_ranges(), probe=healthy)
    assert script.show(findings, "1 s", console) == 0
    text = console.export_text()
    assert f"GO: {len(findings)} checks passed" in text and "NO-GO" not in text
    assert all(part in text for part in ("580.159.04", "2.11.0+cu130", "jax-cuda-plugin", "T=24 S=24"))


@pytest.mark.parametrize("part", ["driver", "driver unknown", "version", "kernel", "process"])
def test_each_part_alone_makes_it_no_go(script: ModuleType, console: rich.console.Console, part: str) -> None:
    def probe(framework: str, plan: Plan) -> Probe:
        probe = healthy(framework, plan)
        if framework == "torch":
            return probe
        bad = ((str(plan.shapes[0]), Verdict("sharp", 9.0, "dk", "the error of dk is 9.0 times [too] large")), *probe.kernels[1:])
        changes = {"version": {"versions": VERSIONS["jax"] | {"cudnn": "9.12.0"}}, "kernel": {"kernels": bad}, "process": {"failure": "ended with -11"}}
        return dataclasses.replace(probe, **changes.get(part, {}))

    gpu = dataclasses.replace(GPU, driver={"driver": "570.1", "driver unknown": None}.get(part, GPU.driver))
    findings = check_stack(PLAN, gpu, read_tested_ranges(), probe=probe)
    assert script.show(findings, "1 s", console) == 1
    assert f"NO-GO: 1 of {len(findings)} checks failed" in console.export_text()


def test_only_the_frameworks_that_were_asked_for_are_probed() -> None:
    findings = check_stack(PLAN, GPU, read_tested_ranges(), frameworks=["jax"], probe=healthy)
    assert {found.section for found in findings} == {"driver", "jax versions", "jax kernels"}


def test_without_a_gpu_it_cannot_check() -> None:
    command = [sys.executable, str(SCRIPT), "--config", "tiny"]
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cannot check: the NVIDIA driver lists no GPU" in done.stdout


@pytest.mark.parametrize("arguments", [["--config", "tinny"], ["--compute.attention", "fused"], ["--config", "tiny", "more"]])
def test_without_a_config_that_exists_it_cannot_check(script: ModuleType, console: rich.console.Console, arguments: list[str]) -> None:
    assert script.main(arguments, console) == 2
    assert console.export_text().startswith("cannot check: ")


# The start of training


@pytest.fixture
def fused() -> TrainConfig:
    return get_config("tiny", {"compute.attention": "fused", "device": "auto"})


def refuse(*arguments: object) -> None:
    raise AssertionError("no kernel runs here")


def test_explicit_attention_is_trained_without_a_check_of_kernels() -> None:
    assert check_before_training(get_config("tiny"), "torch", 2, 32, run=refuse) == []


def test_an_untested_version_is_a_warning() -> None:
    (line,) = check_before_training(get_config("tiny"), "torch", 2, 32, tested=read_tested_ranges() | {"torch": ("2.9", "2.10")}, run=refuse)
    assert line.startswith("warning: torch 2.11") and "2.9 to 2.10" in line


def test_honest_fused_kernels_are_trained_with(fused: TrainConfig) -> None:
    ran = []

    def run(backend: str, strategy: str, scene: Scene) -> dict[str, np.ndarray]:
        ran.append((backend, strategy, scene.name, scene.q.shape[0], scene.k.shape[1]))
        return kernel_check.plain_attention(scene)

    assert check_before_training(fused, "torch", 2, 32, run=run) == []
    keys = [shape.keys for shape in shapes_of(fused.spec(), 2, 32)]
    assert ran == [("torch", "fused_float16", scene, 2, key) for key in keys for scene in SCENES_AT_START]


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_stops_training_and_names_the_switch(fused: TrainConfig, name: str) -> None:
    with pytest.raises(ConfigError, match=r"compute\.attention is 'fused', whose jax kernel is wrong here .* Set compute\.attention to explicit"):
        check_before_training(fused, "jax", 2, 32, run=spoiled(*GARBAGE[name]))


def test_a_kernel_that_stops_stops_training_and_names_the_switch(fused: TrainConfig) -> None:
    def stop(*arguments: object) -> None:
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    with pytest.raises(ConfigError, match=r"compute\.attention is 'fused', .* CUDNN_STATUS_EXECUTION_FAILED.* Set compute\.attention to explicit"):
        check_before_training(fused, "torch", 2, 32, run=stop)

    def lack(*arguments: object) -> None:
        raise SpecError("there is no such kernel")

    with pytest.raises(SpecError, match="^there is no such kernel$"):  # a backend's own words stand
        check_before_training(fused, "torch", 2, 32, run=lack)


def test_bfloat16_is_warned_of_where_it_is_allowed_and_nan_is_never(fused: TrainConfig) -> None:
    compute = {"compute.attention": "fused", "compute.attention_dtype": "bfloat16", "compute.allow_unsafe": "true", "device": "auto"}
    config = get_config("tiny", compute)
    lines = check_before_training(config, "torch", 2, 32, run=spoiled("dq", put((0, 0, 0, 0), 5.0)))
    assert len(lines) == 3 * len(SCENES_AT_START) and all("allow_unsafe" in line for line in lines)
    with pytest.raises(ConfigError, match="not finite"):
        check_before_training(config, "torch", 2, 32, run=spoiled("dq", put((0, 0, 0, 0), np.nan)))


def test_training_asks_before_it_makes_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def check(config: TrainConfig, backend: str, cameras: int, token_len: int) -> list[str]:
        asked.append((config.name, backend, cameras, token_len))
        raise ConfigError("refused")

    monkeypatch.setattr("pi05.train.check_before_training", check)
    config = get_config("tiny", {"checkpoint_dir": str(tmp_path), "backend": "torch", "data.num_workers": "0"})
    with pytest.raises(ConfigError, match="refused"):
        train(config, RunFlags(), rich.console.Console(quiet=True))
    assert asked == [("tiny", "torch", len(config.data.load_robot().cameras), config.spec().max_token_len)] and not list(tmp_path.iterdir())
