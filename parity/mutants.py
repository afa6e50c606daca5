"""Planted faults, one at a time in one backend, each with the test that must fail because of it.

A test counts only if a fault makes it fail. Most faults are planted in the PyTorch backend, which runs eagerly; the same tests judge JAX.
The names of faults and what hides them: parity study, sections 4 and 5 of parity.md.
"""

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np

from .lab import Lab
from .level_4_steps import Trained
from .record import Record, Row

LAYERS, ATTENTION, SIGLIP, GEMMA = (f"pi05.torch_backend.{name}" for name in ("layers", "attention", "siglip", "gemma"))
MODEL, SAMPLING, OPTIMIZER, BACKEND, AUGMENT = (f"pi05.torch_backend.{name}" for name in ("model", "sampling", "optimizer", "backend", "augment"))


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: what it does, how it is planted, and the test (module.function with its arguments) that must catch it."""

    name: str
    inject: Callable[[], AbstractContextManager]
    killer: str
    arguments: dict[str, object]
    backend: str = "torch"

    def run(self, lab: Lab) -> Row:
        """Runs the killer on the faulty backend; returns its worst check.

        Raises:
            AssertionError: the killer passed (the fault survives), or failed otherwise than by a comparison.
        """
        module, _, function = self.killer.partition(".")
        test, mine = getattr(importlib.import_module(f".{module}", __package__), function), Record()
        offered = {"lab": Lab(borrow=lab, under_test=self.backend), "trained": Trained(), "record": mine, "backend": self.backend} | self.arguments
        with self.inject():
            try:
                test(**{name: value for name, value in offered.items() if name in inspect.signature(test).parameters})
            except AssertionError as failure:
                assert "first divergence" in str(failure), f"{self.killer} failed, but not by a comparison: {failure}"
                return mine.rows[-1]
        raise AssertionError(f"{self.name} survives: {self.killer}{self.arguments} passes")


def patch(target: str, make: Callable) -> Callable[[], AbstractContextManager]:
    """Replaces `target` ("module:name" or "module:Class.method") by `make(original)`."""

    @contextlib.contextmanager
    def inject() -> Iterator[None]:
        module, _, path = target.partition(":")
        owner, _, name = path.rpartition(".")
        place = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        with mock.patch.object(place, name, make(getattr(place, name))):
            yield

    return inject


def patch_explicit(make: Callable) -> Callable[[], AbstractContextManager]:
    """Replaces PyTorch's explicit attention strategy by `make(original)`."""

    @contextlib.contextmanager
    def inject() -> Iterator[None]:
        strategies = importlib.import_module(ATTENTION).STRATEGIES
        with mock.patch.dict(strategies, explicit=make(strategies["explicit"])):
            yield

    return inject


def plain_attention(
    *, mask_value: float = -np.inf, tile: bool = False, round_weights: bool = False, scaled: bool = True, half_logits: bool = False
) -> Callable:
    """An attention written with matrix products, right unless told otherwise."""

    def attention(q, k, v, valid):
        import torch

        group = q.shape[2] // k.shape[2]
        k, v = ((x.repeat(1, 1, group, 1) if tile else x.repeat_interleave(group, 2)).transpose(1, 2) for x in (k, v))
        logits = q.transpose(1, 2) @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaled else 1.0)
        logits = logits.half().to(q.dtype) if half_logits else logits
        if valid is not None:
            mask = valid[:, None, None, :]
            logits = logits.masked_fill(~mask, mask_value) if mask_value == -np.inf else logits + torch.where(mask, 0.0, mask_value).to(q.dtype)
        weights = torch.softmax(logits, -1)
        weights = weights.bfloat16().to(q.dtype) if round_weights else weights
        return (weights @ v).transpose(1, 2)

    return attention


def _erf_gelu(_: Callable) -> Callable:
    import torch

    return lambda x: torch.nn.functional.gelu(x)


def _jax_erf_gelu(_: Callable) -> Callable:
    import jax

    return lambda x: jax.nn.gelu(x, approximate=False)


def _rms(eps_inside: float, eps_outside: float = 0.0, *, low: bool = False) -> Callable:
    def normalize(x):
        import torch

        y = x if x.dtype == torch.float64 else x.float()
        root = torch.sqrt((y * y).mean(-1, keepdim=True) + eps_inside) + eps_outside
        return y / (root.bfloat16().to(y.dtype) if low else root)

    return lambda _: normalize


