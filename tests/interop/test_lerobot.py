"""LeRobot itself loads what we write and does with it what we do; and we load what it saves."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from parity import oracles
from pi05.batch import make_draws, synthetic_batch
from pi05.compare import relative_error
from pi05.data.norm_stats import FieldStats, NormStats
from pi05.data.transforms import normalise, unnormalise
from pi05.errors import CheckpointError
from pi05.interop import own
from pi05.interop.assets import Assets
from pi05.interop.lerobot import write_lerobot
from pi05.interop.sources import load_weights, open_source
from pi05.robots import load_robot
from pi05.robots.base import Robot
from pi05.spec import Compute, ModelSpec

from .published import Tree

ROBOT = "so100"  # joints relative to the state, gripper absolute, two cameras


def statistics(robot: Robot) -> NormStats:
    def field(key: str, dims: int) -> FieldStats:
        rng = np.random.default_rng(len(key))
        low, width = rng.uniform(-20, 0, dims), rng.uniform(5, 40, dims)
        width[1] = 1e-3  # hardly moves: our floor widens it, LeRobot knows none
        return FieldStats(low + width / 2, width / 4, low, low + width, low - 1, low + width + 1, 500)

    return NormStats({"state": field("state", len(robot.state)), "actions": field("actions", len(robot.actions))}, {"robot": robot.name})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that transformers loads from a folder; LeRobot's own is behind a licence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<unk>": 1, "Task": 2, "State": 3, "Action": 4}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def params(forms: dict[str, Path], spec: ModelSpec) -> Tree:
    return dict(load_weights(forms["orbax"], spec, seed=0).tensors)


@pytest.fixture(scope="module")
def assets(tokenizer: Path) -> Assets:
    return Assets(statistics(load_robot(ROBOT)), tokenizer=str(tokenizer), robot=ROBOT)


@pytest.fixture(scope="module")
def exported(params: Tree, spec: ModelSpec, assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    write_lerobot(folder, iter(params.items()), spec, assets, ())
    return folder


@pytest.fixture(scope="module")
def policy(exported: Path, spec: ModelSpec) -> Iterator:
    """The export as LeRobot loads it; its loader prints and goes on with random weights when something is wrong, so that is looked at too."""
    from lerobot.policies.pi05 import PI05Policy
    from lerobot.policies.pi05 import modeling_pi05 as modeling

    with oracles._lerobot_sizes(modeling, spec), pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", lambda *words, **options: said.append(" ".join(map(str, words))))
        loaded = PI05Policy.from_pretrained(exported)
    assert "All keys loaded successfully!" in said, said
    return loaded.eval()


def test_lerobot_loads_our_export_and_gives_our_velocity(policy, exported: Path, spec: ModelSpec) -> None:
    import torch

    from pi05.torch_backend.model import from_numpy, make_model

    batch = synthetic_batch(spec, 2, seed=8, token_len=9, padded_actions=False)
    draws = make_draws(spec, 8, 0, np.arange(2))
    velocities: list[torch.Tensor] = []
    hook = policy.model.action_out_proj.register_forward_hook(lambda module, inputs, output: velocities.append(output))
    with torch.no_grad():
        observation = oracles._lerobot_observation(batch, "float32")
        policy.model(**observation, actions=torch.tensor(batch.actions), noise=torch.tensor(draws.noise), time=torch.tensor(draws.time))
    hook.remove()
    model = make_model(spec, Compute("float32"), load_weights(exported, spec, seed=0).tensors)
    torch_batch, torch_draws = from_numpy((batch, draws))
    x_t, _, counted = model.flow(torch_batch, torch_draws, padded_steps="count")
    ours = model(torch_batch.observation, x_t, torch_draws.time, counted)[0].detach().numpy()
    assert np.abs(ours - velocities[0].numpy()).max() < 1e-4 * np.abs(ours).max()


def test_lerobots_configuration_is_what_the_robot_and_the_model_are(policy, spec: ModelSpec) -> None:
    robot, config = load_robot(ROBOT), policy.config
    assert list(config.image_features) == [robot.cameras[slot] for slot in spec.cameras if slot in robot.cameras]
    assert (config.chunk_size, config.max_action_dim, config.tokenizer_max_length) == (spec.action_horizon, spec.action_dim, spec.max_token_len)
    assert config.action_feature.shape == (len(robot.actions),) and config.robot_state_feature.shape == (len(robot.state),)


def test_lerobots_processors_compute_what_our_transforms_do(policy, exported: Path, assets: Assets, spec: ModelSpec) -> None:
    """Normalisation with our floor, relative actions and back, and a prompt from the normalised state."""
    import torch
    from lerobot.policies.factory import make_pre_post_processors

    robot = load_robot(ROBOT)
    before, behind = make_pre_post_processors(policy.config, pretrained_path=str(exported))
    rng = np.random.default_rng(1)
    state = rng.uniform(-10, 10, len(robot.state)).astype(np.float32)
    row = {"observation.state": torch.tensor(state), "task": "pick up"}
    row |= {column: torch.rand(3, 70, 70) for column in robot.cameras.values()}
    seen = before(row)
    floors = {key: 1e-3 * np.array([dim.high - dim.low for dim in dims]) for key, dims in (("state", robot.state), ("actions", robot.actions))}
    wanted = normalise(state, assets.norm_stats.fields["state"], "quantile", floors["state"])
    assert relative_error(seen["observation.state"][0].numpy(), wanted) < 1e-5
    assert relative_error(normalise(state, assets.norm_stats.fields["state"], "quantile"), wanted) > 1  # dim 1 shows whether the floor travelled
    assert seen["observation.language.tokens"].shape == (1, spec.max_token_len)
    actions = rng.uniform(-1, 1, (1, len(robot.actions))).astype(np.float32)
    got = behind(torch.tensor(actions)).numpy()
    ours = robot.from_model(unnormalise(actions, assets.norm_stats.fields["actions"], "quantile", floors["actions"]), state)
    assert relative_error(got, ours) < 1e-5


def test_we_load_what_lerobot_saves(policy, spec: ModelSpec, params: Tree, exported: Path, tmp_path: Path) -> None:
    """After some training, so that its untied head has gone stale; with its processors and without our pi05.json."""
    import torch
    from lerobot.policies.factory import make_pre_post_processors

    table = policy.model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight
    with torch.no_grad():
        table.add_(1.0)
    try:
        policy.save_pretrained(tmp_path)
    finally:
        with torch.no_grad():
            table.copy_(torch.tensor(params["trunk.embed.weight"]))
    for processor in make_pre_post_processors(policy.config, pretrained_path=str(exported)):
        processor.save_pretrained(tmp_path)
    source = open_source(tmp_path, like=spec)
    assert source.kind == "lerobot" and source.spec == spec
    loaded = dict(source.tensors())
    assert loaded.keys() == params.keys()
    moved = {"trunk.embed.weight": params["trunk.embed.weight"] + np.float32(1)}
    assert not [name for name in params if not np.array_equal(loaded[name], (params | moved)[name])]
    robot = load_robot(ROBOT)
    assert source.assets.delta_mask == tuple(robot.delta_mask.tolist()) and source.assets.normalization == "quantile"
    assert source.assets.replace(robot=ROBOT).load_robot().name == ROBOT
    with pytest.raises(CheckpointError, match="relative action dims are 0, 1, 2, 3, 4, those of robot 'metaworld' none"):
        source.assets.replace(robot="metaworld").load_robot()
    field, state = source.assets.norm_stats.fields["state"], np.linspace(-5, 5, len(robot.state))
    floor = 1e-3 * np.array([dim.high - dim.low for dim in robot.state])
    wanted = normalise(state, statistics(robot).fields["state"], "quantile", floor)
    assert relative_error(normalise(state, field, "quantile"), wanted) < 1e-4


def test_mean_and_deviation_travel_as_well(params: Tree, spec: ModelSpec, assets: Assets, tmp_path: Path) -> None:
    write_lerobot(tmp_path, iter(params.items()), spec, assets.replace(normalization="zscore"), ())
    (tmp_path / "pi05.json").unlink()
    found, robot, state = open_source(tmp_path, like=spec).assets, load_robot(ROBOT), np.linspace(-5, 5, 6)
    floor = 1e-3 / 4 * np.array([dim.high - dim.low for dim in robot.state])
    assert found.normalization == "zscore"
    wanted = normalise(state, assets.norm_stats.fields["state"], "zscore", floor)
    assert relative_error(normalise(state, found.norm_stats.fields["state"], "zscore"), wanted) < 1e-4


def _shifted(robot: Robot) -> Robot:
    return robot.replace(state=(*robot.state[1:], robot.state[0]))


def _renamed(robot: Robot) -> Robot:
    dims = (*robot.state[:-1], dataclasses.replace(robot.state[-1], name="POS"))
    return robot.replace(state=dims, actions=dims)


@pytest.mark.parametrize(
    ("robot", "message"),
    [
        (load_robot("aloha"), "converts its numbers"),
        (load_robot("flexiv").replace(rotation_delta="relative"), "composes rotations"),
        (_shifted(load_robot(ROBOT)), "has relative actions at other places than the state dims they are relative to"),
        (_renamed(load_robot(ROBOT)), "has names of absolute actions within those of relative ones"),
    ],
)
def test_what_lerobot_cannot_do_is_said_and_not_written(robot: Robot, message: str, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi05.interop.assets.load_robot", lambda name: robot)
    with pytest.raises(CheckpointError, match=f"LeRobot cannot serve robot '{robot.name}': it {message}"):
        write_lerobot(tmp_path, iter(()), spec.replace(action_dim=32), Assets(statistics(robot), tokenizer="owner/name", robot=robot.name), ())
    assert not list(tmp_path.iterdir())


def test_a_prompt_without_the_state_and_a_tokenizer_it_cannot_load_are_refused(spec: ModelSpec, assets: Assets, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="prompt is without the state"):
        write_lerobot(tmp_path, iter(()), spec, assets.replace(discrete_state=False), ())
    (tmp_path / "some.model").touch()
    with pytest.raises(CheckpointError, match="needs a tokenizer.json; .*some.model.*--tokenizer google/paligemma-3b-pt-224"):
        write_lerobot(tmp_path, iter(()), spec, assets.replace(tokenizer=str(tmp_path / "some.model")), ())


def test_a_policy_trained_with_peft_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"type": "pi05", "use_peft": true}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="Merge its adapters with PEFT"):
        open_source(tmp_path)


def test_an_export_reads_back_with_its_original_statistics(exported: Path, spec: ModelSpec, assets: Assets) -> None:
    found = open_source(exported).assets
    assert np.array_equal(found.norm_stats.fields["state"].q01, assets.norm_stats.fields["state"].q01) and found.robot == ROBOT
    assert own.find_own(exported) is None and open_source(exported).spec == spec
