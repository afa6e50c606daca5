"""Level 10's independent oracles: transformers' SigLIP and Gemma modules and LeRobot's Pi0.5 network, NumPy in, NumPy out.

They share nothing with the two backends but the numbers. In particular the mapping of canonical parameters to their tensors is
written here by hand from the published layout and not taken from pi05/params.py: a row of that table which swaps keys and
values, or interleaves heads, passes every round trip and every shape check, and shows only against a second writing.

Axes: B C Y X P T A M D N K H (see spec.py); E is the width of the trunk.
Dtypes: "float32" runs the modules exactly as they come. "float64" runs the same code in double precision throughout: the modules
    ask for float32 by name in places (norms, rotary embedding, softmax, time embedding), and each such request is widened on the
    way, see `_WidenFloat32`. So "float64" judges what an implementation means, "float32" what LeRobot users get.

The oracles run on the CPU, download nothing, and leave torch's default dtype and global generator and LeRobot's modules as they were.
"""

import contextlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypedDict
from unittest import mock

import numpy as np
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch.overrides import TorchFunctionMode

from pi05.batch import Batch, Draws
from pi05.errors import ParamsError, Pi05Error, SpecError
from pi05.spec import ModelSpec

Dtype = Literal["float32", "float64"]
Params = Mapping[str, np.ndarray]

LEROBOT_HEADS = 8  # a literal in LeRobot's attention, whatever its configuration says
# Like `ModelSpec.tiny`, q and o of the trunk are square: the trap of the published sizes.
LEROBOT_SPEC = ModelSpec.tiny().replace(
    trunk__width=128, trunk__num_heads=LEROBOT_HEADS, trunk__num_kv_heads=1, expert__num_heads=LEROBOT_HEADS, expert__num_kv_heads=1
)


class OracleError(Pi05Error):
    """An oracle that cannot run here: its package has another version or other tensor names than it was written for."""


class Place(NamedTuple):
    """Where an oracle keeps a canonical tensor: its name there (`{l}`: one tensor a layer) and how its axes lie, a key of `_LAYOUTS`."""

    key: str
    layout: str


class LeRobotOutput(TypedDict):
    """What LeRobot's network computes on one batch.

    loss_per_element: [B, A, M], squared error of the velocity; padded steps and dims count. velocity: [B, A, M], v(x_t, t).
    grads: gradient of the mean of `loss_per_element` by canonical name, canonical axes; zeros where LeRobot has none.
    no_grad: names, one per layer as in `params.dead_params`, of the tensors for which LeRobot has no gradient at all. They are
        dead_params without a path to the loss, save the last trunk layer's q_proj: that one gets exact zeros, as the attention is joint.
    actions: [B, A, M], sampled from `draws.noise`.
    """

    loss_per_element: np.ndarray
    velocity: np.ndarray
    grads: dict[str, np.ndarray]
    no_grad: tuple[str, ...]
    actions: np.ndarray


