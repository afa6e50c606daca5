"""What a person sees of a run: lines, TensorBoard, Weights & Biases, pictures."""

import dataclasses
import io
import math
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import rich.console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pi05.batch import AugmentDraws, Batch, Draws
from pi05.metrics import FILE, read_log
from pi05.plots import first_batch_sheet, loss_curve_png
from pi05.sinks import ConsoleSink, TensorBoardSink, WandbSink, format_seconds, make_scalars
from tests.test_metrics import DRAWS, SPEC, Clock, add, feed, make_batch, open_log

NAN = math.nan


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    return {tag: [(event.step, float(event.tensor_proto.float_val[0])) for event in accumulator.Tensors(tag)] for tag in accumulator.Tags()["tensors"]}


def make_console(*, terminal: bool) -> tuple[rich.console.Console, io.StringIO]:
    out = io.StringIO()
    return rich.console.Console(file=out, force_terminal=terminal, width=160, color_system=None), out


def test_tensorboard_has_every_loss_and_names_what_it_counts(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tb", loss_dims="real", dim_names=["dx", "dy"])
    with open_log(tmp_path, sinks=[sink], max_bad_steps=9, loss_dims="real") as log:
        for step in range(1, 11):
            add(log, step, NAN if step == 4 else step / 4, param_norm=np.float32(3) if step % 5 == 0 else None)
        log.add_evaluation(10, {"action_mse": 0.5})
    events = read_events(tmp_path / "tb")
    assert [step for step, _ in events["loss/real"]] == list(range(1, 11))
    np.testing.assert_array_equal([value for _, value in events["loss/real"]], [NAN if step == 4 else step / 4 for step in range(1, 11)])
    np.testing.assert_allclose([value for _, value in events["optimizer/lr"]], [step / 1000 for step in range(1, 11)], rtol=1e-6)
    assert events["optimizer/param_norm"] == [(5, 3.0), (10, 3.0)]
    assert events["loss_by_dim/01_dy"] == [(5, 1.25), (10, 2.5)] and f"loss_by_dim/{SPEC.action_dim - 1:02d}" in events
    assert [step for step, _ in events["speed/data_wait"]] == [5, 10]
    assert events["evaluation/action_mse"] == [(10, 0.5)]


def test_tensorboard_of_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    def open_again(resumed: int) -> Any:
        return open_log(tmp_path, resumed_step=resumed, sinks=[TensorBoardSink(tmp_path / "tb", loss_dims="model")])

    with open_again(0) as log:
        for step in range(1, 8):
            add(log, step, step)
        log.add_evaluation(7, {"action_mse": 0.5})
    feed(open_again(4), [50.0, 60.0], first=5)
    events = read_events(tmp_path / "tb")
    assert events["loss/model"] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50), (6, 60)]
    assert "evaluation/action_mse" not in events


def test_without_a_terminal_each_logging_step_is_one_line(tmp_path: Path) -> None:
    console, out = make_console(terminal=False)
    clock = Clock()
    with open_log(tmp_path, clock=clock, sinks=[ConsoleSink(console, 10, loss_name="loss (model dims)")]) as log:
        for step in range(1, 11):
            clock.now += 2
            add(log, step, step, 0.1 * step)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == "step 5/10  loss (model dims) 3.0000  lr 5.00e-03  1.0 samples/s  data wait 5%  ETA 0:10"
    assert lines[1].startswith("step 10/10  loss (model dims) 8.0000") and lines[1].endswith("ETA 0:00")


def test_the_console_shows_bad_steps_slow_data_and_evaluations(tmp_path: Path) -> None:
    console, out = make_console(terminal=False)
    clock = Clock()
    with open_log(tmp_path, clock=clock, max_bad_steps=9, sinks=[ConsoleSink(console, 10)]) as log:
        for step in range(1, 11):
            clock.now += 1
            add(log, step, NAN if step == 3 else 1.0, 0.5 * step)
        log.add_evaluation(10, {"action_mse": 0.12345})
    lines = out.getvalue().splitlines()
    assert [line for line in lines if "not finite" in line] == ["step 3: not finite, nothing was learned from it: loss nan, gradient norm 2.0"]
    assert any(line.startswith("step 5/10  loss nan") for line in lines) and any(line.startswith("step 10/10  loss 1.0000") for line in lines)
    assert len([line for line in lines if line.startswith("50% of the time is spent waiting for data: raise data.num_workers")]) == 1  # not every time
    assert lines[-1] == "step 10: action_mse 0.1235"


def test_in_a_terminal_a_bar_follows_every_step(tmp_path: Path) -> None:
    console, out = make_console(terminal=True)
    with open_log(tmp_path, sinks=[ConsoleSink(console, 10)], delay=0) as log:
        add(log, 1, 0.5)
        add(log, 2, 0.25)
    text = out.getvalue()  # the last refresh at least
    assert "step 2/10  loss 0.2500" in text and "ETA" in text and text.count("\n") < 5
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back: the bar has ended


