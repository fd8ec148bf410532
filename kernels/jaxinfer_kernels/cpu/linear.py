"""The C++ products of weights and activations on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer_kernels.cpu.build import target_name

_FEW_COLUMNS = 8  # as in linear.cc
_PANEL = 32  # the widest panel of columns that a machine has


def linear(weight: jax.Array, x: jax.Array, *, token_major: bool) -> jax.Array:
    """weight [M, K] times x [K, T] -> [M, T], or [T, M] with token_major; all float32."""
    num_out, num_tokens = weight.shape[0], x.shape[1]
    out = _floats(*((num_tokens, num_out) if token_major else (num_out, num_tokens)))
    return jax.ffi.ffi_call(target_name("linear"), (out, _packed(x)))(weight, x, transpose=token_major)[0]


def gated_linear(weight: jax.Array, x: jax.Array, *, activation: str) -> jax.Array:
    """weight [2M, K], gate above up, and x [K, T] -> activation(gate x) * (up x) [M, T]; all float32."""
    out = _floats(weight.shape[0] // 2, x.shape[1])
    call = jax.ffi.ffi_call(target_name("gated_linear"), (out, out, _packed(x)))
    return call(weight, x, gelu=activation == "gelu_pytorch_tanh")[0]


def _packed(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Room for x [K, T] in the kernel's own layout."""
    num_in, num_tokens = x.shape
    return _floats(num_in * (num_tokens if num_tokens <= _FEW_COLUMNS else -(-num_tokens // _PANEL) * _PANEL))


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
