"""Statistics are exact, and of the numbers that the model sees. NumPy on the whole data is the oracle."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pi05.data import measure as module
from pi05.data.dataset import open_dataset
from pi05.data.measure import compute_norm_stats, make_fingerprint, measure
from pi05.data.norm_stats import ARRAYS, FieldStats, NormStats, from_lerobot_stats
from pi05.errors import DataError
from pi05.robots import Dim, Robot, load_robot
from tests.data import recordings
from tests.data.tables import ARM, episodes, write_v3

REPOSITORY = Path(__file__).resolve().parents[2]
METAWORLD = REPOSITORY / "data/metaworld_mini"
HORIZON = 6
TINY = Robot(
    name="tiny",
    cameras={},
    state=tuple(Dim(f"s{i}", "1", -999, 999, "position") for i in range(recordings.STATE_DIM)),
    actions=tuple(Dim(f"a{i}", "1", -999, 999, "displacement") for i in range(recordings.ACTION_DIM)),
    fps=None,
)
seeded = settings(max_examples=60, deadline=None, derandomize=True)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def of(*chunks: np.ndarray) -> FieldStats:
    """Statistics of one field that comes in `chunks`, float[n, D] each."""
    return measure(lambda: ({"x": np.asarray(chunk, np.float32)} for chunk in chunks))["x"]


def exact(x: np.ndarray) -> FieldStats:
    """The same by NumPy, in double precision on all rows at once."""
    x = np.asarray(x, np.float32).astype(np.float64)
    low, high = np.quantile(x, [0.01, 0.99], axis=0, method="inverted_cdf")
    return FieldStats(x.mean(0), x.std(0), low, high, x.min(0), x.max(0), len(x))


def assert_same(ours: FieldStats, want: FieldStats) -> None:
    """Order statistics to the bit, moments to rounding."""
    assert ours.count == want.count
    for name in ("q01", "q99", "min", "max"):
        assert np.array_equal(getattr(ours, name), getattr(want, name)), name
    scale = np.maximum(np.abs(want.min), np.abs(want.max))
    assert (np.abs(ours.mean - want.mean) <= 1e-13 * scale).all()
    assert (np.abs(ours.std - want.std) <= 1e-7 * scale).all(), "the oracle's own two passes cancel at some 1e-8 of the scale"


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_v3(tmp_path_factory.mktemp("arm") / "arm", episodes(9, 3, 14, 1, 7))


# --- measuring


@given(rows=st.lists(st.tuples(float32, float32, st.sampled_from([0.0, -0.0, 1.0])), min_size=1, max_size=250))
@example(rows=[(-1e-45, 3.4028234663852886e38, 0.0), (1e-45, -3.4028234663852886e38, -0.0)])
@seeded
def test_any_numbers_have_numpys_statistics(rows: list[tuple[float, ...]]) -> None:
    x = np.array(rows, np.float64)
    assert_same(of(x), exact(x))


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 3000), cuts=st.lists(st.integers(0, 3000), max_size=8))
@seeded
def test_neither_chunking_nor_order_changes_the_statistics(seed: int, size: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, 3)) * [1e-4, 1.0, 1e5] + [0.0, -7.0, 1e6]
    want = of(x)
    assert_same(of(*np.split(rng.permutation(x), sorted(min(cut, size) for cut in cuts))), want)
    assert_same(want, exact(x))


def test_no_count_is_lost_when_only_the_maximum_grows() -> None:
    """user_reports 2.2: openpi's histogram drops its first bin then; a gripper that is mostly 0 got q01 = 0.267."""
    gripper, joint = np.zeros((1000, 1)), np.random.default_rng(0).uniform(-1, 1, (1000, 1))
    gripper[900:, 0] = np.linspace(0.1, 1, 100)
    chunks = np.split(np.hstack([gripper, joint]), 100)
    stats = of(*chunks)
    assert stats.q01[0] == 0 and stats.q99[0] == exact(gripper).q99[0]
    assert_same(stats, exact(np.concatenate(chunks)))


