"""Configs: what they refuse, who wins, where a value came from; and everything that pages and configs name exists."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pydantic
import pytest

from pi05.config import TrainConfig, get_config, load_config, parse_yaml
from pi05.config_cli import explain, main, parse_cli, reference
from pi05.config_files import clean, config_files, config_folders, find_config, parse_tree
from pi05.errors import ConfigError
from pi05.recipe import AdamW, Recipe
from pi05.schedule import Schedule
from pi05.spec import Compute, LoRA, ModelSpec
from tests.test_docs import PATH

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
NAMES = {path.stem for path in SHIPPED}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *SHIPPED, *sorted((ROOT / "scripts").glob("*.py"))]
PUBLISHED = {"pi05_base", "pi05_droid", "pi05_libero"}  # checkpoints of openpi
COMMAND = re.compile(r"(?:\.train|\.config explain|--config(?:[-_]name)?) ([a-z]\w*)")

MINIMAL = """
model: {preset: tiny}
data:
  datasets: [{path: ../recordings/mine}]
  robot: metaworld
  tokenizer: ./tiny.model
weights: random
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a minimal config `mine`; the current folder is another."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv("PI05_CONFIGS", str(own))
    (own / "mine.yaml").write_text(MINIMAL)
    return own


def refusal(name: str = "mine", **overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        get_config(name, {key.replace("__", "."): value for key, value in overrides.items()})
    return str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_config_loads_and_makes_its_model_recipe_and_robot(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = get_config(path.stem)
    assert config.name == path.stem and config.recipe().trains(config.spec()) and len(config.data.load_robot().actions) <= config.spec().action_dim
    for dataset in config.data.datasets:
        if dataset.path:
            assert dataset.path.is_relative_to(ROOT) and (dataset.path.parent == ROOT / "datasets" or dataset.path.exists())
    for place in (config.data.tokenizer, config.weights):
        assert not place.startswith(".") and (not place.startswith("/") or Path(place).exists())


def test_the_configs_that_were_promised_exist() -> None:
    assert {"tiny", "pi05_libero", "pi05_droid", "pi05_aloha", "dobot_nova5", "pi05_base_xtac_umi_pick_up_cube_0807_h200"} <= NAMES
    assert {"pack_6_cosmetic_bottles_lora", "pi05_h100_production", "pi05_h200_production"} <= NAMES
    tiny, lora = get_config("tiny"), get_config("pack_6_cosmetic_bottles_lora")
    assert tiny.spec() == ModelSpec.tiny() and tiny.weights == "random" and tiny.compute.dtype == "float32"
    assert {get_config(f"pi05_{card}_production").batch_size for card in ("h100", "h200")} == {256}
    assert lora.spec().trunk.lora == LoRA(16, 16) and lora.groups.vision == "freeze" and lora.data.robot == "bi_flexiv"


def test_the_wheel_ships_the_configs() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "configs" in wheel["packages"] and wheel["sources"]["configs"] == "pi05/configs"


def test_defaults_are_those_of_the_library_and_of_openpi(folder: Path) -> None:
    config = get_config("mine")
    assert config.recipe() == Recipe() and config.schedule == Schedule(peak_lr=2.5e-5, warmup_steps=1_000, decay_steps=30_000, decay_lr=2.5e-6)
    assert config.optimizer == AdamW(b1=0.9, b2=0.95, eps=1e-8, weight_decay=1e-10, clip_norm=1.0)
    assert (config.batch_size, config.num_train_steps, config.seed, config.max_bad_steps) == (32, 30_000, 42, 1)


def test_a_config_is_frozen(folder: Path) -> None:
    config = get_config("mine", {"data.cameras.base_0_rgb": "null"})
    for section in (config, config.model, config.data, config.data.datasets[0], config.schedule, config.compute):
        field = next(iter(section.model_dump() if isinstance(section, pydantic.BaseModel) else vars(section)))
        with pytest.raises((pydantic.ValidationError, AttributeError)):
            setattr(section, field, None)
    with pytest.raises(TypeError):
        config.data.cameras["base_0_rgb"] = "x"
    assert isinstance(config.data.datasets, tuple)


@pytest.mark.parametrize(
    ("overrides", "wrong", "nearest"),
    [
        ({"batch_sise": "8"}, "batch_sise", "batch_size"),
        ({"peak_lr": "1e-3"}, "peak_lr", "schedule.peak_lr"),
        ({"schedule.peak_lrr": "1e-3"}, "schedule.peak_lrr", "schedule.peak_lr"),
        ({"data.datasets.0.wait": "2"}, "data.datasets.0.wait", "data.datasets.0.weight"),
        ({"model.lora.trunk": "{rang: 2, alpha: 2}"}, "model.lora.trunk.rang", "model.lora.trunk.rank"),
        ({"compute.atention": "fused"}, "compute.atention", "compute.attention"),
        ({"data.robot": "metaword"}, "metaword", "metaworld"),
        ({"model.preset": "tinny"}, "tinny", "tiny"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(folder: Path, overrides: dict[str, str], wrong: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(wrong))) as caught:
        get_config("mine", overrides)
    assert f"Did you mean {nearest!r}?" in str(caught.value)


def test_an_unknown_field_of_a_file_is_refused_with_its_place_in_lists(folder: Path) -> None:
    (folder / "mine.yaml").write_text(MINIMAL.replace("path:", "pat:"))
    message = refusal()
    assert "mine.yaml" in message and "'data.datasets.0.pat'" in message and "Did you mean 'data.datasets.0.path'?" in message


def test_an_unknown_config_is_refused_with_the_nearest_one(folder: Path) -> None:
    message = refusal("pi05_libreo")
    assert "Did you mean 'pi05_libero'?" in message and "mine" in message and str(folder) in message


@pytest.mark.parametrize("name", ["../mine", "/etc/passwd", "..", ".mine", "own/mine", "", "mine\n", "a b"])
def test_a_name_cannot_leave_the_folders(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name of a config"):
        find_config(name)
    (folder / "heir.yaml").write_text(f"base: {name!r}\nseed: 1")
    if name:
        with pytest.raises(ConfigError, match="base is|no YAML"):
            get_config("heir")


def test_a_name_is_that_of_the_file_and_may_not_be_set(folder: Path) -> None:
    (folder / "mine.yaml").write_text(MINIMAL + "name: other")
    assert "name is set by the file mine.yaml" in refusal()
    (folder / "mine.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match="name is set by the command line"):
        get_config("mine", {"name": "other"})


def test_a_saved_config_is_checked_like_any_other(folder: Path) -> None:
    text = get_config("mine").to_yaml()
    for wrong, message in ((text.replace("seed:", "sed:"), "x: there is no field 'sed'"), ("seed: 1", "name is missing"), ("[1]", "x holds no config")):
        with pytest.raises(ConfigError, match=message):
            parse_yaml(wrong, where="x")


def test_two_configs_of_one_name_are_refused(folder: Path) -> None:
    (folder / "tiny.yaml").write_text(MINIMAL)
    assert f"two configs called 'tiny': {folder / 'tiny.yaml'} and {ROOT / 'configs' / 'tiny.yaml'}" in refusal("tiny")
    assert get_config(str(folder / "tiny.yaml")).data.tokenizer == str(folder / "tiny.model")


def test_configs_beside_are_found_and_a_missing_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PI05_CONFIGS", raising=False)
    assert config_folders() == (ROOT / "configs",) and set(config_files()) == NAMES
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "beside.yaml").write_text(MINIMAL)
    assert get_config("beside").name == "beside"
    monkeypatch.setenv("PI05_CONFIGS", "nowhere")
    assert "'nowhere', which is no folder" in refusal("tiny")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"batch_size": "10", "grad_accum_steps": "4"}, "batch_size 10 does not divide into grad_accum_steps 4"),
        ({"compute.dtype": "float64"}, "compute.dtype is 'float64'"),
        ({"eval_interval": "10"}, "eval_interval asks for evaluations, but data.holdout_episodes holds out nothing"),
        ({"keep_best": "true"}, "keep_best asks for evaluations, but data.holdout_episodes holds out nothing"),
        ({"keep_best": "true", "data.holdout_episodes": "1"}, "eval_interval is 0"),
        ({"groups.trunk": "lora"}, "set model.lora.trunk"),
        ({"model.lora.trunk": "{rank: 2, alpha: 2}"}, "groups.trunk is 'train'"),
        ({"groups.heads": "lora"}, "carry no adapters"),
        ({"data.datasets": "[]"}, "data.datasets is empty"),
        ({"data.datasets": "[{}]"}, "data.datasets.0: A dataset needs either `path`"),
        ({"data.datasets.0.repo_id": "lerobot/aloha_sim"}, "data.datasets.0: A dataset needs either `path`"),
        ({"data.datasets.0.revision": "main"}, "revision belongs to repo_id"),
        ({"data.datasets": "[{path: ./a, weight: 2}, {path: ./b}]"}, "data.datasets.1 has no weight"),
        ({"data.datasets": "[{path: ./a}, {path: ./b}]", "data.holdout_episodes": "[1]"}, "mean nothing for several datasets"),
        ({"data.datasets.0.exclude": "[3, 4]", "data.holdout_episodes": "[4]"}, "Episode 4 is in data.holdout_episodes and in exclude"),
        ({"data.holdout_episodes": "-1"}, "data.holdout_episodes is -1"),
        ({"schedule.decay_steps": "5"}, "schedule.decay_steps is 5"),
        ({"model.action_horizon": "0"}, "model.action_horizon is 0"),
        ({"weights": "base"}, "weights: 'base' is no path"),
        ({"data.datasets.1.weight": "2"}, "there is no data.datasets.1; the list has 1 items"),
        ({"model": "3", "model.preset": "tiny"}, "sets model.preset and something that holds it"),
    ],
)
def test_values_that_contradict_each_other_are_refused(folder: Path, overrides: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        get_config("mine", overrides)


def test_fused_attention_is_refused_on_the_cpu(folder: Path) -> None:
    message = refusal(compute__attention="fused", device="cpu")
    allowed = get_args(get_type_hints(Compute)["attention"])
    assert ("device is 'cpu'" if "fused" in allowed else "compute.attention is 'fused' (command line); it must be") in message


def test_wrong_types_are_all_listed_with_their_origin(folder: Path) -> None:
    (folder / "mine.yaml").write_text(MINIMAL.replace("weights: random", "batch_size: true\nseed: '4'"))
    message = refusal(data__floor="wide", schedule__kind="cosin")
    assert "batch_size is True (file mine.yaml); it must be a valid integer." in message
    assert "seed is '4' (file mine.yaml)" in message and "data.floor is 'wide' (command line)" in message
    assert "schedule.kind is 'cosin' (command line); it must be 'cosine', 'rsqrt' or 'constant'." in message
    assert "weights is missing: to start from" in message


def test_a_path_that_reads_as_a_hub_id_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "b").write_text("")
    assert get_config("mine", {"weights": "a/b"}).weights == "a/b"
    monkeypatch.chdir(folder)
    assert "Write ./a/b" in refusal(weights="a/b")
    assert get_config("mine", {"weights": "./a/b"}).weights == str(folder / "a" / "b")


def test_a_relative_path_belongs_to_whoever_wrote_it(folder: Path) -> None:
    config = get_config("mine", {"data.norm_stats": "stats.json"})
    assert config.data.datasets[0].path == folder.parent / "recordings" / "mine" and config.data.datasets[0].source == folder.parent / "recordings" / "mine"
    assert config.data.tokenizer == str(folder / "tiny.model") and config.data.norm_stats == Path.cwd() / "stats.json"
    assert config.run_dir == Path.cwd() / "checkpoints" / "mine" / "run"
    deeper = folder / "deeper"
    deeper.mkdir()
    (deeper / "heir.yaml").write_text("base: mine\ncheckpoint_dir: out\nweights: ~/w")
    heir = get_config(str(deeper / "heir.yaml"))
    assert heir.data.tokenizer == str(folder / "tiny.model") and heir.checkpoint_dir == deeper / "out" and heir.weights == str(Path.home() / "w")


def test_overrides_are_typed_by_their_field(folder: Path) -> None:
    given = {
        "schedule.peak_lr": "1e-4",
        "data.holdout_episodes": "[1, 2]",
        "ema_decay": "null",
        "exp_name": "0807",
        "wandb.enabled": "true",
        "wandb.entity": "7",
    }
    config = get_config("mine", given | {"data.datasets.0.weight": "2", "data.cameras.left_wrist_0_rgb": "null", "optimizer.clip_norm": "2"})
    assert config.schedule.peak_lr == 1e-4 and config.data.holdout_episodes == (1, 2) and config.ema_decay is None and config.exp_name == "0807"
    assert config.wandb.enabled is True and config.wandb.entity == "7" and config.data.weights == (2,) and config.optimizer == AdamW(clip_norm=2.0)
    assert list(config.data.load_robot().cameras) == ["base_0_rgb"]


def test_bases_are_inherited_field_by_field_and_lists_whole(folder: Path) -> None:
    (folder / "middle.yaml").write_text("base: mine\nschedule: {peak_lr: 1e-3, warmup_steps: 5}\ndata: {datasets: [{repo_id: a/b, revision: x}]}")
    (folder / "heir.yaml").write_text("base: middle\nschedule: {warmup_steps: 7}")
    config, origins = load_config("heir", {"seed": "1"})
    assert (config.schedule.peak_lr, config.schedule.warmup_steps, config.seed) == (1e-3, 7, 1)
    assert config.data.datasets[0].path is None and config.data.datasets[0].source == "a/b"
    assert origins["schedule.peak_lr"] == "base middle" and origins["schedule.warmup_steps"] == "file heir.yaml" and origins["weights"] == "base mine"
    (folder / "mine.yaml").write_text("base: heir\n" + MINIMAL)
    assert "heir -> middle -> mine -> heir: a config cannot inherit itself" in refusal("heir")


def test_explain_shows_every_field_and_who_set_it(folder: Path) -> None:
    (folder / "heir.yaml").write_text("base: mine\nbatch_size: 4")
    rows = {row.field: (row.value, row.origin) for row in explain("heir", {"schedule.peak_lr": "0.5"})}
    assert rows["schedule.peak_lr"] == ("0.5", "command line") and rows["batch_size"] == ("4", "file heir.yaml")
    assert rows["weights"] == ("random", "base mine") and rows["seed"] == ("42", "default") and rows["ema_decay"] == ("0.99", "default")
    assert rows["data.datasets.0.path"] == (str(folder.parent / "recordings" / "mine"), "base mine") and rows["data.datasets.0.weight"] == ("null", "default")
    assert rows["model.action_horizon"] == (str(ModelSpec.tiny().action_horizon), "preset tiny")
    assert {field.partition(".")[0] for field in rows} == set(TrainConfig.model_fields)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_config_written_as_yaml_reads_back_equal(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = get_config(name, {"data.cameras.base_0_rgb": "null", "optimizer.eps": "1.2345678901234567e-08"})
    copy = tmp_path / "deep" / f"{name}.yaml"
    copy.parent.mkdir()
    copy.write_text(config.to_yaml())
    monkeypatch.chdir(copy.parent)
    assert get_config(str(copy)) == config == parse_yaml(config.to_yaml(), where="x")
    saved = copy.rename(copy.with_name("config.yaml"))
    assert get_config(str(saved)).name == name and get_config(str(saved), {"seed": "1"}).name == name
    with pytest.raises(ConfigError, match="name is set by the command line"):
        get_config(str(saved), {"name": "other"})


def test_yaml_reads_numbers_as_people_write_them_and_no_key_twice() -> None:
    assert parse_tree("[1e-4, 2.5e-5, 1E3, 30_000, 7, .5, 1.]", "x") == [1e-4, 2.5e-5, 1e3, 30_000, 7, 0.5, 1.0]
    assert parse_tree("[1e-4x, e4, '1e-4']", "x") == ["1e-4x", "e4", "1e-4"]
    for text in ("a: 1\na: 2", "x: {b: 1, b: 2}", "a: [", "!!python/object/apply:os.getcwd []"):
        with pytest.raises(ConfigError, match="here is no YAML"):
            parse_tree(text, "here")


@pytest.mark.parametrize("place", ["", "model", "compute"])
def test_the_forks_names_for_fused_attention_are_accepted(folder: Path, place: str) -> None:
    def tree(values: dict) -> dict:
        return {place: values} if place else values

    def compute(values: dict) -> dict:
        return clean(tree(values), _AnyCompute, where="x", folder=folder)["compute"]

    assert compute({"use_cudnn_attention": True, "cudnn_attention_dtype": "float16"}) == {"attention": "fused", "attention_dtype": "float16"}
    assert compute({"use_cudnn_attention": False}) == {"attention": "explicit"}
    with pytest.raises(ConfigError, match="must be true or false"):
        compute({"use_cudnn_attention": "yes"})
    with pytest.raises(ConfigError, match="says compute.attention is 'fused', which the same source sets otherwise"):
        clean(tree({"use_cudnn_attention": True}) | {"compute": {"attention": "explicit", "use_cudnn_attention": True}}, _AnyCompute, where="x", folder=folder)
    name = f"{place}.use_cudnn_attention".lstrip(".")
    assert get_config("mine", {name: "false", "device": "cuda"}).compute.attention == "explicit"


class _AnyCompute(pydantic.BaseModel):
    """The two fields that the aliases stand for, whatever spec.Compute has."""

    class Fields(pydantic.BaseModel):
        attention: str = ""
        attention_dtype: str = ""

    compute: Fields = Fields()
    model: Fields = Fields()


def test_the_command_line_gives_a_config_and_flags(folder: Path) -> None:
    config, flags = parse_cli(["mine", "--backend", "torch", "--exp-name", "first", "--resume", "--schedule.peak-lr=1e-4"])
    assert (config.name, config.backend, config.exp_name, config.schedule.peak_lr) == ("mine", "torch", "first", 1e-4)
    assert flags.resume and not flags.overwrite
    assert parse_cli([])[0] == get_config("tiny") and parse_cli(["--data.holdout_episodes", "0", "--seed", "3"])[0].seed == 3
    for arguments, text in (
        (["mine", "--resume", "--overwrite"], "give one of them"),
        (["mine", "other"], "one config to a run"),
        (["mine", "--seed"], "--seed needs a value"),
        (["mine", "--seed", "--resume"], "--seed needs a value"),
        (["mine", "--backend", "tensorflow"], "backend is 'tensorflow'"),
        (["mine", "--resum", "x"], "no field 'resum'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            parse_cli(arguments)


def test_the_command_explains_lists_and_reports_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "mine", "--seed", "5"]) == 0
    assert re.search(r"seed +5 +command line", capsys.readouterr().out)
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES | {"mine", str(folder)})
    assert main(["explain", "tini"]) == 2 and "Did you mean 'tiny'?" in capsys.readouterr().out
    assert main(["frobnicate"]) == 2 and main([]) == 0 and "explain" in capsys.readouterr().out
    assert main(["docs", str(folder / "page.md")]) == 0 and (folder / "page.md").read_text() == reference()
    assert main(["docs", str(folder / "no" / "page.md")]) == 2


def test_the_module_runs_from_any_folder_and_loads_no_framework(tmp_path: Path) -> None:
    frameworks = {"jax", "torch", "transformers", "datasets"}
    code = f"import sys, pi05.config, pi05.config_cli; pi05.config.get_config('tiny'); print(sorted(set(sys.modules) & {frameworks}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip() == "[]"
    run = subprocess.run([sys.executable, "-m", "pi05.config", "explain", "nix"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "There is no config 'nix'" in run.stdout


def test_the_field_reference_is_current() -> None:
    assert (ROOT / "docs" / "configs.md").read_text() == reference(), "run: python -m pi05.config docs"


def test_every_field_is_described() -> None:
    undescribed = re.findall(
        r"^\| `(\w+)` .* \|  \|$", re.sub(r"## (?:compute|schedule|optimizer|groups)\n.*?(?=\n## |\Z)", "", reference(), flags=re.DOTALL), re.M
    )
    assert not undescribed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_config_file_and_command_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    named = {path.rstrip(".") for path in PATH.findall(text) if "my_" not in path}
    assert not [path for path in named if page.suffix != ".py" and not (ROOT / path).exists() and not (ROOT / "pi05" / path).exists()]
    modules = (module.replace("pi05.parity", "parity") for module in re.findall(r"python -m (pi05(?:\.\w+)*)", text))  # parity/ is pi05.parity in the wheel
    assert not [module for module in modules if not importlib.util.find_spec(module)]
    assert not [script for script in re.findall(r"(scripts/\w+\.(?:py|sh))", text) if not (ROOT / script).exists()]
    assert {name for name in COMMAND.findall(text) if "my_" not in name} <= NAMES
    assert {name.rstrip("_") for name in re.findall(r"(?<![\w/.])pi05_[a-z0-9_]+", text)} <= NAMES | PUBLISHED
    assert page.suffix != ".yaml" or {base for base in re.findall(r"^base: (\S+)", text, re.M)} <= NAMES
