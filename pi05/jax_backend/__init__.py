"""Pi0.5 in JAX (flax nnx). Mirrors torch_backend file by file and name by name."""

import jax

from pi05.batch import AugmentDraws, Batch, Draws, LossParts, Observation
from pi05.jax_backend.gemma import Stream
from pi05.train_state import StepMetrics

for _container in (AugmentDraws, Batch, Draws, LossParts, Observation, StepMetrics, Stream):
    jax.tree_util.register_dataclass(_container)
