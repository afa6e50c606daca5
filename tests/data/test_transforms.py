"""Pure transforms against numbers worked out by hand, and the Pipeline on made-up rows of every robot."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi05.data import transforms
from pi05.data.images import resize_with_pad
from pi05.data.transforms import Pipeline
from pi05.errors import DataError
from pi05.robots import Robot, load_robot, robot_names
from pi05.spec import ModelSpec
from tests.robots.rows import HORIZON, frozen, make_row, random_rotation

SPEC = ModelSpec.tiny().replace(action_dim=32)
SEEDS = st.integers(0, 2**32 - 1)
seeded = settings(max_examples=30, deadline=None, derandomize=True)


@dataclasses.dataclass(frozen=True)
class Stats:
    """One field's statistics; what transforms reads of data/norm_stats.py's FieldStats."""

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray
    q99: np.ndarray


@dataclasses.dataclass(frozen=True)
class AllStats:
    fields: dict[str, Stats]


class Recorder:
    """A tokenizer that shows what it was given."""

    def check(self, spec: ModelSpec) -> None:
        self.checked = spec

    def encode(self, prompt: str, state: np.ndarray | None) -> np.ndarray:
        self.prompt, self.state = prompt, state
        return np.arange(len(prompt), dtype=np.int32)


def make_stats(robot: Robot, *, extra: int = 0, seed: int = 0) -> AllStats:
    """Statistics over made-up rows; `extra` more dims, as in published files that are padded to 32."""
    rows = [robot.to_model(make_row(robot, seed + i)) for i in range(40)]
    fields = {}
    for key in ("state", "actions"):
        values = np.stack([row[key] for row in rows]).astype(np.float64).reshape(-1, rows[0][key].shape[-1])
        values = np.pad(values, ((0, 0), (0, extra)))
        fields[key] = Stats(values.mean(0), values.std(0), *np.quantile(values, [0.01, 0.99], 0))
    return AllStats(fields)


def pipeline(name: str = "so100", stats: AllStats | None = None, spec: ModelSpec = SPEC, **options: object) -> Pipeline:
    robot = load_robot(name)
    return Pipeline(spec, robot, stats or make_stats(robot), Recorder(), **options)


def flat(low: object, width: object) -> Stats:
    low, width = np.array(low, float), np.array(width, float)
    return Stats(mean=low, std=width, q01=low, q99=low + width)


# --- functions


def test_quantile_numbers_are_openpis() -> None:
    stats = flat([-0.5, 2.0], [2.0, 4.0])
    x = np.array([[0.3, 1.0], [1.5, 6.0]])
    want = [[0.8 / 2.000001 * 2 - 1, -1.0 / 4.000001 * 2 - 1], [2.0 / 2.000001 * 2 - 1, 4.0 / 4.000001 * 2 - 1]]
    assert np.allclose(transforms.normalise(x, stats, "quantile", floor=0.1), want, rtol=0, atol=1e-15)
    assert np.allclose(transforms.unnormalise(np.array([[0.25, -3.0]]), stats, "quantile"), [[0.625 * 2.000001 - 0.5, -1 * 4.000001 + 2]], rtol=0, atol=1e-15)


def test_zscore_numbers_are_openpis() -> None:
    stats = flat([-0.5, 2.0], [2.0, 4.0])
    assert np.allclose(transforms.normalise(np.array([0.3, 1.0]), stats, "zscore"), [0.8 / 2.000001, -1 / 4.000001], rtol=0, atol=1e-15)
    assert np.allclose(transforms.unnormalise(np.array([0.25, -3.0]), stats, "zscore"), [0.25 * 2.000001 - 0.5, -3 * 4.000001 + 2], rtol=0, atol=1e-15)


def test_normalised_values_are_not_clipped() -> None:
    assert transforms.normalise(np.array([9.0]), flat([0], [1]), "quantile")[0] == pytest.approx(17, abs=1e-4)


def test_a_constant_dim_is_widened_to_its_floor_and_becomes_zero() -> None:
    stats = flat([0.7], [0.0])
    assert transforms.normalise(np.array([0.7]), stats, "quantile", floor=0.01)[0] == pytest.approx(0, abs=1e-3)
    assert transforms.normalise(np.array([0.705]), stats, "quantile", floor=0.01)[0] == pytest.approx(1, abs=1e-3)
    assert transforms.normalise(np.array([0.71]), stats, "zscore", floor=0.01)[0] == pytest.approx(1, abs=1e-3)
    assert transforms.normalise(np.array([0.701]), stats, "quantile")[0] == pytest.approx(1999), "without a floor, openpi's explosion"


@given(seed=SEEDS, method=st.sampled_from(["quantile", "zscore"]), floor=st.sampled_from([0.0, 1e-3, 10.0]))
@seeded
def test_unnormalise_is_the_inverse_of_normalise(seed: int, method: str, floor: float) -> None:
    rng = np.random.default_rng(seed)
    stats = flat(rng.uniform(-5, 5, 6), rng.uniform(0, 3, 6) * rng.integers(0, 2, 6))
    x = rng.uniform(-9, 9, (4, 6))
    assert np.allclose(transforms.unnormalise(transforms.normalise(x, stats, method, floor), stats, method, floor), x, rtol=1e-9, atol=1e-9)


@given(seed=SEEDS)
@seeded
def test_absolute_actions_are_the_inverse_of_delta_actions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    actions, state = rng.uniform(-4, 4, (3, 5, 7)).astype(np.float32), rng.uniform(-4, 4, (3, 9)).astype(np.float32)
    dims = rng.permutation(7)[:4], rng.permutation(9)[:4]
    delta = transforms.delta_actions(actions, state, *dims)
    want = actions.copy()
    for i, j in zip(*dims, strict=True):
        want[:, :, i] -= state[:, None, j]
    assert np.array_equal(delta, want), "bit for bit what openpi's float32 subtraction gives"
    assert np.abs(transforms.absolute_actions(delta, state, *dims) - actions).max() < 1e-6


@given(seed=SEEDS)
@seeded
def test_rotation6d_round_trips(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = random_rotation(rng, 2, 3)
    rotation = transforms.matrix_to_rotation6d(matrix)
    assert np.array_equal(rotation, np.concatenate([matrix[..., :, 0], matrix[..., :, 1]], -1)), "first column, then second"
    assert np.allclose(transforms.rotation6d_to_matrix(rotation), matrix, atol=1e-12)
    state = transforms.matrix_to_rotation6d(random_rotation(rng, 2, 1))
    delta = transforms.relative_rotation(rotation, state)
    assert np.allclose(transforms.absolute_rotation(delta, state), rotation, atol=1e-12)
    assert np.allclose(transforms.rotation6d_to_matrix(state) @ transforms.rotation6d_to_matrix(delta), matrix, atol=1e-12)


def test_six_numbers_off_the_manifold_become_a_rotation() -> None:
    matrix = transforms.rotation6d_to_matrix(np.array([2.0, 0, 0, 5, 0, 3]))
    assert np.allclose(matrix, [[1, 0, 0], [0, 0, -1], [0, 1, 0]])
    assert np.linalg.det(matrix) == pytest.approx(1)


@pytest.mark.parametrize("rotation", [[0, 0, 0, 0, 1, 0], [1, 0, 0, 2, 0, 0], [np.nan, 0, 0, 0, 1, 0]])
def test_six_numbers_without_a_rotation_are_refused(rotation: list[float]) -> None:
    with pytest.raises(DataError, match="names no rotation"):
        transforms.rotation6d_to_matrix(np.array(rotation))


def test_repack_reads_flat_keys_nested_keys_and_keys_with_slashes() -> None:
    tree = {"a/b": 1, "c": {"d/e": 2, "f": {"g": 3}}, "h/i": {"j": 4}}
    assert transforms.repack(tree, {"x": "a/b", "y": "c/d/e", "z": "c/f/g", "w": "h/i/j"}) == {"x": 1, "y": 2, "z": 3, "w": 4}
    with pytest.raises(DataError, match=r"no 'c/f/h'. Available: a/b, c/d/e, c/f/g, h/i/j. Did you mean 'c/f/g'\?"):
        transforms.repack(tree, {"x": "c/f/h"})


# --- pipeline


@pytest.mark.parametrize("name", robot_names())
def test_a_sample_has_the_promised_arrays(name: str) -> None:
    robot, pipe = load_robot(name), pipeline(name)
    row = frozen(make_row(robot, 3))
    sample = pipe(row)
    size, dims, cameras = SPEC.vision.image_size, len(robot.actions), len(robot.cameras)
    shapes = {key: (value.dtype.name, value.shape) for key, value in sample.items() if isinstance(value, np.ndarray)}
    assert shapes == {
        "images": ("uint8", (cameras, size, size, 3)),
        "image_mask": ("bool", (cameras,)),
        "tokens": ("int32", (len(row[robot.prompt_column]),)),
        "actions": ("float32", (HORIZON, 32)),
        "action_is_pad": ("bool", (HORIZON,)),
        "action_dim_is_pad": ("bool", (32,)),
    }
    assert sample["sample_id"] == 1003 and sample["image_mask"].all()
    assert sample["action_is_pad"].tolist() == [False] * (HORIZON - 1) + [True], "padding at an episode's end must reach the loss"
    assert sample["action_dim_is_pad"].tolist() == [False] * dims + [True] * (32 - dims) and not sample["actions"][:, dims:].any()
    in_order = [slot for slot in SPEC.cameras if slot in robot.cameras]
    assert all(np.array_equal(sample["images"][i], resize_with_pad(row[robot.cameras[slot]], size)) for i, slot in enumerate(in_order))
    np.testing.assert_equal(pipe(row), sample)


@pytest.mark.parametrize("name", robot_names())
@given(seed=SEEDS, method=st.sampled_from(["quantile", "zscore"]))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_inverse_gives_the_robots_actions_back(name: str, seed: int, method: str) -> None:
    robot = load_robot(name)
    pipe, row = pipeline(name, normalization=method), make_row(robot, seed)
    back = pipe.inverse(pipe(row)["actions"], row[robot.state_column])
    assert back.dtype == np.float32
    span = np.array([dim.high - dim.low for dim in robot.actions])
    assert np.abs((back - row[robot.action_column]) / span).max() < 2e-6


def test_deltas_come_before_normalisation() -> None:
    robot = load_robot("so100")
    row, stats = make_row(robot, 0), make_stats(robot)
    delta = row["action"].astype(float) - [*row["observation.state"][:5], 0]
    f = stats.fields["actions"]
    want = (delta - f.q01) / (f.q99 - f.q01 + 1e-6) * 2 - 1
    assert np.allclose(pipeline(stats=stats)(row)["actions"][:, :6], want, atol=1e-5)


def test_the_tokenizer_gets_the_normalised_state_without_padding() -> None:
    robot = load_robot("so100")
    row, stats = make_row(robot, 0), make_stats(robot)
    pipe = pipeline(stats=stats)
    pipe(row)
    f = stats.fields["state"]
    assert pipe.tokenizer.prompt == row["task"]
    assert pipe.tokenizer.state.shape == (6,)
    assert np.array_equal(pipe.tokenizer.state, (row["observation.state"] - f.q01) / (f.q99 - f.q01 + 1e-6) * 2 - 1), (
        "float64: token ids equal openpi's at bin edges"
    )


def test_an_observation_without_actions_becomes_a_sample_for_serving() -> None:
    pipe = pipeline()
    row = make_row(pipe.robot, 0)
    observation = {key: row[key] for key in (*pipe.robot.cameras.values(), "observation.state", "task")}
    sample = pipe(observation)
    assert set(sample) == {"images", "image_mask", "tokens", "action_dim_is_pad"}
    assert np.array_equal(sample["images"], pipe(row)["images"]) and np.array_equal(sample["tokens"], pipe(row)["tokens"])


def test_training_and_serving_make_the_same_images() -> None:
    pipe = pipeline("aloha")
    row = make_row(pipe.robot, 0, edge=(48, 64))
    images = {column.rsplit(".")[-1]: row[column].transpose(2, 0, 1) for column in pipe.robot.cameras.values()}
    sent = {"images": images, "state": row["observation.state"], "prompt": row["task"]}
    assert np.array_equal(pipe(pipe.robot.from_client(sent))["images"], pipe(row)["images"])


def test_a_camera_set_to_null_costs_no_pixel_and_changes_no_other() -> None:
    robot = load_robot("aloha")
    row, stats = make_row(robot, 0), make_stats(robot)
    without = robot.replace(cameras=robot.cameras | {"left_wrist_0_rgb": None})
    full, part = Pipeline(SPEC, robot, stats, Recorder())(row), Pipeline(SPEC, without, stats, Recorder())(row)
    assert part["images"].shape[0] == 2 and np.array_equal(part["images"], full["images"][[0, 2]])
    assert all(np.array_equal(part[key], full[key]) for key in ("actions", "tokens"))


def test_a_slot_that_the_model_lacks_is_refused_with_what_it_has() -> None:
    robot = load_robot("aloha").replace(cameras={f"camera_{i}_rgb": f"c{i}" for i in range(4)})
    with pytest.raises(DataError, match="slot 'camera_0_rgb', which this model does not have. Available: base_0_rgb, left_wrist_0_rgb, right_wrist_0_rgb"):
        Pipeline(SPEC, robot, make_stats(load_robot("aloha")), Recorder())


def test_more_cameras_than_three_work_where_the_spec_has_the_slots() -> None:
    slots = (*SPEC.cameras, "base_1_rgb")
    robot = load_robot("aloha")
    robot = robot.replace(cameras={"base_1_rgb": "observation.images.cam_low"} | robot.cameras)
    sample = Pipeline(SPEC.replace(cameras=slots), robot, make_stats(load_robot("aloha")), Recorder())(make_row(robot, 0))
    assert sample["images"].shape[0] == 4
    assert np.array_equal(sample["images"][3], resize_with_pad(make_row(robot, 0)["observation.images.cam_low"], SPEC.vision.image_size))


def test_a_robot_with_more_dims_than_the_model_is_refused() -> None:
    with pytest.raises(DataError, match="Robot 'bi_flexiv' has 20 action dims, the model 11; choose a spec with a larger action_dim"):
        pipeline("bi_flexiv", spec=ModelSpec.tiny())


def test_statistics_padded_to_32_dims_serve_and_shorter_ones_do_not() -> None:
    robot = load_robot("so100")
    row = make_row(robot, 0)
    assert np.array_equal(pipeline(stats=make_stats(robot, extra=26))(row)["actions"], pipeline()(row)["actions"])
    with pytest.raises(DataError, match="statistics of state have 4 dims, robot 'so100' has 6"):
        pipeline(stats=make_stats(load_robot("metaworld")))


def test_statistics_without_quantiles_or_without_a_key_are_refused() -> None:
    stats = make_stats(load_robot("so100"))
    no_quantiles = dataclasses.replace(stats.fields["state"], q01=np.full(6, np.nan))
    with pytest.raises(DataError, match="statistics of state dim 'shoulder_pan.pos' cannot serve for 'quantile'"):
        pipeline(stats=AllStats(stats.fields | {"state": no_quantiles}))
    upside_down = dataclasses.replace(stats.fields["actions"], q99=stats.fields["actions"].q01 - 1)
    with pytest.raises(DataError, match="statistics of actions dim 'shoulder_pan.pos' cannot serve for 'quantile'"):
        pipeline(stats=AllStats(stats.fields | {"actions": upside_down}))
    with pytest.raises(DataError, match="statistics have no 'actions', only state"):
        pipeline(stats=AllStats({"state": stats.fields["state"]}))


def constant_joint() -> tuple[dict, AllStats]:
    """A row whose third joint moves by a tenth of a degree, and statistics in which it never did."""
    robot = load_robot("so100")
    stats, row = make_stats(robot), make_row(robot, 0)
    for key in ("state", "actions"):
        for field in ("mean", "std", "q01", "q99"):
            getattr(stats.fields[key], field)[2] = 0
    row["observation.state"][2], row["action"][:, 2] = 0, np.linspace(0, 0.1, HORIZON)
    return row, stats


@pytest.mark.parametrize(("method", "floor"), [("quantile", "its q99 - q01 is 0 deg, taken as 0.194 deg"), ("zscore", "its std is 0 deg, taken as 0.0485 deg")])
def test_a_near_constant_dim_is_widened_to_a_declared_floor_and_reported(method: str, floor: str) -> None:
    row, stats = constant_joint()
    pipe = pipeline(stats=stats, normalization=method)
    assert pipe.floored == tuple(f"{key} dim 'elbow_flex.pos' hardly moves: {floor}" for key in ("state", "actions"))
    assert np.abs(pipe(row)["actions"][:, 2]).max() < 3
    assert pipeline().floored == ()
    back = pipe.inverse(pipe(row)["actions"], row["observation.state"])
    assert np.allclose(back, row["action"], atol=1e-4)


def test_a_value_far_beyond_the_statistics_is_an_error_that_names_key_dim_and_sample() -> None:
    row, stats = constant_joint()
    with pytest.raises(DataError, match="actions dim 'elbow_flex.pos' of sample 1000 is .* after normalisation, beyond the limit 50"):
        pipeline(stats=stats, floor=0)(row)
    row["observation.state"][0] = 1e5
    with pytest.raises(DataError, match="state dim 'shoulder_pan.pos' of sample 1000 is"):
        pipeline()(row)
    assert pipeline(limit=1e9)(row)["sample_id"] == 1000


def test_repeated_steps_behind_the_episode_are_not_held_to_the_limit() -> None:
    row = make_row(load_robot("so100"), 0)
    row["action"][-1] = 1e6
    assert row["action_is_pad"][-1] and pipeline()(row)["action_is_pad"][-1]
    row["action_is_pad"][:] = False
    with pytest.raises(DataError, match="beyond the limit"):
        pipeline()(row)


def test_a_state_that_is_not_finite_never_becomes_tokens() -> None:
    pipe = pipeline()
    row = make_row(pipe.robot, 0)
    row["observation.state"][5] = np.nan
    with pytest.raises(DataError, match="observation.state dim 'gripper.pos' of sample 1000 is nan"):
        pipe(row)


def test_a_chunk_of_the_model_that_is_not_finite_is_refused() -> None:
    pipe = pipeline()
    actions = np.zeros((HORIZON, 32), np.float32)
    actions[2, 1] = np.inf
    with pytest.raises(DataError, match="model's actions dim 'shoulder_lift.pos', step 2 is inf"):
        pipe.inverse(actions, np.zeros(6))
    actions[2, 1], actions[:, 6:] = 0, np.nan  # dims that the robot does not have
    assert np.isfinite(pipe.inverse(actions, np.zeros(6))).all()


def test_a_pipeline_travels_to_a_worker_process() -> None:
    pipe = pipeline()
    row = make_row(pipe.robot, 0)
    np.testing.assert_equal(pickle.loads(pickle.dumps(pipe))(row), pipe(row))
