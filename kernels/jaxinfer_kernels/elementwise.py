"""What stands between the products: norms and rotary embedding. Arguments are checked by name.

Dims: D features, T tokens, N query heads, K key/value heads, H head_dim. Activations are feature-major.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer_kernels.checks import check_add_rms_norm, check_rotate_qkv
from jaxinfer_kernels.cpu import elementwise as cpu
from jaxinfer_kernels.layout import Backend


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, axis: int = 0) -> jax.Array:
    """Root-mean-square norm (arXiv 1910.07467) over an axis, in float32; the result has x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=axis, keepdims=True) + eps)
    weight32 = jnp.moveaxis(weight.astype(jnp.float32).reshape(-1, *(1,) * (x.ndim - 1)), 0, axis)
    return (x32 * scale * weight32).astype(x.dtype)


def add_rms_norm(
    x: jax.Array, delta: jax.Array, weight: jax.Array, *, eps: float, backend: Backend = "xla"
) -> tuple[jax.Array, jax.Array]:
    """What comes between a layer's two halves: the residual stream's sum, and its norm.

    Args:
      x: [D, T] floats.
      delta: the same, of the same dtype.
      weight: [D] float32.
      eps: added to the mean square.
      backend: "cpu" is the C++ kernel, for float32, after `cpu.build.load`.

    Returns:
      x + delta, and its `rms_norm`; [D, T] of x's dtype.

    Raises:
      ValueError: an argument does not fit or the backend does not support it, by the argument's name.
    """
    check_add_rms_norm(x, delta, weight, backend)
    if backend == "cpu":
        return cpu.add_rms_norm(x, delta, weight, eps=eps)
    x = x + delta
    return x, rms_norm(x, weight, eps=eps)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding (arXiv 2104.09864) of x [N, H, T] by the angles whose cos and sin [H / 2, T] are.

    A head's halves are the pairs' first and second members, as Hugging Face stores them.
    """
    halves = x.astype(jnp.float32).reshape(x.shape[0], 2, -1, x.shape[2])
    # [first * cos - second * sin, second * cos + first * sin], without XLA's slow concatenation.
    out = halves * cos + lax.rev(halves, (1,)) * jnp.stack([-sin, sin])
    return out.reshape(x.shape).astype(x.dtype)


def rotate_qkv(
    heads: jax.Array, cos: jax.Array, sin: jax.Array, *, num_kv_heads: int, backend: Backend = "xla"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of one product, of which queries and keys are rotated.

    Args:
      heads: [N + 2K, H, T] floats: those of the queries, the keys and the values.
      cos: [H / 2, T] float32, of each token's angles.
      sin: the same.
      num_kv_heads: K.
      backend: "cpu" is the C++ kernel, for float32, after `cpu.build.load`.

    Returns:
      q [N, H, T], k [K, H, T] and v [K, H, T] in heads' dtype.

    Raises:
      ValueError: an argument does not fit or the backend does not support it, by the argument's name.
    """
    check_rotate_qkv(heads, cos, sin, num_kv_heads, backend)
    if backend == "cpu":
        return cpu.rotate_qkv(heads, cos, sin, num_kv_heads=num_kv_heads)
    num_heads = heads.shape[0] - 2 * num_kv_heads
    q, k, v = jnp.split(heads, (num_heads, num_heads + num_kv_heads))
    return rotate(q, cos, sin), rotate(k, cos, sin), v