def test_seconds_are_shown_as_a_clock() -> None:
    assert [format_seconds(value) for value in (0, 59.6, 3723, NAN, math.inf)] == ["0:00", "1:00", "1:02:03", "?", "?"]


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.finished, self.axis = False, None
        self.gate: threading.Event | None = None

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axis = (name, step_metric)

    def log(self, values: dict[str, Any]) -> None:
        if self.gate:
            self.gate.wait(30)
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A wandb that keeps what it is given."""
    fake = types.SimpleNamespace(run=FakeRun(), options={}, mode="online", logged_in=True, Settings=lambda **settings: settings)

    def init(**options: Any) -> FakeRun:
        fake.options |= options
        return fake.run

    fake.init, fake.login = init, lambda *, prompt, verify: fake.logged_in and not prompt and not verify
    fake.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode=fake.mode))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def make_wandb_sink(folder: Path, warnings: list[str], **options: Any) -> WandbSink:
    names = {"project": "pi05", "entity": None, "name": "tiny/run", "run_id": "tiny-run", "config": {"seed": 1}, "loss_dims": "model"}
    return WandbSink(folder, **names, warn=warnings.append, **options)


def test_wandb_gets_every_step_on_an_axis_that_a_resumed_run_can_repeat(tmp_path: Path, wandb: types.SimpleNamespace) -> None:
    warnings: list[str] = []
    with open_log(tmp_path, sinks=[make_wandb_sink(tmp_path, warnings)], max_bad_steps=9) as log:
        for step in range(1, 6):
            add(log, step, NAN if step == 2 else step)
        log.add_evaluation(5, {"action_mse": 0.5})
    assert [values["step"] for values in wandb.run.logged] == [1, 2, 3, 4, 5, 5] and wandb.run.finished and warnings == []
    np.testing.assert_array_equal([values["loss/model"] for values in wandb.run.logged[:5]], [1, NAN, 3, 4, 5])
    assert wandb.run.logged[5] == {"step": 5, "evaluation/action_mse": 0.5} and wandb.run.axis == ("*", "step")
    assert {name: wandb.options[name] for name in ("project", "id", "resume", "config", "dir")} == {
        "project": "pi05",
        "id": "tiny-run",
        "resume": "allow",
        "config": {"seed": 1},
        "dir": str(tmp_path),
    }


def test_a_run_neither_waits_for_wandb_nor_forgets_to_say_so(tmp_path: Path, wandb: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi05.sinks.WANDB_QUEUE", 3)
    wandb.run.gate, warnings = threading.Event(), []
    feed(open_log(tmp_path, sinks=[make_wandb_sink(tmp_path, warnings, finish_seconds=0.1)]), [0.5] * 10)  # would hang if it waited
    assert wandb.run.logged == [] and len(read_log(tmp_path / FILE)) == 10
    assert "not taken everything within 0.1 s" in warnings[0] and "records are missing there" in warnings[1]
    wandb.run.gate.set()


@pytest.mark.parametrize("where", ["import", "init", "log"])
def test_a_failing_wandb_is_a_warning(tmp_path: Path, wandb: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no such host")

    if where == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        monkeypatch.setattr(wandb if where == "init" else wandb.run, where, fail)
    warnings: list[str] = []
    feed(open_log(tmp_path, sinks=[make_wandb_sink(tmp_path, warnings)]), [0.5] * 10)
    assert len(read_log(tmp_path / FILE)) == 10
    assert len(warnings) == 1 and warnings[0].startswith("wandb is off for this run (") and ("no such host" in warnings[0] or where == "import")


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb_is_never_asked_to_prompt_for_a_login(tmp_path: Path, wandb: types.SimpleNamespace, mode: str) -> None:
    wandb.mode, wandb.logged_in, warnings = mode, False, []
    feed(open_log(tmp_path, sinks=[make_wandb_sink(tmp_path, warnings)]), [0.5] * 3)
    if mode == "online":
        assert wandb.options == {} and len(warnings) == 1 and "run `wandb login`, or set WANDB_MODE=offline" in warnings[0]
    else:
        assert len(wandb.run.logged) == 3 and warnings == []


def test_scalars_name_dims_as_far_as_the_robot_has_them() -> None:
    scalars = make_scalars({"step": 1, "loss": 1.0, "lr": 0.1, "grad_norm": 2.0, "per_dim": [0.5, 0.25]}, "model", ["x"])
    assert scalars == {"loss/model": 1.0, "optimizer/lr": 0.1, "optimizer/grad_norm": 2.0, "loss_by_dim/00_x": 0.5, "loss_by_dim/01": 0.25}


def read_png(path: Path) -> np.ndarray:
    with PIL.Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def ink(picture: np.ndarray, colour: str) -> int:
    """Pixels of just that colour."""
    want = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((picture == want).all(-1).sum())


def test_a_loss_curve_is_drawn_with_the_difference_of_two_runs_below(tmp_path: Path) -> None:
    steps, losses = np.arange(1, 41), np.linspace(2, 1, 40)
    one = read_png(loss_curve_png(tmp_path / "new" / "one.png", {"jax": (steps, losses)}))
    two = read_png(loss_curve_png(tmp_path / "two.png", {"jax": (steps, losses), "torch": (steps[:30], losses[:30] + 0.3)}))
    assert one.shape == (540, 960, 3) and two.shape == (768, 960, 3)
    assert ink(one, "#1f77b4") > 300 and ink(one, "#d95f02") == 0
    assert ink(two, "#1f77b4") > 300 and ink(two, "#d95f02") > 150
    lower = two[560:690, 80:]
    same = read_png(loss_curve_png(tmp_path / "same.png", {"jax": (steps, losses), "torch": (steps, losses)}))[560:690, 80:]
    assert (lower < 80).all(-1).sum() > 300 and (lower != same).any()


def test_a_step_that_is_not_finite_is_seen_in_the_curve(tmp_path: Path) -> None:
    steps, losses = np.arange(1, 101), np.linspace(2, 1, 100)
    broken = losses.copy()
    broken[50] = NAN
    whole, gap = (read_png(loss_curve_png(tmp_path / "curve.png", {"jax": (steps, values)})) for values in (losses, broken))
    edge = slice(0, 34)  # above the axes, where the crosses are
    assert ink(whole[edge], "#1f77b4") == 0 and ink(gap[edge], "#1f77b4") > 3
    assert ink(gap[40:480], "#1f77b4") < ink(whole[40:480], "#1f77b4")


def test_a_loss_curve_needs_a_loss_for_each_step(tmp_path: Path) -> None:
    for runs in ({}, {"jax": ([1, 2], [0.5])}):
        with pytest.raises(ValueError, match="as many losses as steps"):
            loss_curve_png(tmp_path / "curve.png", runs)
    assert read_png(loss_curve_png(tmp_path / "curve.png", {"stopped at once": ([], [])})).std() > 1


def make_sheet(path: Path, batch: Batch, draws: Draws = DRAWS, **options: Any) -> tuple[np.ndarray, list[list[int]]]:
    decoded: list[list[int]] = []

    def decode(tokens: np.ndarray) -> str:
        decoded.append(tokens.tolist())
        return "Task: pick up"

    return read_png(first_batch_sheet(path, batch, draws, decode, SPEC.cameras, tile=96, **options)), decoded


def test_the_first_batch_sheet_shows_images_prompt_and_actions_of_each_sample(tmp_path: Path) -> None:
    batch = make_batch(1)
    sheet, decoded = make_sheet(tmp_path / "sheet.png", batch)
    assert decoded == [ids[mask].tolist() for ids, mask in zip(batch.observation.tokens, batch.observation.token_mask, strict=True)]  # no padding
    assert sheet.shape[1] == (len(SPEC.cameras) + 1) * 100 + 4 and sheet.shape[0] > 2 * 96
    fewer, decoded = make_sheet(tmp_path / "sheet.png", batch, samples=1)
    assert len(decoded) == 1 and fewer.shape[0] < sheet.shape[0] and (fewer == sheet[: fewer.shape[0]]).all()
    batch.actions[0] += np.where(batch.action_is_pad[0][:, None] | batch.action_dim_is_pad[0], 0, np.linspace(0, 3, SPEC.action_horizon)[:, None])
    moved, _ = make_sheet(tmp_path / "sheet.png", batch, samples=1)
    where = np.flatnonzero((moved[-96:] != fewer[-96:]).any((0, 2)))
    assert where.size and where.min() >= len(SPEC.cameras) * 100  # in the column of the actions alone


def test_the_sheet_takes_scaled_images_and_tells_of_augmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list[str] = []

    def keep(rows: Any, path: Path, **_: Any) -> Path:
        captions.extend(caption for caption, _ in rows)
        images.append(rows[0][1])
        return path

    images: list[dict[str, Any]] = []
    monkeypatch.setattr("pi05.plots.contact_sheet", keep)
    batch = make_batch(1)
    scaled = dataclasses.replace(batch.observation, images=batch.observation.images.astype(np.float32) / 127.5 - 1)
    augmented = dataclasses.replace(DRAWS, augment=AugmentDraws.identity(2, len(SPEC.cameras)))
    for observation, draws in ((batch.observation, DRAWS), (scaled, augmented)):
        first_batch_sheet(tmp_path / "x.png", dataclasses.replace(batch, observation=observation), draws, lambda ids: "Task: go\n", SPEC.cameras)
    for camera, shown in images[0].items():
        assert (shown is None) == (images[1][camera] is None) and (shown is None or (shown == images[1][camera]).all())
    assert any(shown is None for shown in images[0].values())  # a camera that this sample lacks
    assert captions[0].startswith("sample 10: 'Task: go\\n' (") and f"of {SPEC.action_dim} dims real" in captions[0] and "augmentation" not in captions[0]
    assert "images shown before augmentation" in captions[2]