def _layer_norm_eps(_: Callable) -> Callable:
    def forward(self, x):
        import torch

        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.scale.to(x.dtype), self.bias.to(x.dtype), 1e-5)

    return forward


def _no_plus_one(_: Callable) -> Callable:
    return lambda self, x, cond: ((importlib.import_module(LAYERS).rms_normalize(x) * self.scale).to(x.dtype), None)


def _swapped_modulation(original: Callable) -> Callable:
    """scale and shift change places, as a port that splits in another order would have it."""

    def forward(self, x, cond):
        scale, shift, gate = self.modulation(cond)[:, None, :].chunk(3, -1)
        return (importlib.import_module(LAYERS).rms_normalize(x) * (1 + shift) + scale).to(x.dtype), gate.to(x.dtype)

    return forward


def _rope(base: float = 10_000.0, *, low: bool = False) -> Callable:
    def table(head_dim, num_positions):
        import torch

        frequency = torch.tensor(base ** (-np.arange(0, head_dim, 2) / head_dim))
        angle = np.arange(num_positions)[:, None] * (frequency.bfloat16().double() if low else frequency).numpy()
        return np.cos(angle), np.sin(angle)

    return lambda _: table


def _interleaved(original: Callable) -> Callable:
    def rotate(x, angles):
        return original(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), angles).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    return rotate


def _jax_interleaved(original: Callable) -> Callable:
    def rotate(x, angles):
        half = (*x.shape[:-1], -1, 2)
        return original(x.reshape(half).swapaxes(-1, -2).reshape(x.shape), angles).reshape((*x.shape[:-1], 2, -1)).swapaxes(-1, -2).reshape(x.shape)

    return rotate


def _shift_positions(original: Callable) -> Callable:
    """Both streams moved by one: rotary embedding is relative, so nothing but the positions themselves shows it."""

    def method(self, *inputs, capture=False):
        *out, taps = original(self, *inputs, capture=capture)
        return *out, {name: tap + 1 if name.endswith("positions") else tap for name, tap in taps.items()}

    return method


def _ignore_padding_in_positions(original: Callable) -> Callable:
    """The suffix starts behind the padded prefix instead of behind its valid part: the sampler's classic."""

    def embed_suffix(self, x_t, time, valid, prefix, *, capture=False):
        whole = dataclasses.replace(prefix, valid=prefix.valid | True)
        return original(self, x_t, time, valid, whole, capture=capture)

    return embed_suffix


def _sees_everything(original: Callable) -> Callable:
    return lambda q, k, v, valid=None, *, strategy: original(q, k, v, None, strategy=strategy)


def _causal_suffix(original: Callable) -> Callable:
    def attention(q, k, v, valid=None, *, strategy):
        import torch

        if k.shape[1] == q.shape[1]:
            return original(q, k, v, valid, strategy=strategy)
        steps, prefix = q.shape[1], k.shape[1] - q.shape[1]
        rows = [original(q[:, t : t + 1], k[:, : prefix + t + 1], v[:, : prefix + t + 1], valid[:, : prefix + t + 1], strategy=strategy) for t in range(steps)]
        return torch.cat(rows, 1)

    return attention


def _prefix_sees_suffix(original: Callable) -> Callable:
    def block(layers, xs, prefix, suffix, cond, cache, compute, last=None):
        import torch

        gemma = importlib.import_module(GEMMA)
        if xs[0] is None or xs[1] is None:
            return original(layers, xs, prefix, suffix, cond, cache, compute, last)
        _, k, v, _ = gemma.project_heads(layers[1], xs[1], cond, suffix.angles)

        def attention(q, own_k, own_v, valid, *, strategy):
            if q.shape[1] == xs[0].shape[1]:
                own_k, own_v, valid = torch.cat((own_k, k), 1), torch.cat((own_v, v), 1), torch.cat((valid, suffix.valid), 1)
            return attend(q, own_k, own_v, valid, strategy=strategy)

        attend = gemma.attention
        with mock.patch.object(gemma, "attention", attention):
            return original(layers, xs, prefix, suffix, cond, cache, compute, last)

    return block