@pytest.mark.parametrize("shape", ["sorted", "reversed", "shuffled", "constant then moving", "bimodal"])
def test_quantiles_are_exact_for_data_of_any_shape(shape: str) -> None:
    """user_reports 2.2."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.standard_normal(5000))
    x = {
        "sorted": x,
        "reversed": x[::-1],
        "shuffled": rng.permutation(x),
        "constant then moving": np.concatenate([np.full(4900, 0.25), x[:100]]),
        "bimodal": np.where(rng.random(5000) < 0.985, rng.normal(-9, 0.01, 5000), rng.normal(9, 0.01, 5000)),
    }[shape][:, None]
    assert_same(of(*np.split(x, 50)), exact(x))


def test_a_small_spread_far_from_zero_keeps_its_deviation() -> None:
    """user_reports 2.9: E[x^2] - E[x]^2 in float32 made 0.354 of 0.001."""
    x = 1000 + 0.001 * np.random.default_rng(0).standard_normal((20000, 1))
    assert of(*np.split(x, 20)).std[0] == pytest.approx(0.001, rel=0.02)
    assert_same(of(*np.split(x, 20)), exact(x))


def test_the_statistics_of_a_mixture_are_those_of_all_its_data(tmp_path: Path) -> None:
    """user_reports 2.3: averaged quantiles of [0, 1] and [9, 10] gave a q99 of 5.49."""
    rng = np.random.default_rng(0)
    low, high = rng.uniform(0, 1, (4000, 1)), rng.uniform(9, 10, (4000, 1))
    assert_same(of(low, high), exact(np.concatenate([low, high])))
    assert of(low, high).q99[0] == pytest.approx(9.98, abs=0.01)
    parts, whole = (episodes(8, 5), episodes(6, 9, 4, seed=1)), tmp_path / "whole"
    roots = [write_v3(tmp_path / str(i), part) for i, part in enumerate(parts)]
    mixed = compute_norm_stats(roots, ARM, action_horizon=HORIZON)
    joined = compute_norm_stats(write_v3(whole, [*parts[0], *parts[1]]), ARM, action_horizon=HORIZON)
    for key in ("state", "actions"):
        assert_same(mixed.fields[key], joined.fields[key])
    assert mixed.fingerprint == joined.fingerprint


def test_data_that_changes_between_the_passes_is_an_error() -> None:
    passes = iter([np.zeros((9, 1), np.float32), np.ones((9, 1), np.float32)])
    with pytest.raises(DataError, match="The data changed while its statistics were computed"):
        measure(lambda: [{"x": next(passes)}])


def test_no_data_is_an_error() -> None:
    with pytest.raises(DataError, match="no numbers to take statistics of"):
        of(np.zeros((0, 3)))


# --- of a dataset


def seen_by_the_model(root: Path, robot: Robot, cache: Path, *, padded: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """State and counted actions of every sample, by the training's own way: dataset rows, one by one, through the robot."""
    dataset = open_dataset(root, robot=robot, action_horizon=HORIZON, images=False, cache_dir=cache)
    for i in range(len(dataset)):
        row = robot.replace(cameras={}).to_model(dataset[i])
        yield row["state"][None], row["actions"][slice(None) if padded else ~row["action_is_pad"]]