def siglip(spec: ModelSpec, params: Params, images: np.ndarray, cotangent: np.ndarray, dtype: Dtype = "float64") -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Trunk tokens [N, P, E] of float images [N, Y, X, 3] in [-1, 1]: transformers' SiglipVisionModel, then a plain projection.

    Also returns the gradient of sum(tokens * cotangent) for every `vision.` parameter, by canonical name.

    Raises:
        OracleError: the installed transformers names SigLIP's tensors differently.
        ParamsError: a parameter is missing.
    """
    from transformers import SiglipVisionConfig, SiglipVisionModel

    vision = spec.vision
    with _isolated(dtype):
        # Activation and eps stay transformers' own defaults, as in its PaliGemma: they are part of what is compared.
        config = SiglipVisionConfig(
            hidden_size=vision.width,
            intermediate_size=vision.mlp_dim,
            num_hidden_layers=vision.depth,
            num_attention_heads=vision.num_heads,
            image_size=vision.image_size,
            patch_size=vision.patch_size,
            vision_use_head=False,
            attn_implementation="sdpa",
        )
        parts = torch.nn.ModuleDict({"tower": SiglipVisionModel(config), "projector": torch.nn.Linear(vision.width, spec.trunk.width)}).eval()
        places = _siglip_places("tower.vision_model.", "projector.")
        _load(parts, params, places, dtype)
        tokens = parts["projector"](parts["tower"](_tensor(images.transpose(0, 3, 1, 2), dtype)).last_hidden_state)
        tokens.backward(_tensor(cotangent, dtype))
        return tokens.detach().numpy(), _gradients(parts, params, places)[0]


def gemma_layer(
    spec: ModelSpec,
    params: Params,
    layer: int,
    x: np.ndarray,
    positions: np.ndarray,
    valid: np.ndarray,
    cotangent: np.ndarray,
    dtype: Dtype = "float64",
    *,
    which: Literal["trunk", "expert"] = "trunk",
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One layer on a residual stream x [B, T, D]: transformers' GemmaDecoderLayer with its GemmaRotaryEmbedding.

    positions: int[B, T]. valid: bool[B, T], keys that may be attended to; every row is computed, those of invalid tokens too.
    which: transformers has no adaRMS, so the "expert" layer runs with neutral norms, as if its scale were 0, shift 0 and gate 1.
    Also returns the gradient of sum(out * cotangent) for the parameters used, by canonical name, of this layer (no axis l).

    Raises:
        OracleError: the installed transformers names Gemma's tensors differently.
        ParamsError: a parameter is missing.
    """
    from transformers import GemmaConfig
    from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaRotaryEmbedding

    gemma = {"trunk": spec.trunk, "expert": spec.expert}[which]
    places = _gemma_layer_places(f"{which}.layers.", "") | (_rms_places("trunk.layers.", "") if which == "trunk" else {})
    with _isolated(dtype):
        config = GemmaConfig(
            hidden_size=gemma.width,
            intermediate_size=gemma.mlp_dim,
            num_attention_heads=gemma.num_heads,
            num_key_value_heads=gemma.num_kv_heads,
            head_dim=gemma.head_dim,
            attn_implementation="eager",
        )
        module = GemmaDecoderLayer(config, layer).eval()
        layer_params = {name: params[name][layer] for name in places if name in params}
        neutral = set() if which == "trunk" else {"input_layernorm.weight", "post_attention_layernorm.weight"}  # start at zero: 1 + 0
        _load(module, layer_params, places, dtype, unmapped=neutral)
        x_BTD = _tensor(x, dtype)
        angles = GemmaRotaryEmbedding(config)(x_BTD, torch.tensor(positions))
        mask_B11S = _tensor(np.where(valid, 0.0, np.finfo(np.float32).min)[:, None, None, :], dtype)
        out_BTD = module(x_BTD, attention_mask=mask_B11S, position_embeddings=angles)
        out_BTD.backward(_tensor(cotangent, dtype))
        return out_BTD.detach().numpy(), _gradients(module, layer_params, places)[0]


def lerobot(spec: ModelSpec, params: Params, batch: Batch, draws: Draws, num_steps: int = 10, dtype: Dtype = "float32") -> LeRobotOutput:
    """Loss, velocity, gradients and sampled actions of LeRobot's PI05Pytorch, built at the sizes of `spec`.

    It knows no padded action steps, so compare with padded_steps="count" or with a batch that has none. One thing differs from
    LeRobot as users run it: token 0 is an ordinary token here, whereas there its embedding gets no gradient (`padding_idx`).

    Raises:
        SpecError: sizes that LeRobot's code cannot take.
        BatchError: a batch or draws that do not fit the spec.
        OracleError: LeRobot does not support the installed transformers, or names its tensors differently.
        ParamsError: a parameter is missing.
    """
    batch.validate(spec)
    draws.validate(spec, len(batch.actions))
    places = lerobot_places()
    with _isolated(dtype):
        model = _build_lerobot(spec)
        # Neither language-model head has a counterpart: Pi0.5 never asks for a token.
        unmapped = {"paligemma_with_expert.paligemma.lm_head.weight", "paligemma_with_expert.gemma_expert.lm_head.weight"}
        _load(model, params, places, dtype, unmapped=unmapped)
        observation, noise_BAM = _lerobot_observation(batch, dtype), _tensor(draws.noise, dtype)
        velocities: list[torch.Tensor] = []
        model.action_out_proj.register_forward_hook(lambda module, inputs, output: velocities.append(output))
        loss_BAM = model(**observation, actions=_tensor(batch.actions, dtype), noise=noise_BAM, time=_tensor(draws.time, dtype))
        loss_BAM.mean().backward()
        grads, no_grad = _gradients(model, params, places)
        actions_BAM = model.sample_actions(**observation, noise=noise_BAM, num_steps=num_steps)
    loss, velocity, actions = (value.detach().numpy() for value in (loss_BAM, velocities[0], actions_BAM))
    return LeRobotOutput(loss_per_element=loss, velocity=velocity, grads=grads, no_grad=no_grad, actions=actions)


