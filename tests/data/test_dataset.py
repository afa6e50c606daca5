"""Rows of LeRobot datasets: the right ones, and a clear no to what cannot be right. LeRobot is the oracle, not the implementation."""

import pickle
import shutil
import socket
from pathlib import Path

import huggingface_hub
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet
import pytest

from pi05.data.dataset import Dataset, mix, open_dataset
from pi05.errors import DataError
from tests.data import recordings
from tests.data.recordings import CAMERAS, FPS, LENGTHS, TASKS, TinyRobot, change_json, numbers, seen, where

HORIZON = 8
ROWS = where()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="session")
def video_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("v3") / "video"
    recordings.write_with_lerobot(root, video=True)
    return root


@pytest.fixture(scope="session")
def image_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("v3") / "image"
    recordings.write_with_lerobot(root, video=False)
    return root


@pytest.fixture(scope="session")
def image_v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("v2") / "image"
    recordings.write_by_hand(root)
    return root


@pytest.fixture(scope="session")
def video_v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("v2") / "video"
    recordings.write_by_hand(root, video=True)
    return root


@pytest.fixture
def read(cache: Path):
    def read(root: Path, robot: TinyRobot | None = None, **options) -> Dataset:
        return open_dataset(root, robot=robot or TinyRobot(), action_horizon=HORIZON, cache_dir=cache, **options)

    return read


@pytest.fixture
def copied(tmp_path: Path):
    def copied(root: Path) -> Path:
        return Path(shutil.copytree(root, tmp_path / root.name))

    return copied


@pytest.mark.parametrize("kind", ["video_v3", "image_v3"])
def test_every_row_equals_lerobots(kind: str, read, request: pytest.FixtureRequest) -> None:
    from lerobot.datasets import LeRobotDataset

    root = request.getfixturevalue(kind)
    deltas = {"action": [step / FPS for step in range(HORIZON)]}
    theirs = LeRobotDataset("test/tiny", root=root, delta_timestamps=deltas, video_backend="pyav", return_uint8=True)
    ours = read(root)
    assert len(ours) == len(theirs) == sum(LENGTHS)
    for index in range(len(ours)):
        got, want = ours[index], theirs[index]
        for column in ("observation.state", "action", "action_is_pad"):
            assert got[column].dtype in (np.float32, bool)
            np.testing.assert_array_equal(got[column], want[column].numpy(), err_msg=f"{column} of row {index}")
        for camera in CAMERAS:
            image = want[camera].numpy().transpose(1, 2, 0)
            np.testing.assert_array_equal(got[camera], np.round(image * 255) if kind == "image_v3" else image, err_msg=f"{camera} of row {index}")
            assert got[camera].dtype == np.uint8
        assert (got["task"], got["index"], got["episode_index"]) == (want["task"], want["index"].item(), want["episode_index"].item())


def test_v2_and_v3_give_identical_rows(read, image_v2: Path, image_v3: Path) -> None:
    old, new = read(image_v2), read(image_v3)
    assert old.fingerprint == new.fingerprint
    for index in range(len(new)):
        assert old[index].keys() == new[index].keys()
        assert all(np.array_equal(old[index][key], new[index][key]) for key in new[index])


@pytest.mark.parametrize("kind", ["video_v3", "image_v3", "video_v2", "image_v2"])
def test_every_frame_shows_its_own_row(kind: str, read, request: pytest.FixtureRequest) -> None:
    dataset = read(request.getfixturevalue(kind))
    order = np.random.default_rng(0).permutation(len(dataset))
    assert {int(i): seen(dataset[int(i)][camera]) for i in order for camera in CAMERAS} == dict(enumerate(ROWS))


def test_action_chunks_stop_at_the_episode_and_repeat_its_last_action(read, image_v2: Path) -> None:
    dataset = read(image_v2)
    for index, (episode, frame) in enumerate(ROWS):
        steps = [min(frame + step, LENGTHS[episode] - 1) for step in range(HORIZON)]
        np.testing.assert_array_equal(dataset[index]["action"], [numbers(episode, step)[1] for step in steps])
        np.testing.assert_array_equal(dataset[index]["action_is_pad"], [frame + step >= LENGTHS[episode] for step in range(HORIZON)])