@pytest.mark.parametrize("policy", ["ignore", "count"])
@pytest.mark.parametrize("blocks", [1, 50, 1 << 18])
def test_the_statistics_are_those_of_the_rows_that_training_reads(policy: str, blocks: int, arm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_VALUES", blocks)
    stats = compute_norm_stats(arm, ARM, action_horizon=HORIZON, padded_steps=policy)
    state, actions = (np.concatenate(parts) for parts in zip(*seen_by_the_model(arm, ARM, tmp_path, padded=policy == "count"), strict=True))
    assert_same(stats.fields["state"], exact(state))
    assert_same(stats.fields["actions"], exact(actions))


def test_a_short_episode_has_four_fifths_padding_which_counts_only_on_request(tmp_path: Path) -> None:
    """user_reports 2.4."""
    root = write_v3(tmp_path / "short", episodes(20))
    ignored, counted = (compute_norm_stats(root, ARM, action_horizon=50, padded_steps=policy) for policy in ("ignore", "count"))
    assert (ignored.fields["actions"].count, counted.fields["actions"].count) == (210, 1000)
    assert not np.allclose(ignored.fields["actions"].mean, counted.fields["actions"].mean, rtol=0.01)
    with pytest.raises(DataError, match="padded_steps: the statistics have 'count', this run has 'ignore'"):
        counted.check_fingerprint(ignored.fingerprint)


def test_no_video_and_no_framework_is_needed(tmp_path: Path) -> None:
    """user_reports 2.5, 2.6."""
    shutil.copytree(METAWORLD, tmp_path / "set", ignore=shutil.ignore_patterns("videos"))
    code = (
        "import sys; from pathlib import Path; from pi05.data.measure import compute_norm_stats; from pi05.robots import load_robot\n"
        "compute_norm_stats(Path(sys.argv[1]), load_robot('metaworld'), action_horizon=8).save(Path(sys.argv[2]))\n"
        "print(sorted({'torch', 'jax', 'transformers', 'lerobot', 'datasets', 'av'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "set", tmp_path / "stats.json"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    full = compute_norm_stats(METAWORLD, load_robot("metaworld"), action_horizon=8)
    without = NormStats.load(tmp_path / "stats.json")
    without.check_fingerprint(full.fingerprint)
    assert all(np.array_equal(getattr(without.fields[key], name), getattr(full.fields[key], name)) for key in full.fields for name in ARRAYS)


def test_twenty_thousand_frames_take_less_than_a_second_of_one_core(tmp_path: Path) -> None:
    """user_reports 2.5. Processor time, so that other work on the machine does not count."""
    root = write_v3(tmp_path / "big", episodes(*[400] * 50))
    started = time.process_time()
    stats = compute_norm_stats(root, ARM, action_horizon=50)
    assert time.process_time() - started < 1
    assert stats.fields["state"].count == 20_000


def test_lerobots_own_statistics_of_the_bundled_dataset_agree() -> None:
    robot = load_robot("metaworld")
    ours = compute_norm_stats(METAWORLD, robot, action_horizon=1)
    theirs = from_lerobot_stats(METAWORLD / "meta/stats.json", robot)
    for key in ("state", "actions"):
        assert ours.fields[key].count == theirs.fields[key].count == 3540
        for name in ("mean", "std", "min", "max"):
            assert np.allclose(getattr(ours.fields[key], name), getattr(theirs.fields[key], name), rtol=1e-5, atol=1e-6), (key, name)


def test_v2_and_v3_of_the_same_numbers_have_the_same_statistics_and_fingerprint(tmp_path: Path) -> None:
    recordings.write_by_hand(tmp_path / "v2")
    rows = [[recordings.numbers(episode, frame) for frame in range(length)] for episode, length in enumerate(recordings.LENGTHS)]
    write_v3(tmp_path / "v3", [tuple(map(np.stack, zip(*row, strict=True))) for row in rows])
    old, new = (compute_norm_stats(tmp_path / name, TINY, action_horizon=HORIZON) for name in ("v2", "v3"))
    assert_same(old.fields["actions"], new.fields["actions"])
    old.check_fingerprint(new.fingerprint)


def test_a_number_that_is_not_finite_is_named_and_its_episode_can_be_excluded(tmp_path: Path) -> None:
    data = episodes(5, 8, 6)
    data[1][1][3, 2] = np.nan
    root = write_v3(tmp_path / "nan", data)
    with pytest.raises(DataError, match="action dim 'joint_2' of nan, episode 1, frame 3 .repair it, or exclude the episode., is nan"):
        compute_norm_stats(root, ARM, action_horizon=HORIZON)
    rest = compute_norm_stats(write_v3(tmp_path / "rest", [data[0], data[2]]), ARM, action_horizon=HORIZON)
    stats = compute_norm_stats(root, ARM, action_horizon=HORIZON, exclude=[1])
    assert_same(stats.fields["actions"], rest.fields["actions"])
    assert stats.fingerprint == rest.fingerprint
    with pytest.raises(DataError, match="nan has no episode 7; it has 3, numbered 0 to 2"):
        compute_norm_stats(root, ARM, action_horizon=HORIZON, exclude=[7])


def test_a_dataset_that_does_not_fit_the_robot_is_refused_with_what_there_is(arm: Path) -> None:
    with pytest.raises(DataError, match="arm has no number column 'actions' that robot 'arm' reads. Available: .*, action. Did you mean 'action'"):
        compute_norm_stats(arm, ARM.replace(action_column="actions"), action_horizon=HORIZON)
    with pytest.raises(DataError, match=r"arm: observation.state has shape \[4\]; robot 'metaworld' has the 3 dims x, y, z"):
        robot = load_robot("metaworld")
        compute_norm_stats(arm, robot.replace(state=robot.state[:3]), action_horizon=HORIZON)
    for options, message in (({"padded_steps": "drop"}, "padded_steps is 'drop'; it is one of ignore, count"), ({"action_horizon": 0}, "action_horizon is 0")):
        with pytest.raises(DataError, match=message):
            compute_norm_stats(arm, ARM, **{"action_horizon": HORIZON} | options)


def test_tables_and_metadata_that_disagree_are_refused(arm: Path, tmp_path: Path) -> None:
    root = shutil.copytree(arm, tmp_path / "arm")
    (root / "data/chunk-000/file-001.parquet").unlink()
    with pytest.raises(DataError, match=r"file-001.parquet cannot be read .*Copy the dataset again"):
        compute_norm_stats(root, ARM, action_horizon=HORIZON)
    table = pyarrow.parquet.read_table(arm / "data/chunk-000/file-001.parquet")
    pyarrow.parquet.write_table(table.slice(1), root / "data/chunk-000/file-001.parquet")
    with pytest.raises(DataError, match="episode 2 has 13 frames in a row here, but not in the metadata"):
        compute_norm_stats(root, ARM, action_horizon=HORIZON)
    pyarrow.parquet.write_table(table.slice(0, 14), root / "data/chunk-000/file-001.parquet")
    with pytest.raises(DataError, match="episode 3 is in the metadata, but in no table"):
        compute_norm_stats(root, ARM, action_horizon=HORIZON)


def test_statistics_of_anything_else_are_refused_with_each_difference(arm: Path, tmp_path: Path) -> None:
    """user_reports 2.4."""
    stats = compute_norm_stats(arm, ARM, action_horizon=HORIZON)
    stats.check_fingerprint(make_fingerprint(shutil.copytree(arm, tmp_path / "copy"), ARM, action_horizon=HORIZON))
    data = episodes(9, 3, 14, 1, 7)
    data[2][0][5, 1] = np.nextafter(data[2][0][5, 1], np.float32(9))
    changed = write_v3(tmp_path / "changed", data)
    with pytest.raises(DataError) as caught:
        stats.check_fingerprint(make_fingerprint(changed, ARM.replace(delta_kinds=()), action_horizon=9))
    text = str(caught.value)
    assert "action_horizon: the statistics have '6', this run has '9'" in text
    assert "dataset: the statistics have '34 frames, 5 episodes, numbers " in text
    assert "robot actions: the statistics have 'joint_0 [rad] delta, " in text and "this run has 'joint_0 [rad], " in text
    assert text.count("the statistics have") == 3


def test_the_command_prints_every_dim_with_its_flags_and_saves(tmp_path: Path) -> None:
    data = episodes(300, 300)
    for _, actions in data:
        actions[:, 3] = 0.5
    data[0][1][4, 3] = 900
    root, script = write_v3(tmp_path / "set", data), [sys.executable, REPOSITORY / "scripts/compute_norm_stats.py"]
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/arm.py").write_text("from tests.data.tables import ARM as ROBOT\n")
    options = ["--action-horizon", "3", "--out", tmp_path / "stats.json", "--dataset", root]
    paths = {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    done = subprocess.run([*script, *options, "--robot", "lab.arm"], capture_output=True, text=True, check=True, env=paths)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if "(rad" in line or "(1)" in line] == [dim.name for dim in (*ARM.state, *ARM.actions)]
    assert any("gripper" in line and "hardly moves" in line for line in lines) and any("normalised, limit 50" in line for line in lines)
    assert "600 frames in" in lines[-1]
    NormStats.load(tmp_path / "stats.json").check_fingerprint(make_fingerprint(root, ARM, action_horizon=3))
    wrong = subprocess.run([*script, *options, "--robot", "metaword"], capture_output=True, text=True, check=False, env=paths)
    assert wrong.returncode == 1 and "Did you mean 'metaworld'?" in wrong.stdout and "Traceback" not in wrong.stderr
