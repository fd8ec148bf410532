"""Grouped matmul for TPUs (Mosaic): rows sorted by group, each group with a feature-major matrix of its own.

XLA has a kernel for lax.ragged_dot, but for matrices that lie the other way: it first transposes all
of them, in HBM, at each call. The work list is that of MegaBlocks (arXiv 2211.15841): a visit for
each group in each block of rows, so that groups need no padding.

Dims: M rows, E groups, D inputs, F outputs, V visits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels.tuning import tuned

_MIN_ROWS, _MAX_ROWS = 16, 512


def block_sizes(
    num_rows: int, num_groups: int, num_inputs: int, num_outputs: int
) -> tuple[int, int, int] | None:
    """Rows, inputs and outputs of a block where none are tuned, or None where the shape does not divide."""
    rows = _MIN_ROWS
    while rows < _MAX_ROWS and rows * num_groups < num_rows:
        rows *= 2
    inputs = next((n for n in (2048, 1024, 512, 256, 128) if num_inputs % n == 0), None)
    outputs = next((n for n in (512, 256, 128) if num_outputs % n == 0), None)
    return None if inputs is None or outputs is None else (rows, inputs, outputs)


def grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """See `matmul.grouped_matmul`.

    Raises:
      ValueError: the shape does not divide into blocks.
    """
    num_rows, num_inputs = lhs.shape
    num_groups, num_outputs, _ = rhs.shape
    sizes = block_sizes(num_rows, num_groups, num_inputs, num_outputs)
    if sizes is None:
        raise ValueError(f"rhs{rhs.shape} must have multiples of 128 as its last two sizes for backend='tpu'")
    rows, inputs, outputs = sizes
    key = f"{num_groups}x{num_inputs}x{num_outputs} {lhs.dtype.name} rows {rows}"
    outputs = tuned("grouped_matmul", key).get("outputs", outputs)
    padded = jnp.pad(lhs, ((0, -num_rows % rows), (0, 0)))
    num_visits, *work = _visits(group_sizes, rows, padded.shape[0] // rows)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(num_outputs // outputs, num_visits, num_inputs // inputs),
        in_specs=[
            pl.BlockSpec((rows, inputs), lambda j, v, k, groups, blocks, ends: (blocks[v], k)),
            pl.BlockSpec((None, outputs, inputs), lambda j, v, k, groups, blocks, ends: (groups[v], j, k)),
        ],
        out_specs=pl.BlockSpec((rows, outputs), lambda j, v, k, groups, blocks, ends: (blocks[v], j)),
        scratch_shapes=[pltpu.VMEM((rows, outputs), jnp.float32)],
    )
    out = pl.pallas_call(
        functools.partial(_kernel, num_steps=num_inputs // inputs),
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], num_outputs), lhs.dtype),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="grouped_matmul",
    )(*work, padded, rhs)[:num_rows]
    # Blocks without a group's rows are never visited, and hold what was there before.
    return jnp.where((jnp.arange(num_rows) < group_sizes.sum())[:, None], out, 0)


def _visits(
    group_sizes: jax.Array, rows: int, num_blocks: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """How many visits; the group of each [V] and its block of rows [V]; and where groups end [E + 1]."""
    num_groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    first = (ends - group_sizes) // rows
    counts = jnp.where(group_sizes > 0, (ends - 1) // rows - first + 1, 0)
    most = num_blocks + num_groups
    groups = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), counts, total_repeat_length=most)
    within = jnp.arange(most) - (jnp.cumsum(counts) - counts)[groups]
    blocks = jnp.clip(first[groups] + within, 0, num_blocks - 1)
    return counts.sum(), groups, blocks.astype(jnp.int32), jnp.pad(ends, (1, 0)).astype(jnp.int32)


def _kernel(
    groups: jax.Ref,
    blocks: jax.Ref,
    ends: jax.Ref,
    lhs_ref: jax.Ref,
    rhs_ref: jax.Ref,
    out_ref: jax.Ref,
    sum_ref: jax.Ref,
    *,
    num_steps: int,
) -> None:
    visit, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    precision = jax.lax.Precision.HIGHEST if lhs_ref.dtype == jnp.float32 else None
    sum_ref[...] += jax.lax.dot_general(
        lhs_ref[...],
        rhs_ref[...],
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=precision,
    )

    @pl.when(step == num_steps - 1)
    def _() -> None:
        group, block = groups[visit], blocks[visit]
        row = block * sum_ref.shape[0] + jax.lax.broadcasted_iota(jnp.int32, sum_ref.shape, 0)
        own = (row >= ends[group]) & (row < ends[group + 1])
        # The block's rows of groups visited before this one stay as they are.
        out_ref[...] = jnp.where(own, sum_ref[...].astype(out_ref.dtype), out_ref[...])
