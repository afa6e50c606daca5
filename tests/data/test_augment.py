"""Augmentation as data: what is drawn, that it belongs to a sample, and that the loader hands it on. What it does to pixels: parity/level_0_augment.py."""

import dataclasses
import importlib
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from pi05.batch import AUGMENT_AXES, AugmentDraws, Draws, make_draws
from pi05.data.augment import draw_augmentation
from pi05.data.dataset import Dataset, open_dataset
from pi05.data.images import resize_with_pad
from pi05.data.loader import Loader, make_loader
from pi05.errors import ConfigError, DataError
from pi05.robots import load_robot
from pi05.spec import ModelSpec
from tests.data import recordings
from tests.data.recordings import LENGTHS, TinyPipeline, TinyRobot

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb", "top_0_rgb")
MOVING, WRISTS = [0, 3], [1, 2]
SIZE, COUNT = 224, 1500
SPEC = ModelSpec.tiny()
SLOTS = ("base_0_rgb", "left_wrist_0_rgb")  # of TinyRobot
FRAMES = sum(LENGTHS)
BATCH = 8
DATA = Path(__file__).resolve().parents[2] / "data"
each_preset = pytest.mark.parametrize("preset", ["openpi", "standard"])


def draw(preset: str, cameras: tuple[str, ...] = CAMERAS, positions: np.ndarray | None = None, *, seed: int = 3, epoch: int = 0) -> AugmentDraws:
    positions = np.arange(COUNT) if positions is None else positions
    return draw_augmentation(preset, cameras, SIZE, seed=seed, epoch=epoch, positions=positions)


