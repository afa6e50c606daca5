"""Statistics that are kept come back as they were, and foreign ones are taken for what they are."""

import json
import pickle
from pathlib import Path

import numpy as np
import pydantic
import pytest

from pi05.data.measure import compute_norm_stats, measure
from pi05.data.norm_stats import ARRAYS, NormStats, from_lerobot_stats, load_openpi
from pi05.errors import DataError
from pi05.robots import load_robot
from tests.data.tables import ARM, episodes, write_v3

LEROBOT = Path(__file__).resolve().parents[2] / "data/metaworld_mini/meta/stats.json"


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> NormStats:
    return compute_norm_stats(write_v3(tmp_path_factory.mktemp("arm") / "arm", episodes(9, 3)), ARM, action_horizon=6)


def test_saved_statistics_come_back_to_the_bit(stats: NormStats, tmp_path: Path) -> None:
    stats.save(tmp_path / "deep/stats.json")
    for back in (NormStats.load(tmp_path / "deep/stats.json"), pickle.loads(pickle.dumps(stats))):
        assert back.fingerprint == stats.fingerprint
        for key, field in stats.fields.items():
            assert back.fields[key].count == field.count
            assert all(np.array_equal(getattr(back.fields[key], name), getattr(field, name)) for name in ARRAYS)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["stats.json"]


def test_who_reads_while_a_new_file_is_saved_sees_all_of_the_old(stats: NormStats, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    stats.save(path)
    before = path.read_text()
    with path.open() as reader:
        NormStats({"state": stats.fields["state"]}, {}).save(path)
        assert reader.read() == before != path.read_text()


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(stats: NormStats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stats.json"
    stats.save(path)
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        NormStats({"state": stats.fields["state"]}, {}).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_openpi_reads_our_file_and_we_read_openpis(stats: NormStats, tmp_path: Path) -> None:
    class TheirStats(pydantic.BaseModel):
        mean: list[float]
        std: list[float]
        q01: list[float] | None = None
        q99: list[float] | None = None

    class TheirFile(pydantic.BaseModel):
        norm_stats: dict[str, TheirStats]

    stats.save(tmp_path / "ours.json")
    theirs = TheirFile.model_validate_json((tmp_path / "ours.json").read_text())
    assert theirs.norm_stats["actions"].q99 == stats.fields["actions"].q99.tolist()
    theirs.norm_stats["state"].q01 = theirs.norm_stats["state"].q99 = None
    (tmp_path / "theirs.json").write_text(theirs.model_dump_json())
    back = load_openpi(tmp_path / "theirs.json")
    assert np.array_equal(back.fields["actions"].q01, stats.fields["actions"].q01) and back.fingerprint == {"source": "openpi"}
    assert np.isnan(back.fields["state"].q01).all() and np.isnan(back.fields["actions"].max).all() and back.fields["state"].count == 0
    back.save(tmp_path / "again.json")
    assert np.isnan(NormStats.load(tmp_path / "again.json").fields["state"].q01).all()
    with pytest.raises(DataError, match="has the format version None, this release reads 1.*load_openpi"):
        NormStats.load(tmp_path / "theirs.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no JSON"),
        ("{}", 'it has no "norm_stats"'),
        ('{"norm_stats": {"state": {"mean": [1, 2]}}}', "statistics of 'state' are damaged .KeyError: 'std'"),
        ('{"norm_stats": {"state": {"mean": [1, 2], "std": [1, 2], "q01": [0]}}}', r"q01 of 'state' has shape \(1,\), its mean \(2,\)"),
        (None, "There is no file"),
    ],
)
def test_a_damaged_file_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_openpi(path)


def test_lerobots_statistics_are_refused_where_the_model_sees_other_numbers(tmp_path: Path) -> None:
    """user_reports 2.4, 2.8."""
    for robot in (load_robot("so100"), load_robot("aloha").replace(delta_kinds=())):
        with pytest.raises(DataError, match=f"the model sees those of robot '{robot.name}' converted or relative to the state"):
            from_lerobot_stats(LEROBOT, robot)
    content = json.loads(LEROBOT.read_text())
    for column in ("observation.state", "action"):
        content[column] = {name: content[column][name] for name in ("mean", "std", "min", "max", "count")}
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert np.isnan(from_lerobot_stats(tmp_path / "old.json", load_robot("metaworld")).fields["actions"].q99).all()
    with pytest.raises(DataError, match="has no statistics of 'actions'. .* Did you mean 'action'?"):
        from_lerobot_stats(tmp_path / "old.json", load_robot("metaworld").replace(action_column="actions"))


def test_a_dim_that_hardly_moves_is_flagged() -> None:
    """user_reports 2.1."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (500, 4)) * [1, 0.5e-2, 0, 0.5e-4] + [0, 5, 0.3, 0.7]
    stats = measure(lambda: [{"state": x}])["state"]
    assert stats.near_constant(ARM.state).tolist() == [False, True, True, True], "0.1 % of 20 rad, and of 1"
    assert stats.near_constant(ARM.state, share=1e-4).tolist() == [False, False, True, True]
    assert stats.near_constant(ARM.state[:2]).tolist() == [False, True]