def _swapped_patches(original: Callable) -> Callable:
    return lambda x, pattern, **sizes: original(x, pattern.replace("-> B (Y X) (I J R)", "-> B (X Y) (I J R)"), **sizes)


def _embed(scale: Callable[[float], float]) -> Callable:
    return lambda _: lambda self, tokens: self.weight[tokens] * scale(self.weight.shape[1] ** 0.5)


def _swapped_gate_and_up(original: Callable) -> Callable:
    def finish(layer, x, attn, gate, cond):
        modules = dict(layer.named_modules())
        with mock.patch.dict(layer._modules, gate_proj=modules["up_proj"], up_proj=modules["gate_proj"]):
            return original(layer, x, attn, gate, cond)

    return finish


def _detached_prefix(original: Callable) -> Callable:
    def embed_prefix(self, observation, *, capture=False):
        prefix, taps = original(self, observation, capture=capture)
        return dataclasses.replace(prefix, x=prefix.x.detach()), taps

    return embed_prefix


def _jax_detached_prefix(original: Callable) -> Callable:
    def embed_prefix(self, observation, *, capture=False):
        import jax

        prefix, taps = original(self, observation, capture=capture)
        return dataclasses.replace(prefix, x=jax.lax.stop_gradient(prefix.x)), taps

    return embed_prefix


def _scaled_images(original: Callable) -> Callable:
    def forward(self, images, *, capture=False):
        tokens, taps = original(self, images, capture=capture)
        return tokens / tokens.shape[-1] ** 0.5, taps

    return forward


def _swapped_cameras(original: Callable) -> Callable:
    def forward(self, images, *, capture=False):
        tokens, taps = original(self, images, capture=capture)
        return tokens.flip(1), taps

    return forward


def _flow(change: Callable) -> Callable:
    """Changes (x_t, u_t, counted) of the original; `change` also gets batch and draws."""

    def make(original: Callable) -> Callable:
        return lambda self, batch, draws, **options: change(*original(self, batch, draws, **options), batch, draws)

    return make


def _parts(change: Callable) -> Callable:
    def make(original: Callable) -> Callable:
        return lambda self, batch, draws, **options: change(original(self, batch, draws, **options))

    return make


def _late_time(original: Callable) -> Callable:
    return lambda model, prefix, cache, x, time: original(model, prefix, cache, x, time - 0.1)


def _cosine_first(original: Callable) -> Callable:
    return lambda time, width: original(time, width).roll(width // 2, -1)


def _plain_time_product(original: Callable) -> Callable:
    def embedding(time, width):
        import torch

        coarse, fine = importlib.import_module("pi05.spec").time_frequencies(width)
        angle = time[:, None] * torch.as_tensor((coarse + fine) * 2 * np.pi, dtype=time.dtype)
        return torch.cat((torch.sin(angle), torch.cos(angle)), -1)

    return embedding


def _longer_periods(original: Callable) -> Callable:
    def frequencies(width):
        period = 4e-3 * (10.0 / 4e-3) ** np.linspace(0, 1, width // 2)
        coarse = np.round(16 / period) / 16
        return coarse, 1 / period - coarse

    return frequencies


def _transposed_square(original: Callable) -> Callable:
    """The trunk's q is square in the published model too, so a missing transpose loads without a word."""

    def write(tensors, spec, layout):
        for name, value in original(tensors, spec, layout):
            yield name, value.T if name.startswith("trunk.") and name.endswith("q_proj.weight") else value

    return write


def _counted_padding(x_t, u_t, counted, batch, draws):
    return x_t, u_t, counted | True


def _nan_to_num(parts):
    return dataclasses.replace(parts, per_sample=parts.per_sample.nan_to_num(0.0))


ACTIVATIONS = "level_1_activations.test_every_activation_matches_the_truth"
OUTPUTS = "level_2_model.test_velocity_loss_and_logits_match_the_truth"
GRADIENTS = "level_3_gradients.test_every_gradient_matches_the_truth"
STEPS = "level_6_sampling.test_every_denoising_step_matches_the_truth"
NORMS = "level_1_activations.test_norms_of_small_inputs_use_the_published_eps"
ROTARY = "level_1_activations.test_rotary_embedding_is_exact_at_every_position"
TIME = "level_1_activations.test_time_embedding_is_exact_where_the_angle_is_large"
LARGE = "level_1_activations.test_attention_matches_the_formula_for_grouped_heads_and_large_logits"
LEAK = "level_1_activations.test_masked_keys_leak_nothing_whatever_they_hold"
FUSED = "level_2_model.test_fused_attention_gives_the_explicit_numbers"
MASKED = "level_2_model.test_content_of_masked_cameras_text_and_steps_changes_no_bit"
WHOLE, UPDATES = "level_4_steps", "level_4_optimizer"
CLIP, FORMULAS = f"{UPDATES}.test_clipping_has_no_hidden_epsilon", f"{UPDATES}.test_weights_moments_and_average_follow_the_formulas"
PIXELS, DRAWS = "level_0_augment.test_augmented_images_match_the_truth", "level_0_augment.test_draws_belong_to_a_sample_not_to_its_batch"
OPENPI, STANDARD = {"dtype": "float32", "preset": "openpi"}, {"dtype": "float32", "preset": "standard"}
PUBLISHED = {"steps": 100, "recipe_name": "published"}
F32, RAGGED = {"dtype": "float32"}, {"dtype": "float32", "scene_name": "ragged"}
JAX_GEMMA, JAX_MODEL = "pi05.jax_backend.gemma", "pi05.jax_backend.model"


def _rule(**changes: float) -> Callable:
    """AdamW restored with another rule."""

    def make(restore: Callable) -> Callable:
        return lambda params, recipe, *rest: restore(params, dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, **changes)), *rest)

    return make


