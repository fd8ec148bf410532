"""Numbers to int4, int8 and float8 with scales, the same in every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

LARGEST = {"int4": 7.0, "int8": 127.0, "float8_e4m3fn": 448.0}  # what a scale maps the largest magnitude to


def quantize(x: jax.Array, dtype: DTypeLike, *, axis: int = -1) -> tuple[jax.Array, jax.Array]:
    """Symmetric quantisation with one scale for all of `axis`, so that values * scale is about x.

    Rounds to nearest, ties to even. The scale is the largest magnitude over LARGEST of the dtype, and
    0 where all are 0.

    Returns:
      The values in `dtype`, and f32 scales in x's shape without `axis`.
    """
    name = jnp.dtype(dtype).name
    largest = LARGEST[name]
    wide = x.astype(jnp.float32)
    # XLA may make products of divisions, so they are written as such: the same bits wherever it runs.
    scale = jnp.abs(wide).max(axis, keepdims=True) * np.float32(1 / largest)
    values = jnp.clip(wide * (1 / jnp.where(scale > 0, scale, 1)), -largest, largest)
    if name.startswith("int"):
        values = jnp.round(values)
    return values.astype(dtype), scale.squeeze(axis)


def quantize_weight(
    weight: jax.Array, dtype: DTypeLike, *, group_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """A weight [F, D] as `matmul.quantized_matmul` takes it.

    Returns:
      [F, D] in `dtype` and scales [F]; with a group size, [D, F] and scales [D / group_size, F].

    Raises:
      ValueError: the groups do not divide the inputs.
    """
    if group_size is None:
        return quantize(weight, dtype)
    num_outputs, num_inputs = weight.shape
    if group_size < 1 or num_inputs % group_size:
        raise ValueError(f"group_size={group_size} must divide the inputs of weight{weight.shape}")
    values, scales = quantize(weight.T.reshape(-1, group_size, num_outputs), dtype, axis=1)
    return values.reshape(num_inputs, num_outputs), scales
