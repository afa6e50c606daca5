"""Pi0.5 in JAX (flax nnx). Mirrors torch_backend file by file and name by name."""

import jax

from pi05.batch import Batch, Draws, LossParts, Observation
from pi05.jax_backend.gemma import Stream

for _container in (Batch, Draws, LossParts, Observation, Stream):
    jax.tree_util.register_dataclass(_container)
