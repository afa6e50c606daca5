"""Single operations of either backend as functions on NumPy arrays, in a chosen precision, run eagerly."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np


class Units(Protocol):
    """What level 1 asks of both backends; arrays are NumPy float64 in and out, the computation is in the unit's dtype."""

    def rms_norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray: ...
    def layer_norm(self, x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray: ...
    def ada_rms_norm(self, x: np.ndarray, cond: np.ndarray, weight_cmd: np.ndarray, bias_md: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...
    def rotate(self, x: np.ndarray, positions: np.ndarray, num_positions: int) -> np.ndarray: ...
    def time_embedding(self, time: np.ndarray, width: int) -> np.ndarray: ...
    def gelu(self, x: np.ndarray) -> np.ndarray: ...
    def embed(self, weight: np.ndarray, tokens: np.ndarray) -> np.ndarray: ...
    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, valid: np.ndarray) -> np.ndarray: ...
    def attention_gradients(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, valid: np.ndarray, cotangent: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]: ...


def units(backend: str, dtype: str) -> Units:
    """The operations of `backend`; their names are the layers' and attention's own, so a renamed one is an error here."""
    return _Operations(*{"jax": _jax, "torch": _torch}[backend](dtype))


class _Operations:
    def __init__(self, layers: Any, attention: Callable, to: Callable, back: Callable, set_params: Callable, vjp: Callable, scope: Callable):
        self._layers, self._attention, self._to, self._back = layers, attention, to, back
        self._set, self._vjp, self._scope = set_params, vjp, scope

    def rms_norm(self, x, scale):
        return self._module(self._layers.RMSNorm, (x.shape[-1],), {"scale": scale}, x, None)[0]

    def layer_norm(self, x, scale, bias):
        return self._module(self._layers.LayerNorm, (x.shape[-1],), {"scale": scale, "bias": bias}, x)

    def ada_rms_norm(self, x, cond, weight_cmd, bias_md):
        params = {"modulation.weight": weight_cmd.reshape(weight_cmd.shape[0], -1), "modulation.bias": bias_md.reshape(-1)}
        return self._module(self._layers.AdaRMSNorm, (x.shape[-1], cond.shape[-1]), params, x, cond)

    def embed(self, weight, tokens):
        return self._module(self._layers.Embedding, weight.shape, {"weight": weight}, tokens)

    def rotate(self, x, positions, num_positions):
        def run(x, positions):
            return self._layers.rotate(x, self._layers.rotation(positions, x.shape[-1], num_positions, x.dtype))

        return self._call(run, x, positions)

    def time_embedding(self, time, width):
        return self._call(lambda time: self._layers.time_embedding(time, width), time)

    def gelu(self, x):
        return self._call(self._layers.gelu, x)

    def attention(self, q, k, v, valid):
        return self._call(self._attention, q, k, v, valid)

    def attention_gradients(self, q, k, v, valid, cotangent):
        with self._scope():
            out, gradients = self._vjp(lambda q, k, v: self._attention(q, k, v, self._to(valid)), [self._to(x) for x in (q, k, v)], self._to(cotangent))
            return self._back(out), {f"d{name}": self._back(gradient) for name, gradient in zip("qkv", gradients, strict=True)}

    def _module(self, kind, sizes, params, *inputs):
        with self._scope():
            module = kind(*sizes)
            self._set(module, params)
            return self._numpy(module(*(None if x is None else self._to(x) for x in inputs)))

    def _call(self, function, *inputs):
        with self._scope():
            return self._numpy(function(*(self._to(x) for x in inputs)))

    def _numpy(self, out):
        return tuple(None if x is None else self._back(x) for x in out) if isinstance(out, tuple) else self._back(out)


def _jax(dtype: str) -> tuple:
    import jax
    import jax.numpy as jnp

    from pi05.jax_backend import attention, layers

    def to(x: np.ndarray):
        return jnp.array(x, dtype) if x.dtype.kind == "f" else jnp.array(x)

    def set_params(module, params):
        for path, value in params.items():
            *parents, leaf = path.split(".")
            owner = functools.reduce(getattr, parents, module)
            setattr(owner, leaf, type(getattr(owner, leaf))(to(value)))

    def vjp(function, inputs, cotangent):
        out, pull = jax.vjp(function, *inputs)
        return out, pull(cotangent)

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with jax.enable_x64(dtype == "float64"):
            yield

    return layers, attention.attention, to, np.asarray, set_params, vjp, scope


def _torch(dtype: str) -> tuple:
    import torch

    from pi05.torch_backend import attention, layers

    def to(x: np.ndarray):
        return torch.tensor(x, dtype=getattr(torch, dtype)) if x.dtype.kind == "f" else torch.tensor(x)

    def set_params(module, params):
        for path, value in params.items():
            owner, _, leaf = path.rpartition(".")
            value = to(value).T if path == "modulation.weight" else to(value)
            setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(value))

    def vjp(function, inputs, cotangent):
        inputs = [x.requires_grad_() for x in inputs]
        out = function(*inputs)
        return out, torch.autograd.grad(out, inputs, cotangent)

    return layers, attention.attention, to, lambda x: x.detach().cpu().numpy(), set_params, vjp, contextlib.nullcontext
