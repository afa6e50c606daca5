"""Settings of a test session, for parity/ and tests/ alike; importing this module has no effect."""

import os
from pathlib import Path


def configure() -> None:
    """JAX on the CPU with implicit dtype promotion forbidden and a compilation cache on disk; nothing may reach for the network."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the small complex products of the reference are 7 times slower with more
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parents[1] / ".cache" / "jax"))