def test_wrong_time_stamps_select_no_wrong_frame(read, copied, video_v3: Path) -> None:
    root = copied(video_v3)
    data, meta = root / "data/chunk-000/file-000.parquet", root / "meta/episodes/chunk-000/file-000.parquet"
    table = pyarrow.parquet.read_table(data)
    late = pa.array(table["timestamp"].to_numpy() + np.float32(0.7), pa.float32())
    pyarrow.parquet.write_table(table.set_column(table.schema.get_field_index("timestamp"), "timestamp", late), data)
    table = pyarrow.parquet.read_table(meta)
    for camera in CAMERAS:  # as LeRobot's running float sum, but 0.4 frames an episode: 0.8 frames in the third
        column = f"videos/{camera}/from_timestamp"
        drifted = table[column].to_numpy() + 0.4 / FPS * np.arange(len(LENGTHS))
        table = table.set_column(table.schema.get_field_index(column), column, pa.array(drifted))
    pyarrow.parquet.write_table(table, meta)
    dataset = read(root)
    assert [seen(dataset[index][CAMERAS[0]]) for index in range(len(dataset))] == ROWS


def test_a_deleted_episode_leaves_a_gap_in_the_video_and_nothing_else(read, copied, video_v3: Path) -> None:
    root = copied(video_v3)
    meta = root / "meta/episodes/chunk-000/file-000.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(meta).take([0, 2]), meta)
    data = root / "data/chunk-000/file-000.parquet"
    table = pyarrow.parquet.read_table(data)
    pyarrow.parquet.write_table(table.filter(pa.array(table["episode_index"].to_numpy() != 1)), data)
    change_json(root / "meta/info.json", total_frames=LENGTHS[0] + LENGTHS[2])
    dataset = read(root)
    assert [seen(dataset[index][CAMERAS[1]]) for index in range(len(dataset))] == [row for row in ROWS if row[0] != 1]


def test_episodes_that_overlap_in_their_video_are_refused(read, copied, video_v3: Path) -> None:
    root = copied(video_v3)
    meta = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pyarrow.parquet.read_table(meta)
    column = f"videos/{CAMERAS[0]}/from_timestamp"
    early = pa.array(table[column].to_numpy() - np.array([0, 0, 2.0 / FPS]))
    pyarrow.parquet.write_table(table.set_column(table.schema.get_field_index(column), column, early), meta)
    with pytest.raises(DataError, match="has 14 frames but only 12 in the video"):
        read(root)


@pytest.mark.parametrize("video_fps", [9, 20])
def test_a_video_of_another_rate_than_the_dataset_is_refused(video_fps: int, read, tmp_path: Path) -> None:
    recordings.write_by_hand(tmp_path / "set", video=True, video_fps=video_fps)
    with pytest.raises(DataError, match=f"set, episode 0, frame 3: .* runs at {video_fps} frames/s .* Re-encode it"):
        read(tmp_path / "set")[3]


@pytest.mark.parametrize("kept_bytes", [0, 600, 1500])
def test_a_damaged_video_is_named(kept_bytes: int, read, copied, video_v2: Path) -> None:
    root = copied(video_v2)
    path = root / f"videos/chunk-000/{CAMERAS[0]}/episode_000001.mp4"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(DataError, match="video, episode 1, frame 2: .*episode_000001.mp4 (cannot be decoded|holds no video)"):
        read(root)[LENGTHS[0] + 2]


def test_a_video_shorter_than_its_episode_is_named(read, copied, video_v2: Path) -> None:
    root = copied(video_v2)
    recordings.encode(root / f"videos/chunk-000/{CAMERAS[0]}/episode_000000.mp4", [recordings.picture(0, 0, 0)] * 4, FPS)
    with pytest.raises(DataError, match="video, episode 0, frame 4: .* has no frame 4"):
        read(root)[4]