def lerobot_places() -> dict[str, Place]:
    """Place of every canonical tensor in LeRobot's PI05Pytorch and in the published PyTorch files, the two language-model heads aside."""
    paligemma, expert = "paligemma_with_expert.paligemma.model.", "paligemma_with_expert.gemma_expert.model."
    trunk = f"{paligemma}language_model."
    return (
        _siglip_places(f"{paligemma}vision_tower.vision_model.", f"{paligemma}multi_modal_projector.linear.")
        | {"trunk.embed.weight": Place(f"{trunk}embed_tokens.weight", "same"), "trunk.final_norm.scale": Place(f"{trunk}norm.weight", "same")}
        | _gemma_layer_places("trunk.layers.", f"{trunk}layers.{{l}}.")
        | _rms_places("trunk.layers.", f"{trunk}layers.{{l}}.")
        | _gemma_layer_places("expert.layers.", f"{expert}layers.{{l}}.")
        | _modulation_places("expert.layers.attn_norm.", f"{expert}layers.{{l}}.input_layernorm.")
        | _modulation_places("expert.layers.mlp_norm.", f"{expert}layers.{{l}}.post_attention_layernorm.")
        | _modulation_places("expert.final_norm.", f"{expert}norm.")
        | {f"{name}.weight": Place(f"{name}.weight", "in_out") for name in _HEADS}
        | {f"{name}.bias": Place(f"{name}.bias", "same") for name in _HEADS}
    )


def to_oracle(params: Params, places: Mapping[str, Place]) -> dict[str, np.ndarray]:
    """The oracle's tensors, by its names, from canonical ones.

    Raises:
        ParamsError: a parameter is missing.
    """
    if missing := sorted(places.keys() - params.keys()):
        raise ParamsError(f"The oracle needs {len(missing)} parameters that were not given, such as {missing[0]}.")
    tensors = {}
    for name, (key, layout) in places.items():
        slices = enumerate(params[name]) if "{l}" in key else [(0, params[name])]
        tensors |= {key.format(l=layer): _LAYOUTS[layout][0](part) for layer, part in slices}
    return tensors


def to_canonical(tensors: Mapping[str, np.ndarray], places: Mapping[str, Place], params: Params) -> dict[str, np.ndarray]:
    """Canonical tensors from the oracle's; the inverse of `to_oracle`. Shapes are those of `params`."""
    canonical = {}
    for name, (key, layout) in places.items():
        shape, back = params[name].shape, _LAYOUTS[layout][1]
        if "{l}" in key:
            canonical[name] = np.stack([back(tensors[key.format(l=layer)], shape[1:]) for layer in range(shape[0])])
        else:
            canonical[name] = back(tensors[key], shape)
    return canonical


# The layouts of one layer's tensor: from canonical axes, and back to a canonical shape.
_LAYOUTS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray, tuple[int, ...]], np.ndarray]]] = {
    "same": (lambda a: a, lambda a, shape: a),
    "flat": (lambda a: a.reshape(-1), lambda a, shape: a.reshape(shape)),
    "in_out": (lambda a: a.reshape(a.shape[0], -1).T, lambda a, shape: a.T.reshape(shape)),  # one input axis, any number of output axes
    "ins_out": (lambda a: a.reshape(-1, a.shape[-1]).T, lambda a, shape: a.T.reshape(shape)),  # any number of input axes, one output axis
    "conv": (lambda a: a.transpose(3, 2, 0, 1), lambda a, shape: a.transpose(2, 3, 1, 0)),  # row, column, colour, out -> out, colour, row, column
}
_HEADS = ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out")


