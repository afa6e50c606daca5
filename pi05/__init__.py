"""Pi0.5 in JAX and PyTorch: one spec, two implementations, one proof that they are the same model."""

from pi05.batch import Batch, Draws, Observation
from pi05.spec import GemmaSpec, ModelSpec, VisionSpec

__version__ = "0.1.0"
__all__ = ["Batch", "Draws", "GemmaSpec", "ModelSpec", "Observation", "VisionSpec", "__version__"]