def test_images_of_future_rows_are_never_decoded(read, image_v3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, opened, original = read(image_v3), [], PIL.Image.open
    monkeypatch.setattr(PIL.Image, "open", lambda *args, **kwargs: opened.append(1) or original(*args, **kwargs))
    dataset[0]
    assert len(opened) == len(CAMERAS)


def test_a_local_folder_is_read_without_a_connection_attempt(read, video_v3: Path, image_v2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[object] = []

    def refuse(*args: object, **_: object) -> None:
        attempts.append(args)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for root in (video_v3, image_v2):
        read(root)[0]
    assert not attempts
    with pytest.raises(OSError, match="no network in this test"):
        socket.create_connection(("pi05.example", 80))
    assert attempts, "the test itself must be able to see an attempt"


def test_a_hub_id_is_downloaded_and_then_read_like_a_folder(read, image_v3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="'nobody/nothing' is neither a folder nor a dataset that the Hub gives out now"):
        read("nobody/nothing")
    asked: list[object] = []

    def give(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options))
        return str(image_v3)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    dataset = read("somebody/tiny", revision="abc", images=False)
    assert dataset[3]["index"] == 3 and dataset.describe(3) == "somebody/tiny, episode 0, frame 3"
    assert asked == [("somebody/tiny", {"repo_type": "dataset", "revision": "abc", "ignore_patterns": "videos/*"})]


def test_a_missing_file_is_an_error_and_nothing_is_created(read, copied, tmp_path: Path, video_v3: Path) -> None:
    root = copied(video_v3)
    next((root / "videos").rglob("*.mp4")).unlink()
    with pytest.raises(DataError, match=r"file-000.mp4 is missing; episode 0 needs it"):
        read(root)
    with pytest.raises(DataError, match="absent is not a LeRobot dataset"):
        read(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_numbers_are_read_without_videos(read, copied, video_v3: Path) -> None:
    root = copied(video_v3)
    shutil.rmtree(root / "videos")
    dataset = read(root, images=False)
    assert not set(CAMERAS) & set(dataset[0])
    for episode, row in enumerate(dataset.episodes()):
        states, actions = zip(*(numbers(episode, frame) for frame in range(LENGTHS[episode])), strict=True)
        np.testing.assert_array_equal(row["observation.state"], states)
        np.testing.assert_array_equal(row["action"], actions)
        assert row["task"] == [TASKS[episode]] * LENGTHS[episode]


@pytest.mark.parametrize("version", ["v1.6", "v3.1", None])
def test_an_unknown_format_names_the_known_ones_and_the_converter(version: str | None, read, copied, image_v2: Path) -> None:
    root = copied(image_v2)
    change_json(root / "meta/info.json", codebase_version=version)
    with pytest.raises(DataError, match=r"reads v2.0, v2.1, v3.0.*python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=local/image --root="):
        read(root)


def test_a_missing_column_is_named_with_what_exists(read, image_v2: Path) -> None:
    with pytest.raises(DataError, match=r"no number column 'actions' that robot 'tiny' reads. Available: observation.state, action. Did you mean 'action'"):
        read(image_v2, TinyRobot(action_column="actions"))
    with pytest.raises(DataError, match=r"no camera column 'observation.images.top' that .* Available: observation.images.front, observation.images.wrist"):
        read(image_v2, TinyRobot(cameras={"base_0_rgb": "observation.images.top"}))


def test_the_prompt_may_come_from_a_column_of_its_own(read, image_v2: Path) -> None:
    dataset = read(image_v2, TinyRobot(prompt_column="instruction"))
    assert dataset[LENGTHS[0] + 3]["instruction"] == "lift the dot 3"
    with pytest.raises(DataError, match="no text column 'language' .* Available: instruction"):
        read(image_v2, TinyRobot(prompt_column="language"))


def test_another_rate_than_the_robots_is_refused_until_it_is_accepted_by_name(read, image_v2: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"image has 10 frames/s, expected 15: .* accept_fps=\[10\]"):
        read(image_v2, TinyRobot(fps=15))
    assert len(read(image_v2, TinyRobot(fps=15), accept_fps=[10])) == sum(LENGTHS)
    recordings.write_by_hand(tmp_path / "fast", fps=30)
    ours, fast = (read(root, TinyRobot(fps=None)) for root in (image_v2, tmp_path / "fast"))
    with pytest.raises(DataError, match="fast has 30 frames/s, expected 10"):
        mix([ours, fast])
    assert mix([ours, fast], accept_fps=[30]).fps == (10, 30)


def test_a_mixture_numbers_its_rows_through_and_refuses_what_does_not_fit(read, image_v2: Path, video_v2: Path) -> None:
    first, second = read(image_v2, episodes=[0]), read(video_v2, exclude=[0])
    both = mix([first, second], [1, 3])
    assert both.weights == (0.25, 0.75)
    assert [(both[i]["dataset_index"], both[i]["episode_index"], both[i]["index"]) for i in (0, 10, 11)] == [(0, 0, 0), (0, 0, 10), (1, 1, 11)]
    assert both.describe(11) == "video, episode 1, frame 0"
    with pytest.raises(DataError, match=r"weights is \[1, 0\]"):
        mix([first, second], [1, 0])
    with pytest.raises(DataError, match="cannot be mixed: columns are"):
        mix([first, read(image_v2, TinyRobot(cameras={"base_0_rgb": CAMERAS[1]}))])


def test_chosen_and_excluded_episodes_split_the_dataset(read, video_v3: Path) -> None:
    train, held_out = read(video_v3, exclude=[1]), read(video_v3, episodes=[1])
    indices = [[dataset[i]["index"] for i in range(len(dataset))] for dataset in (train, held_out)]
    assert sorted(indices[0] + indices[1]) == list(range(sum(LENGTHS)))
    assert [seen(held_out[i][CAMERAS[0]]) for i in range(len(held_out))] == [row for row in ROWS if row[0] == 1]
    assert train.fingerprint != held_out.fingerprint
    with pytest.raises(DataError, match="has no episode 7; it has 3, numbered 0 to 2"):
        read(video_v3, episodes=[0, 7])
    with pytest.raises(DataError, match="no episode is left"):
        read(video_v3, exclude=[0, 1, 2])


def test_a_value_that_is_not_finite_names_dataset_episode_and_frame(read, copied, image_v2: Path) -> None:
    root = copied(image_v2)
    path = root / "data/chunk-000/episode_000001.parquet"
    table = pyarrow.parquet.read_table(path)
    actions = table["action"].to_pylist()
    actions[5][0] = float("nan")
    pyarrow.parquet.write_table(table.set_column(table.schema.get_field_index("action"), "action", pa.array(actions, pa.list_(pa.float32()))), path)
    dataset = read(root)
    dataset[LENGTHS[0] + 6]
    with pytest.raises(DataError, match="image, episode 1, frame 2: action is not finite"):
        dataset[LENGTHS[0] + 5 - 3]


@pytest.mark.parametrize("error", [-1, 1])
def test_tables_and_metadata_that_disagree_are_refused(error: int, read, copied, image_v2: Path) -> None:
    root = copied(image_v2)
    lines = (root / "meta/episodes.jsonl").read_text()
    (root / "meta/episodes.jsonl").write_text(lines.replace(": 11", f": {11 + error}").replace(": 14", f": {14 - error}"))
    with pytest.raises(DataError, match="disagree on where episodes begin"):
        read(root)
    change_json(root / "meta/info.json", total_frames=33)
    with pytest.raises(DataError, match="promises 33 frames, its episodes have 34"):
        read(root)


def test_a_row_changed_by_its_reader_is_read_again_unchanged(read, image_v2: Path) -> None:
    dataset = read(image_v2)
    row = dataset[5]
    for key in ("action", "observation.state"):
        row[key][:] = 1e9
    np.testing.assert_array_equal(dataset[5]["action"][0], numbers(0, 5)[1])
    np.testing.assert_array_equal(dataset[5]["observation.state"], numbers(0, 5)[0])


def test_a_dataset_travels_to_a_worker_as_a_few_kilobytes_without_its_open_files(read, video_v2: Path) -> None:
    dataset = read(video_v2)
    here = dataset[7]
    packed = pickle.dumps(dataset)
    there = pickle.loads(packed)[7]
    assert len(packed) < 20_000
    assert all(np.array_equal(here[key], there[key]) for key in here)
