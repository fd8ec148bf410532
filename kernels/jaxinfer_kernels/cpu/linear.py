"""The C++ product of weights and activations on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer_kernels.cpu.build import target_name

_FEW_COLUMNS = 8  # as in linear.cc
_PANEL = 32  # the widest panel of columns that a machine has


def linear(weight: jax.Array, x: jax.Array, *, token_major: bool) -> jax.Array:
    """weight [M, K] times x [K, T] -> [M, T], or [T, M] with token_major; all float32."""
    (num_out, num_in), num_columns = weight.shape, x.shape[1]
    columns = num_columns if num_columns <= _FEW_COLUMNS else -(-num_columns // _PANEL) * _PANEL
    shape = (num_columns, num_out) if token_major else (num_out, num_columns)
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    packed = jax.ShapeDtypeStruct((num_in * columns,), jnp.float32)  # the kernel's scratch
    return jax.ffi.ffi_call(target_name("linear"), (out, packed))(weight, x, transpose=token_major)[0]
