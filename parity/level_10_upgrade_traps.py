"""Level 10: the places at which an upgrade has changed numbers before, each asked of the dependency itself, so that a failure names it.

What an upgrade can break in our own code shows in the other levels; docs/upgrade-ci.md lists the test of every trap.
"""

import math

import numpy as np
import pytest

from pi05.batch import make_draws, synthetic_batch
from pi05.compare import Check, max_error, relative_error
from pi05.params import philox
from pi05.schedule import Schedule, learning_rate
from pi05.spec import ModelSpec

from .cases import SEED
from .record import Record
from .tolerances import UNIT_LIMITS

RULE = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}


def settle(record: Record, package: str, what: str, checks: list[Check]) -> None:
    """As Record.settle; a failure names the package, and pytest's head the versions."""
    record.settle("L10", f"{package}: {what}", checks)


def test_transformers_scales_token_embeddings_by_the_root_of_the_width_once(record: Record) -> None:
    """5.3 scaled in GemmaModel.forward, 5.5 in the embedding module: whoever calls one half of it gets the factor twice or never."""
    import torch
    from transformers import GemmaConfig, GemmaModel

    config = GemmaConfig(
        **{"hidden_size": 96, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        vocab_size=17,
    )
    with torch.device("cpu"), torch.no_grad():
        model, tokens = GemmaModel(config).double().eval(), torch.tensor([[3, 16, 0, 7]])
        table = torch.tensor(philox(SEED, "table").standard_normal((17, 96)))
        model.get_input_embeddings().weight.copy_(table)
        seen = []
        model.layers[0].register_forward_pre_hook(
            lambda module, arguments, options: seen.append((*arguments, options.get("hidden_states"))[0]), with_kwargs=True
        )
        model(input_ids=tokens)
    want = table[tokens] * math.sqrt(96)
    settle(record, "transformers", "token embedding", [Check("into the first layer", relative_error(seen[0].numpy(), want.numpy()), 1e-7)])


@pytest.mark.parametrize("package", ["torch", "optax"])
def test_adamw_adds_its_epsilon_outside_the_root_and_decays_apart(record: Record, package: str) -> None:
    """Gradients as small as eps, where eps inside the root, or before the correction of the bias, changes the step by half."""
    gradient = np.array([1e-8, -3e-8, 1e-3, 0.0, 2.0])
    start, lr, decay, steps = np.array([1.0, -2.0, 0.5, 3.0, -1.0]), 0.1, 0.01, 3
    want, m, v = start.copy(), np.zeros(5), np.zeros(5)
    for step in range(1, steps + 1):
        m, v = RULE["b1"] * m + (1 - RULE["b1"]) * gradient, RULE["b2"] * v + (1 - RULE["b2"]) * gradient**2
        corrected = (m / (1 - RULE["b1"] ** step)) / (np.sqrt(v / (1 - RULE["b2"] ** step)) + RULE["eps"])
        want = want - lr * (corrected + decay * want)
    got = {"torch": _torch_adamw, "optax": _optax_adamw}[package](start, gradient, lr, decay, steps)
    settle(record, package, "AdamW", [Check("weights", max_error(got, want), UNIT_LIMITS["float64"] * 10)])


def _torch_adamw(start: np.ndarray, gradient: np.ndarray, lr: float, decay: float, steps: int) -> np.ndarray:
    import torch

    weights = torch.tensor(start, device="cpu", requires_grad=True)
    rule = torch.optim.AdamW([weights], lr=lr, betas=(RULE["b1"], RULE["b2"]), eps=RULE["eps"], weight_decay=decay)
    for _ in range(steps):
        weights.grad = torch.tensor(gradient, device="cpu")
        rule.step()
    return weights.detach().numpy()


def _optax_adamw(start: np.ndarray, gradient: np.ndarray, lr: float, decay: float, steps: int) -> np.ndarray:
    import jax
    import optax

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # optax promotes
        rule, weights = optax.adamw(lr, **RULE, weight_decay=decay), jax.numpy.array(start)
        state = rule.init(weights)
        for _ in range(steps):
            changes, state = rule.update(jax.numpy.array(gradient), state, weights)
            weights = optax.apply_updates(weights, changes)
        return np.array(weights)


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_the_public_attention_still_means_what_we_pass_to_it(record: Record, package: str) -> None:
    """The arguments by the names that our fused strategy uses, grouped heads, in each framework's own order of axes."""
    rng = philox(SEED, "public attention")
    q, k, v = rng.standard_normal((2, 5, 4, 8)), rng.standard_normal((2, 7, 2, 8)), rng.standard_normal((2, 7, 2, 8))
    logits = np.einsum("btkgh,bskh->bkgts", q.reshape(2, 5, 2, 2, 8), k) * 0.3
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    want = np.einsum("bkgts,bskh->btkgh", weights / weights.sum(-1, keepdims=True), v).reshape(q.shape)
    if package == "torch":
        import torch

        q, k, v = (torch.tensor(x, device="cpu").transpose(1, 2) for x in (q, k, v))
        got = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True).transpose(1, 2).numpy()
    else:
        import jax

        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # JAX's own function promotes
            got = np.array(jax.nn.dot_product_attention(*(jax.numpy.array(x) for x in (q, k, v)), scale=0.3, implementation="xla"))
    # JAX's takes its softmax in float32, whatever it is given
    settle(record, package, "public attention", [Check("out", relative_error(got, want), UNIT_LIMITS["float64" if package == "torch" else "float32"])])


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_softmax_of_bfloat16_logits_is_taken_in_float32_where_we_ask_for_it(record: Record, package: str) -> None:
    """A row of 4,096 equal logits: sums in bfloat16 stick at 256."""
    if package == "torch":
        import torch

        got = torch.softmax(torch.zeros(1, 4096, dtype=torch.bfloat16, device="cpu"), -1, dtype=torch.float32).numpy()
    else:
        import jax

        got = np.array(jax.nn.softmax(jax.numpy.zeros((1, 4096), "bfloat16").astype("float32"), -1))
    assert got.dtype == np.float32
    settle(record, package, "softmax", [Check("weights", relative_error(got, np.full((1, 4096), 1 / 4096)), UNIT_LIMITS["float32"])])


