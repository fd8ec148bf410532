"""Grouped matmul in XLA: rows sorted by group, each group with a matrix of its own (experts).

Dims: M rows, E groups, D inputs, F outputs, B rows of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CPU_TILE_BYTES = 1 << 20  # so that the copy of a tile stays in a core's cache


def blocked_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tile_bytes: int | None = None
) -> jax.Array:
    """See `matmul.grouped_matmul`. Loops over the groups that have rows, and over blocks of B of their rows.

    Without an instruction XLA multiplies all rows by all matrices (lax.ragged_dot on the CPU): E times
    the work. A block may reach into the next group's rows; what it writes there is written over by theirs.

    Args:
      lhs: as there.
      rhs: as there.
      group_sizes: as there.
      tile_bytes: of a matrix that are multiplied at a time; None is all of it. XLA copies what a loop
        takes of an array: on the CPU a copy that stays in the cache costs half as much.
    """
    num_rows, (num_groups, num_outputs, num_inputs) = lhs.shape[0], rhs.shape
    block = block_rows(num_rows, num_groups)
    tile = num_outputs
    if tile_bytes is not None:
        tile = tile_outputs(num_outputs, tile_bytes // (num_inputs * rhs.dtype.itemsize))
    num_tiles = num_outputs // tile
    tiles = rhs.reshape(num_groups * num_tiles, tile, num_inputs)
    starts = jnp.cumsum(group_sizes) - group_sizes
    used = jnp.nonzero(group_sizes, size=num_groups, fill_value=0)[0]
    padded = jnp.pad(lhs, ((0, block), (0, 0)))

    def multiply_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        group, number = used[index // num_tiles], index % num_tiles
        matrix = jax.lax.dynamic_index_in_dim(tiles, group * num_tiles + number, keepdims=False)

        def multiply_block(index: jax.Array, out: jax.Array) -> jax.Array:
            first = starts[group] + index * block
            rows = jax.lax.dynamic_slice_in_dim(padded, first, block)
            product = jax.lax.dot_general(
                matrix, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            ).T
            return jax.lax.dynamic_update_slice(out, product.astype(out.dtype), (first, number * tile))

        num_blocks = (group_sizes[group] + block - 1) // block
        return jax.lax.fori_loop(0, num_blocks, multiply_block, out)

    out = jnp.zeros((num_rows + block, num_outputs), lhs.dtype)
    out = jax.lax.fori_loop(0, jnp.count_nonzero(group_sizes) * num_tiles, multiply_tile, out)[:num_rows]
    return jnp.where((jnp.arange(num_rows) < group_sizes.sum())[:, None], out, 0)


def tile_outputs(num_outputs: int, most: int) -> int:
    """The largest divisor of `num_outputs` that is at most `most`, or 1."""
    return max(size for size in range(1, num_outputs + 1) if num_outputs % size == 0 and size <= max(most, 1))


def block_rows(num_rows: int, num_groups: int) -> int:
    """B: a power of two near the rows of a group, so that few rows are multiplied for nothing.

    With one row XLA's CPU product is one of a matrix and a vector, and products of 2 and of 4 rows cost
    more than so many of those.
    """
    if num_rows <= 2 * num_groups:
        return 1
    block = 8
    while block < 128 and block * num_groups < num_rows:
        block *= 2
    return block
