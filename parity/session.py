"""Settings of a test session, for parity/ and tests/ alike; importing this module has no effect."""

import os
from pathlib import Path


def configure(device: str = "cpu") -> None:
    """Both frameworks on `device` ("cpu" or "cuda"), JAX without implicit dtype promotion and with a compilation cache on disk, no network.

    Raises:
        RuntimeError: a framework does not see the device; a comparison that silently ran elsewhere would prove nothing.
    """
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch is in the same process
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the small complex products of the reference are 7 times slower with more
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parents[1] / ".cache" / "jax"))
    if device == "cuda":
        import torch

        if jax.default_backend() != "gpu" or not torch.cuda.is_available():
            raise RuntimeError(f"--device cuda: JAX sees {jax.default_backend()!r}, torch.cuda.is_available() is {torch.cuda.is_available()}.")
        torch.set_default_device("cuda")