def _siglip_places(tower: str, projector: str) -> dict[str, Place]:
    layer = tower + "encoder.layers.{l}."
    return {
        "vision.patch_embed.weight": Place(f"{tower}embeddings.patch_embedding.weight", "conv"),
        "vision.patch_embed.bias": Place(f"{tower}embeddings.patch_embedding.bias", "same"),
        "vision.pos_embed": Place(f"{tower}embeddings.position_embedding.weight", "same"),
        "vision.layers.attn_norm.scale": Place(f"{layer}layer_norm1.weight", "same"),
        "vision.layers.attn_norm.bias": Place(f"{layer}layer_norm1.bias", "same"),
        **{f"vision.layers.{letter}_proj.weight": Place(f"{layer}self_attn.{letter}_proj.weight", "in_out") for letter in "qkv"},
        **{f"vision.layers.{letter}_proj.bias": Place(f"{layer}self_attn.{letter}_proj.bias", "flat") for letter in "qkv"},
        "vision.layers.o_proj.weight": Place(f"{layer}self_attn.out_proj.weight", "ins_out"),
        "vision.layers.o_proj.bias": Place(f"{layer}self_attn.out_proj.bias", "same"),
        "vision.layers.mlp_norm.scale": Place(f"{layer}layer_norm2.weight", "same"),
        "vision.layers.mlp_norm.bias": Place(f"{layer}layer_norm2.bias", "same"),
        "vision.layers.up_proj.weight": Place(f"{layer}mlp.fc1.weight", "in_out"),
        "vision.layers.up_proj.bias": Place(f"{layer}mlp.fc1.bias", "same"),
        "vision.layers.down_proj.weight": Place(f"{layer}mlp.fc2.weight", "in_out"),
        "vision.layers.down_proj.bias": Place(f"{layer}mlp.fc2.bias", "same"),
        "vision.final_norm.scale": Place(f"{tower}post_layernorm.weight", "same"),
        "vision.final_norm.bias": Place(f"{tower}post_layernorm.bias", "same"),
        "vision.head.weight": Place(f"{projector}weight", "in_out"),
        "vision.head.bias": Place(f"{projector}bias", "same"),
    }


def _gemma_layer_places(canonical: str, layer: str) -> dict[str, Place]:
    return {
        **{f"{canonical}{letter}_proj.weight": Place(f"{layer}self_attn.{letter}_proj.weight", "in_out") for letter in "qkv"},
        f"{canonical}o_proj.weight": Place(f"{layer}self_attn.o_proj.weight", "ins_out"),
        **{f"{canonical}{name}_proj.weight": Place(f"{layer}mlp.{name}_proj.weight", "in_out") for name in ("gate", "up", "down")},
    }


def _rms_places(canonical: str, layer: str) -> dict[str, Place]:
    return {
        f"{canonical}attn_norm.scale": Place(f"{layer}input_layernorm.weight", "same"),  # stored minus one on both sides
        f"{canonical}mlp_norm.scale": Place(f"{layer}post_attention_layernorm.weight", "same"),
    }


def _modulation_places(canonical: str, norm: str) -> dict[str, Place]:
    return {
        f"{canonical}modulation.weight": Place(f"{norm}dense.weight", "in_out"),  # output axes: (scale, shift, gate), width
        f"{canonical}modulation.bias": Place(f"{norm}dense.bias", "flat"),
    }


def _load(module: torch.nn.Module, params: Params, places: Mapping[str, Place], dtype: Dtype, *, unmapped: Collection[str] = ()) -> None:
    tensors, own = to_oracle(params, places), module.state_dict()
    missing, extra = sorted(tensors.keys() - own.keys()), sorted(own.keys() - tensors.keys() - set(unmapped))
    if missing or extra:
        raise OracleError(
            f"Under transformers {importlib.metadata.version('transformers')}, {type(module).__name__} lacks the tensors {missing[:3]} and has {extra[:3]} "
            f"that parity/oracles.py does not know. It knows the names of transformers {_supported_transformers()}, which LeRobot supports."
        )
    module.load_state_dict({key: _tensor(value, dtype) for key, value in tensors.items()}, strict=False, assign=True)


