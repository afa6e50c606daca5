"""From the bundled dataset to the loss, with nothing standing in for anything."""

import functools
from pathlib import Path

import numpy as np
import pytest

from pi05.batch import Batch, Draws
from pi05.data.dataset import open_dataset
from pi05.data.loader import make_loader
from pi05.data.measure import compute_norm_stats, make_fingerprint
from pi05.data.tokenizer import load_tokenizer
from pi05.data.transforms import Pipeline
from pi05.errors import DataError
from pi05.initial import initial_params
from pi05.robots import load_robot
from pi05.spec import Compute, ModelSpec

DATA = Path(__file__).resolve().parents[2] / "data"
SPEC = ModelSpec.tiny()


def pipeline(**tokenizer: bool) -> Pipeline:
    robot = load_robot("metaworld")
    stats = compute_norm_stats(DATA / "metaworld_mini", robot, action_horizon=SPEC.action_horizon)
    stats.check_fingerprint(make_fingerprint(DATA / "metaworld_mini", robot, action_horizon=SPEC.action_horizon))
    tokens = load_tokenizer(DATA / "tokenizer" / "tiny.model", max_token_len=SPEC.max_token_len, **tokenizer)
    return Pipeline(SPEC, robot, stats, tokens)


@functools.cache
def batches() -> list[tuple[Batch, Draws]]:
    """Two batches of 16 in the loader's own order."""
    dataset = open_dataset(DATA / "metaworld_mini", robot=load_robot("metaworld"), action_horizon=SPEC.action_horizon)
    with make_loader(dataset, pipeline(), SPEC, batch_size=16, seed=0, num_workers=0) as loader:
        return list(loader.batches(first=0, last=2))


def test_batches_of_real_data_are_valid_and_normalised() -> None:
    for batch, draws in batches():
        batch.validate(SPEC)
        draws.validate(SPEC, 16)
        assert batch.observation.images.shape == (16, 2, 70, 70, 3) and batch.observation.image_mask.all()
        real = batch.actions[~batch.action_is_pad]
        assert np.abs(real[:, :4]).max() < 2 and not real[:, 4:].any() and (batch.action_dim_is_pad == (np.arange(11) >= 4)).all()
        assert len({str(row[mask]) for row, mask in zip(batch.observation.tokens, batch.observation.token_mask, strict=True)}) > 8


def test_the_prompt_of_a_real_row_reads_as_published() -> None:
    dataset = open_dataset(DATA / "metaworld_mini", robot=load_robot("metaworld"), action_horizon=SPEC.action_horizon)
    pipe = pipeline()
    text = pipe.tokenizer.decode(pipe(dataset[0])["tokens"])
    assert text.startswith(f"Task: {dataset[0]['task']}, State: ") and text.endswith(";\nAction: ")
    assert len(text.split("State: ")[1].split(";")[0].split()) == 4
    assert "State" not in pipeline(discrete_state=False).tokenizer.decode(pipeline(discrete_state=False)(dataset[0])["tokens"])


def test_both_backends_have_the_same_loss_on_real_data() -> None:
    losses = [_losses(backend) for backend in ("jax", "torch")]
    assert np.isfinite(losses[0]).all() and losses[0].shape == (16,)
    assert np.abs(losses[0] - losses[1]).max() <= 1e-5 * np.abs(losses[0]).max()


def test_a_tokenizer_that_is_larger_than_the_model_is_refused_before_any_row_is_read() -> None:
    pipe = pipeline()
    with pytest.raises(DataError, match="The tokenizer has 500 tokens, the model embeds 300"):
        Pipeline(SPEC.replace(vocab_size=300), pipe.robot, pipe.stats, pipe.tokenizer)


def _losses(backend: str) -> np.ndarray:
    import importlib

    model = importlib.import_module(f"pi05.{backend}_backend.model")
    batch, draws = batches()[0]
    pi05 = model.make_model(SPEC, Compute("float32"), initial_params(SPEC, 0))
    parts = pi05.loss(model.from_numpy(batch), model.from_numpy(draws))
    return np.asarray(parts.per_sample if backend == "jax" else parts.per_sample.detach())