def _unscaled_adapters(init: Callable) -> Callable:
    def faulty(self, *sizes, **options):
        init(self, *sizes, **options)
        self.lora_scale = self.lora_scale and 1.0

    return faulty


def _summed_parts(accumulate: Callable) -> Callable:
    def faulty(model, batch, draws, recipe, learned):
        parts, gradients = accumulate(model, batch, draws, recipe, learned)
        return parts, {name: gradient * recipe.grad_accum_steps for name, gradient in gradients.items()}

    return faulty


def _one_draw_a_batch(draw: Callable) -> Callable:
    return lambda *options, positions, **named: draw(*options, positions=np.full_like(positions, positions[0]), **named)


def _first_draws_for_all(augment: Callable) -> Callable:
    def faulty(images, draws, dtype):
        first = {name: value[:1].expand_as(value) for name, value in vars(draws).items()}
        return augment(images, dataclasses.replace(draws, **first), dtype)

    return faulty


def _from_corners(resample: Callable) -> Callable:
    """The map taken to count from the image's corner, as grid_sample's align_corners=False does, instead of from a pixel's centre."""

    def faulty(pixels, affine):
        half = affine[..., :2].sum(-1) / 2 - 0.5
        return resample(pixels, affine + half[..., None] * affine.new_tensor([0.0, 0.0, 1.0]))

    return faulty


def _grey_border(resample: Callable) -> Callable:
    """Resampled in [-1, 1], where 0 is mid-grey."""
    return lambda pixels, affine: (resample(2 * pixels - 1, affine) + 1) / 2


def _unjoined(_: Callable) -> Callable:
    """The suffix's keys behind the prefix's padding, where a key length does not reach them."""

    def faulty(first, second, *_):
        import torch

        return torch.cat((first, second), 1)

    return faulty


def _tokens_only(pack: Callable) -> Callable:
    return lambda valid, x, positions: (*pack(valid, x), positions)


