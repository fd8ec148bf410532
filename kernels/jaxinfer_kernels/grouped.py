"""Grouped matmul in XLA: rows sorted by group, each group with a matrix of its own (experts).

Dims: M rows, E groups, D inputs, F outputs, B rows of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """See `api.grouped_matmul`. On TPUs XLA has an instruction for it."""
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
    )
    out = jax.lax.ragged_dot_general(lhs, rhs, group_sizes, dims, preferred_element_type=jnp.float32)
    return out.astype(lhs.dtype)


def blocked_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """See `api.grouped_matmul`. A loop over blocks of B rows of one group, where XLA has no instruction.

    Without one it multiplies all rows by all matrices (lax.ragged_dot on the CPU): E times the work.
    A block may reach into the next group's rows; what it writes there is written over by theirs.
    """
    num_rows, num_groups = lhs.shape[0], rhs.shape[0]
    block = block_rows(num_rows, num_groups)
    most = -(-num_rows // block) + num_groups  # blocks, the last of each group partly filled
    blocks = -(-group_sizes // block)
    starts = jnp.cumsum(group_sizes) - group_sizes
    groups = jnp.repeat(jnp.arange(num_groups), blocks, total_repeat_length=most)
    within = jnp.arange(most) - (jnp.cumsum(blocks) - blocks)[groups]
    first_rows = starts[groups] + within * block
    padded = jnp.pad(lhs, ((0, block), (0, 0)))

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        first = first_rows[index]
        rows = jax.lax.dynamic_slice_in_dim(padded, first, block)
        matrix = jax.lax.dynamic_index_in_dim(rhs, groups[index], keepdims=False)
        product = jax.lax.dot_general(
            rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), first, 0)

    out = jnp.zeros((num_rows + block, rhs.shape[1]), lhs.dtype)
    out = jax.lax.fori_loop(0, blocks.sum(), body, out)[:num_rows]
    return jnp.where((jnp.arange(num_rows) < group_sizes.sum())[:, None], out, 0)


def block_rows(num_rows: int, num_groups: int) -> int:
    """B: a power of two near the rows of a group, so that few rows are multiplied for nothing."""
    block = 1
    while block < 128 and block * num_groups < num_rows:
        block *= 2
    return block
