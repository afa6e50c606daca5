"""The log of a run: nothing is lost, nothing is averaged away, and a step that is not finite can be computed again."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi05.bad_step import load_bad_step, save_bad_step
from pi05.batch import AugmentDraws, Batch, Draws, make_draws, synthetic_batch
from pi05.errors import CheckpointError, ConfigError, DataError, NonFiniteLoss
from pi05.metrics import FILE, MAX_SAVED, Record, RunLog, read_log, read_losses
from pi05.spec import ModelSpec
from pi05.train_state import StepMetrics

SPEC = ModelSpec.tiny()
NAN, INF = math.nan, math.inf
DRAWS = make_draws(SPEC, 0, 0, np.arange(2))


@dataclasses.dataclass(frozen=True)
class Metrics(StepMetrics):
    """Notes when it is fetched."""

    fetched: list[float] = dataclasses.field(default_factory=list)

    def fetch(self) -> dict[str, Any]:
        self.fetched.append(self.loss)
        return super().fetch()


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.history: list[Any] = []
        self.records: list[Record] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def start(self, history: Any) -> None:
        self.history = list(history)

    def write(self, record: Record) -> None:
        self.records.append(record)

    def write_evaluation(self, step: int, values: Any) -> None:
        self.evaluations.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_batch(step: int) -> Batch:
    return dataclasses.replace(synthetic_batch(SPEC, 2, seed=step), sample_ids=np.array([10 * step, 10 * step + 1]))


def open_log(run: Path, **options: Any) -> RunLog:
    defaults = {"batch_size": 2, "num_train_steps": 10, "log_interval": 5, "config_yaml": "seed: 1\n", "loss_dims": "model"}
    return RunLog(run, **(defaults | options))


def metrics_of(loss: float, *, finite: bool | None = None, grad_norm: float = 2.0, fetched: list[float] | None = None, param_norm: Any = None) -> Metrics:
    finite = math.isfinite(loss) if finite is None else finite
    per_dim = np.full(SPEC.action_dim, loss, np.float32)
    return Metrics(np.float32(loss), per_dim, np.float32(grad_norm), np.bool_(finite), param_norm, fetched if fetched is not None else [])


def add(log: RunLog, step: int, loss: float = 0.5, waited: float = 0.0, **options: Any) -> None:
    log.add(step, metrics_of(loss, **options), lr=step / 1000, batch=make_batch(step), draws=DRAWS, seconds_waited=waited)


def feed(log: RunLog, losses: list[float], first: int = 1) -> None:
    with log:
        for step, loss in enumerate(losses, first):
            add(log, step, loss)


def test_every_step_has_a_line_with_its_own_numbers(tmp_path: Path) -> None:
    clock, waited = Clock(), 0.0
    with open_log(tmp_path, clock=clock) as log:
        for step in range(1, 11):
            clock.now += 4.0 if step == 1 else 0.5
            waited += 0.1
            add(log, step, step / 4, waited, grad_norm=step, param_norm=np.float32(7) if log.is_logging_step(step) else None)
    lines = [json.loads(text) for text in (tmp_path / FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["loss"] for line in lines] == [step / 4 for step in range(1, 11)]
    assert [line["lr"] for line in lines] == [step / 1000 for step in range(1, 11)]
    assert [line["grad_norm"] for line in lines] == list(range(1, 11))
    assert [line["step_seconds"] for line in lines] == [4.0] + [0.5] * 9
    assert [line["samples_per_s"] for line in lines] == [0.5] + [4.0] * 9
    np.testing.assert_allclose([line["data_wait"] for line in lines], [0.025] + [0.2] * 9)
    assert [line["step"] for line in lines if "per_dim" in line] == [5, 10] == [line["step"] for line in lines if "param_norm" in line]
    assert len(lines[4]["per_dim"]) == SPEC.action_dim and lines[4]["loss_dims"] == "model"
    assert lines[4]["window"] == {"steps": 5, "loss": 0.75, "grad_norm": 3.0, "step_seconds": 0.5, "samples_per_s": 4.0, "data_wait": pytest.approx(0.2)}
    assert lines[9]["window"]["loss"] == 2.0
    assert not any("sample_ids" in line for line in lines)


def test_the_last_step_closes_a_window_that_is_not_full(tmp_path: Path) -> None:
    feed(open_log(tmp_path, num_train_steps=7), [1.0] * 5 + [3.0, 5.0])
    assert [(line["step"], line["window"]["steps"], line["window"]["loss"]) for line in read_log(tmp_path / FILE) if "window" in line] == [(5, 5, 1), (7, 2, 4)]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_is_written_as_such_and_never_averaged_away(tmp_path: Path, bad: float) -> None:
    sink = Recorder()
    feed(open_log(tmp_path, max_bad_steps=9, sinks=[sink]), [1, 1, bad, 1, 1, 1, 1, 1, 1, 1])
    text = (tmp_path / FILE).read_text().splitlines()[2]
    assert f'"loss": {json.dumps(bad)},' in text and json.dumps(bad) in ("NaN", "Infinity", "-Infinity")
    line = json.loads(text)
    assert line["finite"] is False and line["sample_ids"] == [30, 31]
    first, second = (record.window for record in sink.records if record.window)
    assert (math.isnan(first.loss) if math.isnan(bad) else first.loss == bad) and second.loss == 1
    assert str(sink.records[2].loss) == str(bad)
    steps, losses = read_losses(tmp_path / FILE)
    assert steps.tolist() == list(range(1, 11)) and (~np.isfinite(losses)).tolist() == [step == 3 for step in range(1, 11)]


def test_only_the_mean_of_norms_passes_over_what_is_not_finite(tmp_path: Path) -> None:
    sink = Recorder()
    with open_log(tmp_path, max_bad_steps=99, sinks=[sink]) as log:
        for step in range(1, 6):
            add(log, step, grad_norm=INF if step == 2 else step, finite=step != 2)
        for step in range(6, 11):
            add(log, step, grad_norm=NAN, finite=False)
    first, second = (record.window for record in sink.records if record.window)
    assert first.grad_norm == (1 + 3 + 4 + 5) / 4 and math.isnan(second.grad_norm)
    assert sink.records[1].grad_norm == INF and not sink.records[1].finite


def test_a_step_is_fetched_when_the_device_has_the_next_ones(tmp_path: Path) -> None:
    fetched: list[float] = []
    log = open_log(tmp_path, delay=2)
    for step in (1, 2):
        add(log, step, step, fetched=fetched)
    assert fetched == [] and log.step == 0
    add(log, 3, 3, fetched=fetched)
    assert fetched == [1] and log.step == 1
    log.flush()
    assert fetched == [1, 2, 3] and log.step == 3
    log.close()
    assert fetched == [1, 2, 3]


def test_the_delay_loses_no_step_whatever_ends_the_run(tmp_path: Path) -> None:
    feed(open_log(tmp_path / "end", delay=3), [0.5] * 4)
    assert [line["step"] for line in read_log(tmp_path / "end" / FILE)] == [1, 2, 3, 4]
    sink = Recorder()
    with pytest.raises(KeyboardInterrupt), open_log(tmp_path / "error", delay=3, sinks=[sink]) as log:
        add(log, 1)
        add(log, 2)
        raise KeyboardInterrupt
    assert [line["step"] for line in read_log(tmp_path / "error" / FILE)] == [1, 2] and sink.closed == 1


def test_steps_come_in_order(tmp_path: Path) -> None:
    with open_log(tmp_path, resumed_step=3) as log:
        with pytest.raises(ValueError, match="step 3 after step 3"):
            add(log, 3)
        add(log, 4)
        with pytest.raises(ValueError, match="step 6 after step 4"):
            add(log, 6)


def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with log:
        for step in range(1, 6):
            add(log, step, step)
        log.add_evaluation(5, {"action_mse": 0.25})
        for step in range(6, 9):
            add(log, step, step)
        log.add_evaluation(8, {"action_mse": 0.5})
    sink = Recorder()
    log = open_log(tmp_path, resumed_step=5, sinks=[sink])
    assert log.step == 5 and [line["step"] for line in sink.history] == [1, 2, 3, 4, 5, 5] and sink.history[-1]["evaluation"] == {"action_mse": 0.25}
    feed(log, [60.0, 70.0], first=6)
    steps, losses = read_losses(tmp_path / FILE)
    assert steps.tolist() == [1, 2, 3, 4, 5, 6, 7] and losses.tolist() == [1, 2, 3, 4, 5, 60, 70]
    feed(open_log(tmp_path), [0.125])  # from the start again
    assert read_losses(tmp_path / FILE)[1].tolist() == [0.125]


def test_resuming_keeps_what_is_not_finite(tmp_path: Path) -> None:
    feed(open_log(tmp_path, max_bad_steps=9), [1.0, NAN, INF, 1.0])
    feed(open_log(tmp_path, resumed_step=3), [4.0], first=4)
    assert str(read_losses(tmp_path / FILE)[1].tolist()) == "[1.0, nan, inf, 4.0]"


def test_a_line_that_a_killed_run_cut_off_is_dropped_and_any_other_damage_refused(tmp_path: Path) -> None:
    feed(open_log(tmp_path), [1.0, 2.0, 3.0])
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole[:-30])
    feed(open_log(tmp_path, resumed_step=2), [9.0], first=3)
    assert read_losses(tmp_path / FILE)[1].tolist() == [1.0, 2.0, 9.0]
    (tmp_path / FILE).write_text("rubbish\n" + whole)
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1 is not a step"):
        open_log(tmp_path, resumed_step=2)
    assert (tmp_path / FILE).read_text() == "rubbish\n" + whole
    with pytest.raises(DataError, match="no log"):
        read_log(tmp_path / "none")


def test_the_first_bad_step_stops_the_run_and_says_everything(tmp_path: Path) -> None:
    calls: list[int] = []

    def save_weights() -> Path:
        calls.append(1)
        return tmp_path / "checkpoints" / "3"

    log = open_log(tmp_path / "my run", save_weights=save_weights)
    with pytest.raises(NonFiniteLoss) as caught, log:
        for step in range(1, 9):
            add(log, step, NAN if step >= 3 else 0.5, grad_norm=INF if step >= 3 else 1)
    folder = tmp_path / "my run" / "bad_steps" / "step_3"
    text = str(caught.value)
    for part in (
        "Step 3 is not finite",
        "loss nan",
        "gradient norm inf",
        "lr 0.003",
        "Samples: 30, 31.",
        str(folder),
        f"python scripts/replay_step.py '{folder}'",
    ):
        assert part in text, (part, text)
    assert calls == [1]
    steps, losses = read_losses(tmp_path / "my run" / FILE)
    assert steps.tolist() == [1, 2, 3, 4] and np.isnan(losses).tolist() == [False, False, True, True]  # step 4 was under way
    bad = load_bad_step(folder)
    assert (bad.step, bad.lr, str(bad.loss), bad.grad_norm, bad.checkpoint) == (3, 0.003, "nan", INF, tmp_path / "checkpoints" / "3")
    assert bad.config.read_text() == "seed: 1\n"
    assert_same_arrays(bad.batch, make_batch(3))
    assert_same_arrays(bad.draws, DRAWS)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step_3"]


def test_a_bad_gradient_with_a_finite_loss_stops_the_run_too(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match=r"loss 0\.5, gradient norm nan"), open_log(tmp_path) as log:
        add(log, 1, 0.5, grad_norm=NAN, finite=False)
        log.flush()


def test_a_bad_last_step_is_raised_at_the_end_and_what_is_behind_it_is_written(tmp_path: Path) -> None:
    sink = Recorder()
    with pytest.raises(NonFiniteLoss, match="Step 1 "):
        feed(open_log(tmp_path, delay=3, sinks=[sink]), [NAN, 1.0, NAN])
    assert [record.step for record in sink.records] == [1, 2, 3] and sink.closed == 1
    assert len(read_log(tmp_path / FILE)) == 3


def test_only_bad_steps_in_a_row_count(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match=r"Step 8 \(the last of 3 in a row\)"):
        feed(open_log(tmp_path, max_bad_steps=3, delay=0), [1, NAN, INF, 1, 1, NAN, NAN, NAN, 1, 1])
    assert sorted(path.name for path in (tmp_path / "bad_steps").iterdir()) == ["step_2", "step_6", "step_8"]


def test_a_run_that_goes_on_saves_few_bad_steps(tmp_path: Path) -> None:
    feed(open_log(tmp_path, max_bad_steps=2, num_train_steps=20), [NAN, 1.0] * 10)
    assert len(list((tmp_path / "bad_steps").iterdir())) == MAX_SAVED


def test_a_run_whose_weights_or_batch_cannot_be_saved_still_says_why_it_stopped(tmp_path: Path) -> None:
    def save_weights() -> Path:
        raise CheckpointError("the disk is full")

    (tmp_path / "bad_steps").write_text("in the way")
    with pytest.raises(NonFiniteLoss, match=r"(?s)Step 1 is not finite.*weights could not be saved: the disk is full.*nothing to replay"):
        feed(open_log(tmp_path, save_weights=save_weights), [NAN])


def test_an_evaluation_is_written_behind_the_steps_before_it(tmp_path: Path) -> None:
    sink = Recorder()
    with open_log(tmp_path, sinks=[sink], delay=2) as log:
        add(log, 1)
        add(log, 2)
        log.add_evaluation(2, {"action_mse": np.float32(0.5), "loss": NAN})
    lines = read_log(tmp_path / FILE)
    assert [line["step"] for line in lines] == [1, 2, 2] and str(lines[2]["evaluation"]) == "{'action_mse': 0.5, 'loss': nan}"
    assert sink.evaluations == [(2, {"action_mse": 0.5, "loss": sink.evaluations[0][1]["loss"]})]


def test_time_of_an_evaluation_is_no_step_time(tmp_path: Path) -> None:
    clock = Clock()
    with open_log(tmp_path, clock=clock) as log:
        clock.now += 1
        add(log, 1)
        with log.paused():
            clock.now += 100
        clock.now += 2
        add(log, 2)
    assert [line["step_seconds"] for line in read_log(tmp_path / FILE)] == [1, 2]


def test_a_sink_that_cannot_start_closes_those_that_did(tmp_path: Path) -> None:
    class Broken(Recorder):
        def start(self, history: Any) -> None:
            raise DataError("no room")

    first = Recorder()
    with pytest.raises(DataError, match="no room"):
        open_log(tmp_path, sinks=[first, Broken()])
    assert first.closed == 1


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"log_interval": 0}, {"max_bad_steps": 0}, {"delay": -1}, {"resumed_step": 11}, {"resumed_step": -1}])
def test_arguments_out_of_range_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        open_log(tmp_path, **wrong)


def arrays(value: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for key, item in vars(value).items():
        if dataclasses.is_dataclass(item):
            yield from arrays(item, f"{name}{key}.")
        elif item is not None:
            yield name + key, item


def assert_same_arrays(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    first, second = dict(arrays(got)), dict(arrays(want))
    assert first.keys() == second.keys() and len(first) >= 2
    for name, array in second.items():
        assert first[name].dtype == array.dtype and first[name].shape == array.shape and first[name].tobytes() == array.tobytes(), name


def test_a_bad_step_is_read_back_bit_for_bit_with_its_augmentation(tmp_path: Path) -> None:
    batch, draws = make_batch(4), dataclasses.replace(DRAWS, augment=AugmentDraws.identity(2, len(SPEC.cameras)))
    batch.actions[1, 0, 0] = NAN
    folder = save_bad_step(tmp_path / "step_4", 4, batch, draws, 1e-3, "a: 1\n")
    assert save_bad_step(folder, 4, batch, draws, 2e-3, "a: 2\n", loss=INF, grad_norm=1.0) == folder  # replaces it
    bad = load_bad_step(folder)
    assert_same_arrays(bad.batch, batch)
    assert_same_arrays(bad.draws, draws)
    assert (bad.lr, bad.loss, bad.grad_norm, bad.checkpoint, bad.config.read_text()) == (2e-3, INF, 1.0, None, "a: 2\n")
    one, its_draws = bad.sample(1)
    assert one.sample_ids.tolist() == [41] and one.observation.images.tobytes() == batch.observation.images[1:].tobytes()
    assert isinstance(its_draws, Draws) and its_draws.augment.affine.shape == (1, len(SPEC.cameras), 2, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_4"]


def test_a_folder_that_is_no_bad_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no bad_step\.json"):
        load_bad_step(tmp_path)
    folder = save_bad_step(tmp_path / "step_1", 1, make_batch(1), DRAWS, 1e-3, "")
    record = json.loads((folder / "bad_step.json").read_text())
    for damage in ("{", json.dumps({key: value for key, value in record.items() if key != "lr"}), json.dumps(record | {"format_version": 9})):
        (folder / "bad_step.json").write_text(damage)
        with pytest.raises(DataError, match="damaged|format version 9"):
            load_bad_step(folder)
    (folder / "bad_step.json").write_text(json.dumps(record))
    whole = (folder / "batch.safetensors").read_bytes()
    (folder / "batch.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged"):
        load_bad_step(folder)