def windows(affine: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, angle in degrees, and how far the window's centre lies from the image's (down, right), of maps that turn and scale."""
    matrix, offset = affine[..., :2].astype(np.float64), affine[..., 2].astype(np.float64)
    np.testing.assert_allclose(matrix[..., 0, :] * [1, -1], matrix[..., 1, ::-1], atol=1e-7)
    shift = offset + (matrix.sum(-1) - 1) * (SIZE - 1) / 2
    cos, sin = matrix[..., 0, 0], matrix[..., 0, 1]
    return np.hypot(cos, sin), np.degrees(np.arctan2(sin, cos)), shift


def corners(affine: np.ndarray) -> np.ndarray:
    """Where the centres of the four outermost pixels are read, [..., 2, 4] in pixels."""
    last = SIZE - 1
    return affine.astype(np.float64) @ np.array([[0, 0, last, last], [0, last, 0, last], [1, 1, 1, 1]])


def assert_uniform(values: np.ndarray, limit: float) -> None:
    """Kolmogorov and Smirnov's distance from the uniform distribution on [-limit, limit]; 1.95 / sqrt(n) is the 0.1 % point."""
    values = np.sort(values.ravel() / limit)
    assert np.abs((values + 1) / 2 - (np.arange(values.size) + 0.5) / values.size).max() < 1.95 / np.sqrt(values.size)
    assert np.abs(values).max() <= 1 + 1e-5


class TestOpenpi:
    drawn = draw("openpi")

    def test_a_crop_of_212_pixels_at_a_sub_pixel_place_is_turned_by_up_to_five_degrees(self) -> None:
        scale, angle, shift = windows(self.drawn.affine[:, 0])
        np.testing.assert_allclose(scale, 212 / 224, atol=1e-6)
        assert_uniform(angle, 5)
        assert_uniform(shift[:, 0], 6)
        assert_uniform(shift[:, 1], 6)
        assert np.abs(shift - shift.round()).max() > 0.4

    def test_its_window_leaves_the_image(self) -> None:
        """That is where the black corners come from."""
        outside = np.maximum(-corners(self.drawn.affine[:, 0]), corners(self.drawn.affine[:, 0]) - (SIZE - 1)).max((1, 2))
        assert (outside > 1).mean() > 0.25 and outside.max() > 8

    def test_half_of_the_images_change_their_colours(self) -> None:
        changed = (self.drawn.hsv != [0, 1, 0]).all(-1)
        assert (changed == (self.drawn.hsv != [0, 1, 0]).any(-1)).all(), "all three numbers or none"
        for camera in (0, 1):
            assert abs(changed[:, camera].mean() - 0.5) < 4 * 0.5 / np.sqrt(COUNT)
            brightness, slope, turn = self.drawn.hsv[changed[:, camera], camera].astype(np.float64).T
            assert_uniform(brightness, 0.3)
            assert_uniform(np.arctan(slope) * 4 / np.pi - 1, 0.4)
            assert_uniform(turn, 0.1)

    def test_saturation_stays(self) -> None:
        assert (self.drawn.colour == 1).all()

    def test_one_key_serves_all_cameras_of_a_kind(self) -> None:
        for name in AUGMENT_AXES:
            array = getattr(self.drawn, name)
            np.testing.assert_array_equal(array[:, MOVING[0]], array[:, MOVING[1]])
            np.testing.assert_array_equal(array[:, WRISTS[0]], array[:, WRISTS[1]])
        assert np.mean((self.drawn.hsv[:, 0] == self.drawn.hsv[:, 1]).all(-1)) < 0.3, "equal where neither changes: a quarter"


class TestStandard:
    drawn = draw("standard")

    def test_the_window_never_leaves_the_image_and_reaches_its_edges(self) -> None:
        places = corners(self.drawn.affine[:, MOVING])
        assert places.min() > -1e-4 and places.max() < SIZE - 1 + 1e-4, "float32 of a pixel"
        assert places.min() < 0.1 and places.max() > SIZE - 1.1

    def test_it_is_95_percent_large_unless_its_turn_needs_it_smaller(self) -> None:
        scale, angle, _ = windows(self.drawn.affine[:, 0])
        assert_uniform(angle, 5)
        small = np.abs(angle) < 3.09
        np.testing.assert_allclose(scale[small], 0.95, atol=1e-6)
        assert 0.55 < small.mean() < 0.68 and scale.min() > 0.92 and scale[np.abs(angle) > 3.11].max() < 0.95

    def test_colours_change_by_their_factors_always(self) -> None:
        for i, limit in enumerate((0.3, 0.4, 0.5)):
            assert_uniform(self.drawn.colour[..., i].astype(np.float64) - 1, limit)
        assert (self.drawn.hsv == [0, 1, 0]).all()

    def test_cameras_are_drawn_apart(self) -> None:
        values = np.concatenate([self.drawn.colour.reshape(COUNT, -1), *(np.stack(windows(self.drawn.affine[:, i])[1:2], -1) for i in MOVING)], -1)
        apart = np.corrcoef(values.T) - np.eye(values.shape[1])
        assert np.abs(apart).max() < 5 / np.sqrt(COUNT)


@each_preset
def test_wrist_cameras_are_never_moved(preset: str) -> None:
    drawn = draw(preset)
    assert (drawn.affine[:, WRISTS] == np.eye(2, 3)).all()
    assert (drawn.affine[:, MOVING] != np.eye(2, 3)).any((2, 3)).all()
    assert ((drawn.hsv != [0, 1, 0]) | (drawn.colour != 1))[:, WRISTS].any(), "their colours change"


@each_preset
def test_draws_are_a_function_of_seed_epoch_and_position(preset: str) -> None:
    alone = draw(preset, positions=np.array([9]))
    together = draw(preset, positions=np.array([5, 9, 1]))
    fewer = draw(preset, ("top_0_rgb", "left_wrist_0_rgb"), np.array([9]))
    others = [draw(preset, positions=np.array([9]), seed=4), draw(preset, positions=np.array([9]), epoch=1), draw(preset, positions=np.array([8]))]
    for name in AUGMENT_AXES:
        np.testing.assert_array_equal(getattr(together, name)[1], getattr(alone, name)[0])
        np.testing.assert_array_equal(getattr(fewer, name)[0], getattr(alone, name)[0, [3, 1]], err_msg="a camera's draws depend on its name alone")
    for other in others:
        assert not np.array_equal(other.affine[0, 0], alone.affine[0, 0])


@each_preset
def test_draws_are_valid_and_refused_if_broken(preset: str) -> None:
    drawn = draw(preset, CAMERAS[:3], np.arange(5))
    noise = make_draws(SPEC, 0, 0, np.arange(5))
    Draws(noise=noise.noise, time=noise.time, augment=drawn).validate(SPEC, 5)
    for fields, says in (
        ({"hsv": drawn.hsv[:, :2]}, r"augment.hsv has shape \(5, 2, 3\); it must be \[B, C, 3\] = \(5, 3, 3\)"),
        ({"affine": drawn.affine.astype(np.float64)}, "augment.affine has dtype float64"),
        ({"colour": drawn.colour * np.nan}, r"augment.colour\[0, 0, 0\] is nan"),
        ({"hsv": drawn.hsv * 0}, "slopes be positive"),
    ):
        with pytest.raises(ValueError, match=says):
            Draws(noise=noise.noise, time=noise.time, augment=dataclasses.replace(drawn, **fields)).validate(SPEC, 5)
    with pytest.raises(ValueError, match="augment holds 4 cameras"):
        draw(preset, positions=np.arange(5)).validate(SPEC, 5)


def test_none_draws_nothing_and_an_unknown_preset_is_refused() -> None:
    assert draw("none") is None
    with pytest.raises(ConfigError, match="augmentation is 'strong'; it can be none, openpi, standard"):
        draw("strong")


def test_the_stream_of_draws_is_pinned() -> None:
    """A change of these numbers changes every training run; it is a decision, not an accident."""
    for preset, pinned in PINNED.items():
        drawn = draw(preset, positions=np.array([0]), seed=0)
        np.testing.assert_allclose([drawn.affine[0, 0, 0, 2], *drawn.hsv[0, 1], *drawn.colour[0, 1]], pinned, rtol=1e-5)


PINNED = {  # of the first camera's map one number, of the second one's colours all
    "openpi": (0.5503898, -0.1689601, 0.6561616, 0.009724848, 1, 1, 1),
    "standard": (6.769945, 0, 1, 0, 1.113245, 1.298934, 0.6324661),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("augment")
    recordings.write_by_hand(root / "set")
    return open_dataset(root / "set", robot=TinyRobot(), action_horizon=SPEC.action_horizon, cache_dir=root / "tables")


@dataclasses.dataclass(frozen=True)
class OneEyed(TinyPipeline):
    """The first camera is absent from every third sample."""

    def __call__(self, row: dict) -> dict:
        return super().__call__(row) | {"image_mask": np.array([row["index"] % 3 > 0, True])}


def make(dataset: Dataset, preset: str, pipeline: TinyPipeline | None = None, **options) -> Loader:
    options = {"batch_size": BATCH, "seed": 1, "num_workers": 0, "augmentation": preset, "cameras": SLOTS} | options
    return make_loader(dataset, pipeline or TinyPipeline(SPEC), SPEC, **options)


def read(loader: Loader, first: int = 0, last: int = 7) -> list[dict[str, np.ndarray]]:
    """Copies of every array of the batches; the draws of images by "augment.NAME"."""
    out = []
    for batch, draws in loader.batches(first, last):
        parts = {"": batch.observation, " ": batch, "  ": draws} | ({"augment.": draws.augment} if draws.augment else {})
        arrays = {prefix.strip() + name: value for prefix, part in parts.items() for name, value in vars(part).items() if isinstance(value, np.ndarray)}
        out.append({name: value.copy() for name, value in arrays.items()})
    return out


def assert_same(got: list[dict[str, np.ndarray]], want: list[dict[str, np.ndarray]], *, but: tuple[str, ...] = ()) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.keys() - set(but) == other.keys() - set(but)
        for name in other.keys() - set(but):
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


NAMES = tuple(f"augment.{name}" for name in AUGMENT_AXES)


@each_preset
def test_the_loader_hands_on_the_draws_of_each_place_in_the_epoch(dataset: Dataset, preset: str) -> None:
    batches = read(make(dataset, preset))
    assert BATCH * len(batches) > FRAMES, "more than one epoch, and a batch that spans two"
    for name in AUGMENT_AXES:
        epochs = [draw_augmentation(preset, SLOTS, 70, seed=1, epoch=epoch, positions=np.arange(FRAMES)) for epoch in range(2)]
        want = np.concatenate([getattr(epoch, name) for epoch in epochs])
        np.testing.assert_array_equal(np.concatenate([batch[f"augment.{name}"] for batch in batches]), want[: BATCH * len(batches)])


def test_neither_workers_nor_processes_nor_a_resumed_run_change_a_draw(dataset: Dataset) -> None:
    straight = read(make(dataset, "standard", token_len=48))
    with make(dataset, "standard", token_len=48, num_workers=2) as loader:
        assert_same(read(loader), straight, but=("tokens",))  # whose second says whether JAX is loaded
    parts = [read(make(dataset, "standard", token_len=48, process_index=index, process_count=2)) for index in range(2)]
    assert_same([{name: np.concatenate([part[name] for part in pair]) for name in pair[0]} for pair in zip(*parts, strict=True)], straight)
    assert_same(read(make(dataset, "standard", token_len=48), 3, 7), straight[3:])


def test_augmentation_changes_nothing_else_of_a_batch(dataset: Dataset) -> None:
    """Images travel as the bytes that they are, noise and times keep their stream, and "none" is no draw at all."""
    plain, augmented = read(make(dataset, "none")), read(make(dataset, "openpi"))
    assert not set(plain[0]) & set(NAMES) and set(augmented[0]) >= set(NAMES)
    assert_same(augmented, plain, but=NAMES)
    assert augmented[0]["images"].dtype == np.uint8


@each_preset
def test_an_absent_camera_is_not_augmented(dataset: Dataset, preset: str) -> None:
    for batch, whole in zip(read(make(dataset, preset, OneEyed(SPEC))), read(make(dataset, preset)), strict=True):
        absent, neutral = ~batch["image_mask"], AugmentDraws.identity(BATCH, 2)
        assert 0 < absent.sum() < BATCH
        for name in AUGMENT_AXES:
            np.testing.assert_array_equal(batch[f"augment.{name}"][absent], getattr(neutral, name)[absent])
            np.testing.assert_array_equal(batch[f"augment.{name}"][~absent], whole[f"augment.{name}"][~absent])


def test_a_resumed_run_with_another_preset_is_refused(dataset: Dataset) -> None:
    saved = make(dataset, "openpi").state(step=2)
    make(dataset, "openpi").check_state(saved)
    with pytest.raises(DataError, match="augmentation was 'openpi', is 'standard'"):
        make(dataset, "standard").check_state(saved)
    with pytest.raises(DataError, match="augmentation was 'openpi', is 'none'"):
        make(dataset, "none").check_state(saved)


def test_cameras_that_are_not_the_samples_are_refused(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="Samples have 2 images, cameras names the slots .*: augmentation must know which they are"):
        make(dataset, "openpi", cameras=None)
    with pytest.raises(ConfigError, match="augmentation is 'strong'"):
        make(dataset, "strong")
    make(dataset, "none", cameras=None)


def frames() -> np.ndarray:
    """uint8[2, 2, 224, 224, 3]: both cameras of two real frames."""
    robot = load_robot("metaworld")
    dataset = open_dataset(DATA / "metaworld_mini", robot=robot, action_horizon=8)
    rows = [dataset[row] for row in (30, len(dataset) - 20)]
    return np.stack([[resize_with_pad(row[column], 224) for column in robot.cameras.values()] for row in rows])


def augmented(backend: str, images: np.ndarray, draws: AugmentDraws) -> np.ndarray:
    module, model = (importlib.import_module(f"pi05.{backend}_backend.{name}") for name in ("augment", "model"))
    pixels = module.augment(model.from_numpy(images), model.from_numpy(draws), model.from_numpy(draws.colour).dtype)
    return np.asarray(pixels)


@each_preset
def test_both_backends_make_the_same_of_real_frames(preset: str) -> None:
    """The promise is 2/255 of white; kept is a 100th of it."""
    images = frames()
    draws = draw(preset, ("base_0_rgb", "left_wrist_0_rgb"), np.arange(2))
    first, second = augmented("jax", images, draws), augmented("torch", images, draws)
    assert first.dtype == second.dtype == np.float32 and np.abs(first - images / 127.5 + 1).mean() > 0.05
    assert np.abs(first - second).max() / 2 < 0.01 * 2 / 255


def test_only_openpi_shows_black_that_no_camera_saw() -> None:
    images = np.full((200, 1, 32, 32, 3), 255, np.uint8)
    for preset, black in (("openpi", True), ("standard", False)):
        draws = draw_augmentation(preset, ("base_0_rgb",), 32, seed=0, epoch=0, positions=np.arange(200))
        draws = dataclasses.replace(draws, hsv=AugmentDraws.identity(200, 1).hsv, colour=AugmentDraws.identity(200, 1).colour)
        darkest = augmented("torch", images, draws).min((1, 2, 3, 4))
        assert ((darkest < -0.9).any() and (darkest > 0.999).any()) if black else (darkest > 0.999).all()


def test_a_factor_of_saturation_fades_towards_pillows_grey() -> None:
    image = frames()[0, 0]
    draws = AugmentDraws.identity(1, 1)
    draws.colour[..., 2] = 0
    got = (augmented("torch", image[None, None], draws)[0, 0] + 1) / 2 * 255
    want = np.asarray(PIL.Image.fromarray(image).convert("L"), np.float32)[..., None]
    assert np.abs(got - want).max() < 1, "Pillow rounds"