def _gradients(module: torch.nn.Module, params: Params, places: Mapping[str, Place]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Gradients by canonical name, zeros for none, and the names, one per layer, of those that had none."""
    own = dict(module.named_parameters())
    grads = {key: (torch.zeros_like(value) if value.grad is None else value.grad).numpy() for key, value in own.items()}
    no_grad = []
    for name, (key, _) in places.items():
        layers = range(params[name].shape[0]) if "{l}" in key else (0,)
        per_layer = name.replace(".layers.", ".layers.{l}.") if "{l}" in key else name
        no_grad += [per_layer.format(l=layer) for layer in layers if own[key.format(l=layer)].grad is None]
    return to_canonical(grads, places, params), tuple(no_grad)


def _build_lerobot(spec: ModelSpec) -> torch.nn.Module:
    supported, installed = _supported_transformers(), importlib.metadata.version("transformers")
    if installed not in supported:
        raise OracleError(
            f"LeRobot {importlib.metadata.version('lerobot')} supports transformers {supported}; {installed} is installed. "
            "Install one that it supports, or leave the LeRobot oracle out of this run and say so in the report."
        )
    if spec.trunk.num_heads != LEROBOT_HEADS:
        raise SpecError(f"num_heads is {spec.trunk.num_heads}; LeRobot's code only works with {LEROBOT_HEADS}. Start from parity.oracles.LEROBOT_SPEC.")
    from lerobot.policies.pi05 import modeling_pi05 as modeling
    from lerobot.policies.pi05.configuration_pi05 import PI05Config

    edge = spec.vision.image_size
    config = PI05Config(
        device="cpu",
        dtype="float32",
        chunk_size=spec.action_horizon,
        n_action_steps=spec.action_horizon,
        max_action_dim=spec.action_dim,
        image_resolution=(edge, edge),
    )
    with _lerobot_sizes(modeling, spec):
        return modeling.PI05Pytorch(config).eval()


@contextlib.contextmanager
def _lerobot_sizes(modeling: Any, spec: ModelSpec) -> Iterator[None]:
    """While a model is built: LeRobot's hard-coded sizes are those of `spec`, by other functions under three names of its module."""
    make_paligemma, make_expert = modeling.PaliGemmaForConditionalGenerationWithPiGemma, modeling.PiGemmaForCausalLM

    def get_gemma_config(variant: str) -> Any:
        gemma = {"gemma_2b": spec.trunk, "gemma_300m": spec.expert}[variant]
        return modeling.GemmaConfig(gemma.width, gemma.depth, gemma.mlp_dim, gemma.num_heads, gemma.num_kv_heads, gemma.head_dim)

    def paligemma(config: Any) -> torch.nn.Module:
        vision, text = config.vision_config, config.text_config
        vision.hidden_size, vision.intermediate_size, vision.patch_size = spec.vision.width, spec.vision.mlp_dim, spec.vision.patch_size
        vision.num_hidden_layers, vision.num_attention_heads = spec.vision.depth, spec.vision.num_heads
        vision.projection_dim = spec.trunk.width
        text.vocab_size, text.pad_token_id = spec.vocab_size, None
        return make_paligemma(config=config)

    def expert(config: Any) -> torch.nn.Module:
        config.vocab_size = spec.vocab_size
        return make_expert(config=config)

    names = {"get_gemma_config": get_gemma_config, "PaliGemmaForConditionalGenerationWithPiGemma": paligemma, "PiGemmaForCausalLM": expert}
    with mock.patch.multiple(modeling, **names):
        yield


def _lerobot_observation(batch: Batch, dtype: Dtype) -> dict[str, Any]:
    """LeRobot's arguments: per camera float NCHW images in [-1, 1] and a mask, then tokens and their mask."""
    seen = batch.observation
    pixels = seen.images.astype(dtype)
    pixels = pixels / 255 * 2 - 1 if seen.images.dtype == np.uint8 else pixels
    return {
        "images": [_tensor(camera, dtype) for camera in pixels.transpose(1, 0, 4, 2, 3)],
        "img_masks": [torch.tensor(mask) for mask in seen.image_mask.T],
        "tokens": torch.tensor(seen.tokens, dtype=torch.int64),
        "masks": torch.tensor(seen.token_mask),
    }


class _WidenFloat32(TorchFunctionMode):
    """Inside, whatever asks torch for float32 by name gets float64, so that code with float32 written into it runs in double precision."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _isolated(dtype: Dtype) -> Iterator[None]:
    """Runs in `dtype` on the CPU; gives torch's default dtype and its global generator, which building a module uses, back as they were."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            with torch.device("cpu"), _WidenFloat32() if dtype == "float64" else contextlib.nullcontext():
                yield
        finally:
            torch.set_default_dtype(before)


def _tensor(array: np.ndarray, dtype: Dtype) -> torch.Tensor:
    return torch.tensor(array, dtype=getattr(torch, dtype))


def _supported_transformers() -> SpecifierSet:
    """The versions of transformers that the installed LeRobot declares to work with; any, should it declare none."""
    needs = map(Requirement, importlib.metadata.requires("lerobot"))
    return next((need.specifier for need in needs if need.name == "transformers"), SpecifierSet())