MUTANTS = [
    Mutant("gelu erf in Gemma", patch(f"{GEMMA}:gelu", _erf_gelu), ACTIVATIONS, RAGGED),
    Mutant("gelu erf in Gemma, JAX", patch(f"{JAX_GEMMA}:gelu", _jax_erf_gelu), ACTIVATIONS, RAGGED, "jax"),
    Mutant("gelu erf in SigLIP", patch(f"{SIGLIP}:gelu", _erf_gelu), ACTIVATIONS, RAGGED),
    Mutant("RMSNorm eps 1e-5", patch(f"{LAYERS}:rms_normalize", _rms(1e-5)), NORMS, F32),
    Mutant("RMSNorm eps outside the root", patch(f"{LAYERS}:rms_normalize", _rms(0.0, 1e-6)), NORMS, F32),
    Mutant("LayerNorm eps 1e-5", patch(f"{LAYERS}:LayerNorm.forward", _layer_norm_eps), NORMS, F32),
    Mutant("RMSNorm without 1 + scale", patch(f"{LAYERS}:RMSNorm.forward", _no_plus_one), ACTIVATIONS, RAGGED),
    Mutant("RMS statistics in bf16", patch(f"{LAYERS}:rms_normalize", _rms(1e-6, low=True)), GRADIENTS, RAGGED),
    Mutant("adaRMS scale and shift swapped", patch(f"{LAYERS}:AdaRMSNorm.forward", _swapped_modulation), ACTIVATIONS, RAGGED),
    Mutant("gate missing", patch(f"{GEMMA}:add_gated", lambda _: lambda x, branch, gate: x + branch), ACTIVATIONS, RAGGED),
    Mutant("rope base 9999", patch(f"{LAYERS}:rope_table", _rope(9999.0)), ROTARY, F32),
    Mutant("rope frequencies in bf16", patch(f"{LAYERS}:rope_table", _rope(low=True)), ROTARY, F32),
    Mutant("rope interleaved", patch(f"{GEMMA}:rotate", _interleaved), ACTIVATIONS, RAGGED),
    Mutant("rope interleaved, JAX", patch(f"{JAX_GEMMA}:rotate", _jax_interleaved), ACTIVATIONS, RAGGED, "jax"),
    Mutant("positions off by one", patch(f"{MODEL}:Pi05.embed_prefix", _shift_positions), "level_1_activations.test_positions_count_valid_tokens_only", {}),
    Mutant("suffix positions ignore padding", patch(f"{MODEL}:Pi05.embed_suffix", _ignore_padding_in_positions), STEPS, RAGGED),
    Mutant("masks ignored", patch(f"{GEMMA}:attention", _sees_everything), MASKED, {}),
    Mutant("suffix causal", patch(f"{GEMMA}:attention", _causal_suffix), ACTIVATIONS, RAGGED),
    Mutant("prefix sees suffix", patch(f"{GEMMA}:block", _prefix_sees_suffix), ACTIVATIONS, RAGGED),
    Mutant("mask value -30", patch_explicit(lambda _: plain_attention(mask_value=-30.0)), LEAK, F32),
    Mutant("key heads tiled instead of repeated", patch_explicit(lambda _: plain_attention(tile=True)), ACTIVATIONS, RAGGED),
    Mutant("softmax scale missing", patch_explicit(lambda _: plain_attention(scaled=False)), ACTIVATIONS, RAGGED),
    Mutant("attention logits in fp16", patch_explicit(lambda _: plain_attention(half_logits=True)), LARGE, F32),
    Mutant("attention weights rounded to bf16", patch_explicit(lambda _: plain_attention(round_weights=True)), GRADIENTS, RAGGED),
    Mutant(
        "dead rows not zeroed",
        patch_explicit(lambda _: plain_attention(mask_value=-1e30)),
        "level_1_activations.test_a_query_without_any_key_gives_exact_zeros_and_zero_gradients",
        F32,
    ),
    Mutant("fused: suffix behind the padding", patch(f"{GEMMA}:join", _unjoined), FUSED, {}),
    Mutant("fused: positions left where they were", patch(f"{MODEL}:pack", _tokens_only), FUSED, {}),
    Mutant("fused: logits of packed tokens", patch(f"{MODEL}:unpack", lambda _: lambda valid, packed: packed), FUSED, {}),
    Mutant("every layer's prefix left out", patch(f"{GEMMA}:unless", lambda _: lambda condition, function, x: x), GRADIENTS, RAGGED),
    Mutant("patch order swapped", patch(f"{SIGLIP}:rearrange", _swapped_patches), ACTIVATIONS, RAGGED),
    Mutant("image tokens scaled by 1/sqrt(width)", patch(f"{SIGLIP}:Vision.forward", _scaled_images), ACTIVATIONS, RAGGED),
    Mutant("camera order reversed", patch(f"{SIGLIP}:Vision.forward", _swapped_cameras), ACTIVATIONS, RAGGED),
    Mutant("embedding scaled twice", patch(f"{LAYERS}:Embedding.forward", _embed(lambda scale: scale * scale)), ACTIVATIONS, RAGGED),
    Mutant("embedding scale in bf16", patch(f"{LAYERS}:Embedding.forward", _embed(lambda scale: 9.8125)), ACTIVATIONS, RAGGED),
    Mutant("gate and up swapped", patch(f"{GEMMA}:finish_layer", _swapped_gate_and_up), ACTIVATIONS, RAGGED),
    Mutant("square q transposed", patch(f"{MODEL}:write", _transposed_square), ACTIVATIONS, RAGGED),
    Mutant("time embedding cosine first", patch(f"{MODEL}:time_embedding", _cosine_first), ACTIVATIONS, RAGGED),
    Mutant("time periods up to 10", patch(f"{LAYERS}:time_frequencies", _longer_periods), TIME, F32),
    Mutant("time angle as one float32 product", patch(f"{LAYERS}:time_embedding", _plain_time_product), TIME, F32),
    Mutant("flow direction reversed", patch(f"{MODEL}:Pi05.flow", _flow(lambda x, u, c, b, d: (d.noise + b.actions - x, u, c))), OUTPUTS, RAGGED),
    Mutant("target sign", patch(f"{MODEL}:Pi05.flow", _flow(lambda x, u, c, b, d: (x, -u, c))), OUTPUTS, RAGGED),
    Mutant("padded steps counted", patch(f"{MODEL}:Pi05.flow", _flow(_counted_padding)), OUTPUTS, RAGGED),
    Mutant("loss summed over dims", patch(f"{MODEL}:Pi05.loss", _parts(lambda p: dataclasses.replace(p, per_sample=11 * p.per_sample))), GRADIENTS, RAGGED),
    Mutant("gradient stopped at the prefix", patch(f"{MODEL}:Pi05.embed_prefix", _detached_prefix), GRADIENTS, RAGGED),
    Mutant("gradient stopped at the prefix, JAX", patch(f"{JAX_MODEL}:Pi05.embed_prefix", _jax_detached_prefix), GRADIENTS, RAGGED, "jax"),
    Mutant("NaN loss swallowed", patch(f"{MODEL}:Pi05.loss", _parts(_nan_to_num)), "level_2_model.test_a_nan_in_one_sample_reaches_that_loss_and_no_other", {}),
    Mutant("clip with an epsilon", patch(f"{OPTIMIZER}:global_norm", lambda norm: lambda tensors: norm(tensors) + 1e-6), CLIP, {}),
    Mutant("AdamW eps 1e-6", patch(f"{OPTIMIZER}:restore_optimizer", _rule(eps=1e-6)), FORMULAS, PUBLISHED),
    Mutant("AdamW b2 0.999", patch(f"{OPTIMIZER}:restore_optimizer", _rule(b2=0.999)), FORMULAS, PUBLISHED),
    Mutant("decay left out", patch(f"{OPTIMIZER}:_SMALLEST_DECAY", lambda _: np.inf), FORMULAS, {"steps": 100, "recipe_name": "no clip, decay"}),
    Mutant("average applied twice", patch(f"{OPTIMIZER}:get_ema_multi_avg_fn", lambda make: lambda decay: make(decay**2)), FORMULAS, PUBLISHED),
    Mutant("LoRA scale missing", patch(f"{LAYERS}:Linear.__init__", _unscaled_adapters), f"{WHOLE}.test_adapters_are_the_product_added_to_their_weight", {}),
    Mutant("accumulated gradients summed", patch(f"{BACKEND}:accumulate_gradients", _summed_parts), f"{WHOLE}.test_accumulation_is_the_whole_batch", {}),
    Mutant("augmentation drawn per batch", patch("pi05.data.augment:draw_augmentation", _one_draw_a_batch), DRAWS, OPENPI),
    Mutant("augmentation of the first sample for all", patch(f"{AUGMENT}:augment", _first_draws_for_all), PIXELS, STANDARD),
    Mutant("augmentation counts from corners", patch(f"{AUGMENT}:resample", _from_corners), PIXELS, STANDARD),
    Mutant("augmentation leaves a grey border", patch(f"{AUGMENT}:resample", _grey_border), PIXELS, OPENPI),
    Mutant("augmentation's grey is a plain mean", patch(f"{AUGMENT}:LUMA", lambda _: (1 / 3, 1 / 3, 1 / 3)), PIXELS, STANDARD),
    Mutant("Euler time one step late", patch(f"{SAMPLING}:cached_velocity", _late_time), STEPS, RAGGED),
]
