"""The C++ norm and rotary embedding on a CPU; see `jaxinfer_kernels.elementwise`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer_kernels.cpu.build import target_name


def add_rms_norm(
    x: jax.Array, delta: jax.Array, weight: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """x, delta [D, T], weight [D] -> x + delta and its norm, [D, T]; all float32."""
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    # The sum may lie where x did, as the residual stream does.
    call = jax.ffi.ffi_call(target_name("add_rms_norm"), (out, out), input_output_aliases={0: 0})
    total, normed = call(x, delta, weight, eps=np.float32(eps))
    return total, normed


def rotate_qkv(
    heads: jax.Array, cos: jax.Array, sin: jax.Array, *, num_kv_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """heads [N + 2K, H, T], cos, sin [H / 2, T] -> q [N, H, T], k, v [K, H, T]; all float32."""
    num_heads, (head_dim, num_tokens) = heads.shape[0] - 2 * num_kv_heads, heads.shape[1:]
    outs = [
        jax.ShapeDtypeStruct((count, head_dim, num_tokens), jnp.float32)
        for count in (num_heads, num_kv_heads, num_kv_heads)
    ]
    q, k, v = jax.ffi.ffi_call(target_name("rotate_qkv"), outs)(heads, cos, sin)
    return q, k, v