def test_numpy_scalars_keep_batches_and_draws_in_float32(record: Record) -> None:
    """NumPy 1 let values decide (a float32 scalar times 3.0 was float64), NumPy 2 lets types decide."""
    spec = ModelSpec.tiny()
    batch, draws = synthetic_batch(spec, 2, seed=SEED, token_len=23), make_draws(spec, SEED, 0, np.arange(2))
    dtypes = {"actions": batch.actions.dtype, "noise": draws.noise.dtype, "time": draws.time.dtype, "scalar": (np.float32(3) * 3.0).dtype}
    settle(record, "numpy", "promotion", [Check(name, float(dtype != np.float32), 0.0) for name, dtype in dtypes.items()])
    assert type(learning_rate(Schedule(peak_lr=1e-3, warmup_steps=2, decay_steps=9, decay_lr=1e-4), np.int64(3))) in (float, np.float64)


def test_safetensors_refuses_tied_tensors_and_keeps_views_whole(record: Record, tmp_path) -> None:
    """A file of a tied model holds one of the two; a reader that expects both must find out. A transposed view must not be written as its memory."""
    import torch
    from safetensors.numpy import load_file
    from safetensors.torch import save_file

    with torch.device("cpu"):
        table = torch.arange(12.0).reshape(3, 4)
        with pytest.raises((RuntimeError, ValueError)):
            save_file({"embed": table, "lm_head": table}, tmp_path / "tied.safetensors")
        save_file({"kernel": table.T.contiguous()}, tmp_path / "view.safetensors")
    found = load_file(tmp_path / "view.safetensors")["kernel"]
    settle(record, "safetensors", "views", [Check("kernel", max_error(found, np.arange(12.0).reshape(3, 4).T), 0.0)])


def test_orbax_reads_its_own_tree_by_the_names_that_openpi_uses(record: Record, tmp_path) -> None:
    """openpi's checkpoints are trees of dicts under "params", written leaf by leaf; names, shapes and dtypes must be in the metadata."""
    import orbax.checkpoint as ocp

    tree = {"params": {"PaliGemma": {"llm": {"layers": {"mlp": np.arange(6, dtype=np.float32).reshape(2, 3)}}}}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
        found = checkpointer.restore(tmp_path / "checkpoint")
    leaf = np.asarray(found["params"]["PaliGemma"]["llm"]["layers"]["mlp"])
    settle(record, "orbax-checkpoint", "tree", [Check("mlp", max_error(leaf, tree["params"]["PaliGemma"]["llm"]["layers"]["mlp"]), 0.0)])
    assert leaf.dtype == np.float32
