"""The doctor: a healthy dataset, what is saved, the command."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from pi05.data.dataset import find_dataset
from pi05.data.doctor import main
from pi05.data.examination import Part, examine
from pi05.data.measure import compute_norm_stats, make_fingerprint
from pi05.data.norm_stats import NormStats, asset_folder
from pi05.data.token_lengths import TokenLengths
from pi05.data.tokenizer import load_tokenizer
from pi05.errors import DataError
from tests.data.recordings import change_json
from tests.data.sick_arm import REPOSITORY, ROBOT, TOKENIZER, everywhere, put, said, subject, tasks, texts


@pytest.mark.parametrize("kind", ["healthy", "filmed"])
def test_a_healthy_dataset_has_no_finding_and_leaves_three_files(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    report = examine(subject(request.getfixturevalue(kind)), tmp_path)
    assert report.findings == () and report.exit_code(strict=True) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["contact_sheet.png", "norm_stats.json", "token_lengths.json"]
    with PIL.Image.open(tmp_path / "contact_sheet.png") as sheet:
        assert sheet.size[0] > 6 * 224, "two cameras at three moments"
    assert report.facts["datasets"] == [
        {
            "dataset": "arm",
            "fps": 10.0,
            "episodes": 3,
            "frames": 45,
            "lengths": [14, 15.0, 16],
            "padded_share": pytest.approx(7 / 30, abs=1e-3),
            "idle_share": 0.0,
        }
    ]
    assert [one["recorded"] for one in report.facts["actions"]] == ["absolute"] * 4
    assert {one["prompt"]: one["frames"] for one in report.facts["prompts"]} == {"push the dot": 29, "lift the dot": 16}


def test_excluding_the_damaged_episode_heals(copy: Path, tmp_path: Path) -> None:
    put("action", 0, 0, np.nan, (1,))(copy)
    part = Part(find_dataset(copy), exclude=(1,))
    report = examine(subject(copy, parts=(part,)), tmp_path / "out")
    assert said(report) == {("warning", "prompts")}, "without episode 1 there is one prompt"
    NormStats.load(tmp_path / "out/norm_stats.json").check_fingerprint(make_fingerprint(copy, ROBOT, action_horizon=8, exclude=[1]))


def test_held_out_episodes_are_examined_but_not_in_the_statistics(copy: Path, tmp_path: Path) -> None:
    part = Part(find_dataset(copy), held_out=(2,))
    assert examine(subject(copy, parts=(part,)), tmp_path / "out").facts["datasets"][0]["episodes"] == 3
    NormStats.load(tmp_path / "out/norm_stats.json").check_fingerprint(make_fingerprint(copy, ROBOT, action_horizon=8, exclude=[2]))


def test_statistics_of_other_data_are_an_error_and_what_they_clip_is_shown(healthy: Path, copy: Path, tmp_path: Path) -> None:
    everywhere(lambda old: {name: 0.3 * old[name] for name in ("observation.state", "action")})(copy)
    compute_norm_stats(copy, ROBOT, action_horizon=8).save(tmp_path / "small.json")
    report = examine(subject(healthy, norm_stats=tmp_path / "small.json"), tmp_path / "out")
    assert said(report) == {("error", "statistics"), ("warning", "statistics")}
    assert "dataset: the statistics have '45 frames" in texts(report) and "of its values fall outside the bins of the prompt" in texts(report)
    assert not (tmp_path / "out/norm_stats.json").exists()


def test_a_dataset_without_quantiles_gets_them_in_a_file_of_ours(copy: Path, tmp_path: Path) -> None:
    """user_reports 2.8."""
    (copy / "meta/stats.json").write_text(json.dumps({"observation.state": {"mean": [0.0] * 5, "std": [1.0] * 5}}))
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    report = examine(subject(copy), tmp_path / "out")
    assert said(report) == {("note", "statistics")} and "scripts/compute_norm_stats.py" in texts(report)
    assert np.isfinite(NormStats.load(tmp_path / "out/norm_stats.json").fields["state"].q01).all()
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_datasets_of_different_rates_are_refused_together(healthy: Path, copy: Path, tmp_path: Path) -> None:
    change_json(copy / "meta/info.json", fps=20)
    everywhere(lambda old: {"timestamp": old["timestamp"] / 2})(copy)
    parts = (Part(find_dataset(healthy)), Part(find_dataset(copy)))
    robot = ROBOT.replace(fps=None)
    assert said(examine(subject(copy, parts=parts, robot=robot), tmp_path / "out")) == {("error", "rate")}
    assert said(examine(subject(copy, parts=parts, robot=robot, accept_fps=(20.0,)), tmp_path / "out")) == set()


def test_token_lengths_are_saved_with_what_they_are_of_and_a_stale_file_is_reported(copy: Path, tmp_path: Path) -> None:
    """user_reports 9.6 and 10.1."""
    report = examine(subject(copy), tmp_path)
    saved = TokenLengths.load(tmp_path / "token_lengths.json")
    assert {key: report.facts["tokens"][key] for key in ("p50", "p99", "max", "safe")} == {key: getattr(saved, key) for key in ("p50", "p99", "max", "safe")}
    assert saved.p50 <= saved.p99 <= saved.max <= saved.safe
    assert saved.fingerprint["dataset"].startswith("45 frames, 3 episodes, numbers ") and saved.fingerprint["prompts"].startswith("2 prompts, ")
    tokenizer = load_tokenizer(TOKENIZER, max_token_len=saved.safe)
    worst = np.full(5, -1.5)
    assert max(len(tokenizer.encode(prompt, worst)) for prompt in ("push the dot", "lift the dot")) <= saved.safe
    assert examine(subject(copy), tmp_path).findings == (), "the same again is no finding"
    tasks("push the dot to the left", "lift the dot")(copy)
    again = examine(subject(copy), tmp_path)
    assert said(again) == {("note", "tokens")} and "prompts: the token lengths have '2 prompts" in texts(again)
    with pytest.raises(DataError, match="The token lengths were made for something else"):
        saved.check_fingerprint(TokenLengths.load(tmp_path / "token_lengths.json").fingerprint)
    close = examine(subject(copy, max_token_len=TokenLengths.load(tmp_path / "token_lengths.json").max), tmp_path)
    assert said(close) == {("warning", "tokens")} and "another state could make it" in texts(close)


@pytest.mark.parametrize("content", ["{}", '{"format_version": 2}', '{"format_version": 1, "p50": 3}'])
def test_a_file_that_holds_no_token_lengths_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(DataError, match="holds no token lengths that this release reads. Measure them again"):
        TokenLengths.load(tmp_path / "tokens.json")


def test_the_command_prints_json_and_its_exit_code_tells(healthy: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--robot", "tests.data.sick_arm", "--tokenizer", str(TOKENIZER), "--action-horizon", "8", "--out", str(tmp_path / "out")]
    assert main(["--dataset", str(healthy), *options, "--json", "--strict"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    tasks("go", "go")(copy)
    assert main(["--dataset", str(copy), *options]) == 0
    text = capsys.readouterr().out
    assert "warning [prompts] all datasets: one prompt for all" in text and "0 errors, 1 warning, 1 note" in text and "joint_4 (rad)" in text
    assert main(["--dataset", str(copy), *options, "--strict"]) == 1
    put("action", 0, 0, np.nan, (0,))(copy)
    capsys.readouterr()
    assert main(["--dataset", str(copy), *options, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(one["level"], one["check"]) for one in found][0] == ("error", "finite") and set(found[0]) == {"level", "check", "where", "text"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "./no/such/folder", "--robot", "metaworld"], "cannot examine: "),
        (["--dataset", str(REPOSITORY / "data/metaworld_mini"), "--robot", "metaword"], "Did you mean 'metaworld'?"),
        (["--dataset", str(REPOSITORY / "data/metaworld_mini"), "--robot", "metaworld", "--tokenizer", "./no.model"], "There is no tokenizer file"),
        (["no_such_config"], "cannot examine: "),
    ],
)
def test_what_cannot_be_examined_is_exit_code_two(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["tiny", "--robot", "aloha"], ["--dataset", "x"], ["--dataset", "x", "--robot", "aloha", "--strikt"]])
def test_a_command_line_that_says_nothing_clear_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


def test_the_first_config_is_healthy_from_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pi05.data.doctor", "tiny", "--data.num_workers", "0", "--strict", "--json", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["findings"] == [] and report["datasets"][0]["episodes"] == 48 and report["action_horizon"] == 8
    stats = NormStats.load(tmp_path / "norm_stats.json")
    assert ", 40 episodes, " in stats.fingerprint["dataset"], "of what is trained on"


def test_assets_lie_beside_the_dataset_one_folder_a_robot(tmp_path: Path) -> None:
    assert asset_folder([tmp_path / "cups"], "aloha") == tmp_path.resolve() / "assets/cups-aloha"
    assert asset_folder([tmp_path / "cups", tmp_path / "more/mugs"], "aloha").name == "cups+mugs-aloha"
