"""Which parts of its sequences decode attends to at once, and how their results are joined.

Splits (Dao et al., Flash-Decoding, 2023) start at multiples of their size from the first visible
tile, and their size follows from the visible length alone: results do not depend on the batch.

Dims: R sequences, N query heads, K kv heads, S splits a sequence at most, I = R * S splits in all, B blocks
of n queries that attend to pages together, V columns of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer_kernels.gpu.common import LOG2E, MASKED, Visibility

MAX_SPLITS = 16
MIN_SPLIT_TOKENS = 512  # the results of smaller ones are too large a part of what is moved


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkList:
    """Splits in the order of their sequences; the first `num_items` count. Positions are the sequence's."""

    num_items: jax.Array  # [1] i32
    row: jax.Array  # [I] i32
    begin: jax.Array  # [I] i32, a multiple of the tile
    end: jax.Array  # [I] i32, a multiple of the tile or the sequence's length
    first_item: jax.Array  # [R] i32
    num_splits: jax.Array  # [R] i32; 0 for a row of padding


def make_work_list(
    kv_len: jax.Array,
    max_tokens: int,
    visibility: Visibility,
    tile_tokens: int,
    *,
    max_splits: int = MAX_SPLITS,
    min_split_tokens: int = MIN_SPLIT_TOKENS,
) -> WorkList:
    """Splits the visible part of each sequence of kv_len [R] positions, max_tokens of them at most.

    A split starts at a multiple of tile_tokens and is min_split_tokens positions, doubled until max_splits
    of them hold the visible part.
    """
    visible_limit = min(max_tokens, visibility.limit(max_tokens) + tile_tokens - 1)
    first = visibility.first(jnp.maximum(kv_len - 1, 0)) // tile_tokens * tile_tokens
    visible = kv_len - first
    size = min_split_tokens
    sizes = jnp.full_like(kv_len, size)
    while size * max_splits < visible_limit:
        sizes = jnp.where(visible > size * max_splits, 2 * size, sizes)
        size *= 2
    num_splits = (visible + sizes - 1) // sizes  # 0 where the length is 0
    ends = jnp.cumsum(num_splits)
    items = jnp.arange(kv_len.shape[0] * min(max_splits, -(-visible_limit // min_split_tokens)))
    row = jnp.searchsorted(ends, items, side="right", method="compare_all")
    row = jnp.minimum(row, kv_len.shape[0] - 1).astype(jnp.int32)
    first_item = ends - num_splits
    begin = (first[row] + (items - first_item[row]) * sizes[row]).astype(jnp.int32)
    end = jnp.minimum(begin + sizes[row], kv_len[row])
    return WorkList(ends[-1:], row, begin, end, first_item, num_splits)


def merge_splits(
    partial_out: jax.Array, partial_lse: jax.Array, work: WorkList, sinks: jax.Array | None, q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Joins each sequence's splits, one after the other so that the sum's order is fixed.

    Args:
      partial_out: [I, B, N / B, V] f32, each split's own softmax applied.
      partial_lse: [I, B, n] f32, base 2.
      work: the splits.
      sinks: [N] logits that take weight and give no value, or None.
      q: [R, N, E], for the shape and dtype of the outputs; E of V count.

    Returns:
      [R, N, E] outputs, zeros in rows of padding, and natural log-sum-exps [R, N].
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = partial_out.shape[1]
    group = num_heads // num_kv_heads
    partial_out = partial_out[..., :head_dim]
    splits = range(partial_out.shape[0] // num_rows)
    used = [(split < work.num_splits)[:, None, None] for split in splits]
    items = [jnp.where(split < work.num_splits, work.first_item + split, 0) for split in splits]
    lses = [jnp.where(used[s], partial_lse[items[s], :, :group], MASKED) for s in splits]  # [R, K, G]
    maximum = jnp.stack(lses).max(0)
    total = jnp.zeros_like(maximum)
    if sinks is not None:
        sink = (sinks.astype(jnp.float32) * LOG2E).reshape(num_kv_heads, group)
        maximum = jnp.maximum(maximum, sink)
        total = jnp.exp2(sink - maximum)
    out = jnp.zeros((num_rows, num_kv_heads, group, head_dim), jnp.float32)
    for split in splits:
        weight = jnp.where(used[split], jnp.exp2(lses[split] - maximum), 0)
        total += weight
        # Where, since what no split has written may be NaN.
        out += jnp.where(used[split][..., None], weight[..., None] * partial_out[items[split]], 0)
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    lse = (maximum + jnp.log2(total)) / LOG2E
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(num_rows, num_heads)
