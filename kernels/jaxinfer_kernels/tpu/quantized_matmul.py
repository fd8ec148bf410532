"""Matmul with int4 weights in groups, for TPUs (Mosaic).

XLA writes such weights to HBM once they are expanded, since the scales vary along the inputs. Here
each block of them is expanded in VMEM, once for all rows of a block, and multiplied at once.

Dims: M rows, D inputs, F outputs, G inputs of a group.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels.tuning import tuned

_SUBLANES = 8  # of a float32 tile: a block takes so many rows of scales, or all
_MAX_ROWS = 512
_MAX_BLOCK = 1024  # inputs, and outputs, of a block


def block_sizes(num_rows: int, num_inputs: int, num_outputs: int, group: int) -> tuple[int, int, int] | None:
    """Rows, inputs and outputs of a block where none are tuned, or None where the shape does not divide."""
    rows = min(-(-num_rows // 16) * 16, _MAX_ROWS)
    inputs = next((n for n in (1024, 512, 256) if num_inputs % n == 0 and n % (_SUBLANES * group) == 0), None)
    if inputs is None and num_inputs <= 2 * _MAX_BLOCK and num_inputs % 128 == 0:
        inputs = num_inputs
    outputs = next((n for n in (512, 256, 128) if num_outputs % n == 0), None)
    if inputs is None or outputs is None or group % 32:
        return None
    return rows, inputs, outputs


def in_groups(lhs: jax.Array, weights: jax.Array, scales: jax.Array, *, interpret: Any = False) -> jax.Array:
    """See `quantized.in_groups`: lhs [M, D], int4 weights [D, F], scales [D / G, F] -> [M, F].

    Raises:
      ValueError: the shape does not divide into blocks.
    """
    num_rows, num_inputs = lhs.shape
    num_groups, num_outputs = scales.shape
    sizes = block_sizes(num_rows, num_inputs, num_outputs, num_inputs // num_groups)
    if sizes is None:
        raise ValueError(
            f"weights{weights.shape} with scales{scales.shape} must divide into blocks: outputs a multiple "
            f"of 128; inputs one of {_SUBLANES} groups of 32, 64 or 128 each, or at most {2 * _MAX_BLOCK}"
        )
    rows, inputs, outputs = sizes
    key = f"{num_inputs}x{num_outputs} group {num_inputs // num_groups} {lhs.dtype.name}"
    outputs = tuned("int4_matmul", key).get("outputs", outputs)
    padded = jnp.pad(lhs, ((0, -num_rows % rows), (0, 0)))
    kernel = pl.pallas_call(
        functools.partial(_kernel, num_steps=num_inputs // inputs),
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], num_outputs), lhs.dtype),
        grid=(padded.shape[0] // rows, num_outputs // outputs, num_inputs // inputs),
        in_specs=[
            pl.BlockSpec((rows, inputs), lambda i, j, k: (i, k)),
            pl.BlockSpec((inputs, outputs), lambda i, j, k: (k, j)),
            pl.BlockSpec((inputs * num_groups // num_inputs, outputs), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((rows, outputs), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, outputs), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="int4_matmul",
    )
    return kernel(padded, weights, scales)[:num_rows]


def _kernel(
    lhs_ref: jax.Ref,
    weights_ref: jax.Ref,
    scales_ref: jax.Ref,
    out_ref: jax.Ref,
    sum_ref: jax.Ref,
    *,
    num_steps: int,
) -> None:
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    inputs, outputs = weights_ref.shape
    wide = weights_ref[...].astype(jnp.float32).reshape(scales_ref.shape[0], -1, outputs)
    wide = (wide * scales_ref[...][:, None]).reshape(inputs, outputs).astype(lhs_ref.dtype)
    precision = jax.lax.Precision.HIGHEST if lhs_ref.dtype == jnp.float32 else None
    sum_ref[...] += jnp.dot(lhs_ref[...], wide, preferred_element_type=jnp.float32, precision=precision)

    @pl.when(step == num_steps - 1)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)
