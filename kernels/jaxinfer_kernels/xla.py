"""Paged attention in plain XLA: what CPUs run, and the check for the other kernels.

Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over tiles of KV positions that start at
multiples of the tile, so that a query's reduction depends on its own sequence alone. The loop's
bounds are those of the step's longest and earliest rows: pages that nobody uses are not read.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer_kernels.layout import AttentionMetadata, QueryTiles, kv_tile_tokens

# Prefill tiles pass in pairs, each with its own bounds: the first rows of a long prompt do not pay for
# the last (13% of a step of 512 tokens), and larger groups save less.
_GROUP = 2
_MASKED = -1e30  # finite, so that a row that sees nothing yet stays free of NaN


def write_kv(kv_pages: jax.Array, k: jax.Array, v: jax.Array, kv_write_index: jax.Array) -> jax.Array:
    """Writes k and v [T, K, H] into pages [num_pages, 2K, page_size, H], in place where donated."""
    page_size = kv_pages.shape[2]
    if kv_write_index.shape[0] == 1:
        # XLA turns a scatter of one index into a slice update before which it copies all the pages.
        kv_write_index, k, v = (jnp.concatenate([x, x]) for x in (kv_write_index, k, v))
    kv = jnp.stack([k, v], axis=2).reshape(k.shape[0], kv_pages.shape[1], k.shape[2])  # [T, 2K, H]
    return kv_pages.at[kv_write_index // page_size, :, kv_write_index % page_size].set(
        kv.astype(kv_pages.dtype), mode="promise_in_bounds"
    )


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.paged_attention`."""
    kv_pages = write_kv(kv_pages, k, v, metadata.kv_write_index)
    attend = partial(_attend, kv_pages, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
    outputs = []
    row = 0
    for tiles in (metadata.decode, metadata.prefill):
        if tiles is None:
            continue
        num_tiles = tiles.start.shape[0]
        num_rows = num_tiles if tiles is metadata.decode else q.shape[0] - row
        queries = q[row : row + num_rows].reshape(num_tiles, num_rows // num_tiles, *q.shape[1:])
        if tiles is metadata.prefill and num_tiles % _GROUP == 0:
            grouped = jax.tree.map(lambda x: x.reshape(-1, _GROUP, *x.shape[1:]), (queries, tiles))
            out = jax.lax.map(lambda group: attend(*group), grouped)
        else:
            out = attend(queries, tiles)
        outputs.append(out.reshape(num_rows, *q.shape[1:]))
        row += num_rows
    return jnp.concatenate(outputs) if len(outputs) > 1 else outputs[0], kv_pages


def _attend(
    kv_pages: jax.Array,
    q: jax.Array,
    tiles: QueryTiles,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """q [R, B, N, H] -> [R, B, N, H]."""
    num_tiles, block, num_heads, head_dim = q.shape
    num_pages, num_kv_rows, page_size, _ = kv_pages.shape
    num_kv_heads = num_kv_rows // 2
    group = num_heads // num_kv_heads
    kv_tile = kv_tile_tokens(page_size)
    pages_a_tile = kv_tile // page_size
    rows = kv_pages.reshape(num_pages * num_kv_rows, page_size * head_dim)
    heads = 2 * jnp.arange(num_kv_heads)[None, :, None]
    positions = tiles.start[:, None] + jnp.arange(block)  # [R, B]

    # [R, K, G * B, H]: one matmul a kv head, whatever the group.
    queries = (q * scale).reshape(num_tiles, block, num_kv_heads, group, head_dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, group * block, head_dim)

    def fetch(row_ids: jax.Array) -> jax.Array:  # [R, K, pages] -> [R, K, kv_tile, H]
        fetched = rows.at[row_ids.reshape(-1)].get(mode="promise_in_bounds").astype(q.dtype)
        return fetched.reshape(num_tiles, num_kv_heads, kv_tile, head_dim)

    def body(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        running_max, total, acc = carry
        page_ids = jax.lax.dynamic_slice_in_dim(tiles.page_table, index * pages_a_tile, pages_a_tile, axis=1)
        row_ids = page_ids[:, None] * num_kv_rows + heads
        kv_positions = index * kv_tile + jnp.arange(kv_tile)
        seen = kv_positions <= positions[..., None]  # [R, B, kv_tile]
        if sliding_window is not None:
            seen &= kv_positions > positions[..., None] - sliding_window
        used = kv_positions < tiles.kv_len[:, None]  # [R, kv_tile]
        seen &= used[:, None]
        logits = jax.lax.dot_general(
            queries, fetch(row_ids), (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(jnp.tile(seen, (1, group, 1))[:, None], logits, _MASKED)
        new_max = jnp.maximum(running_max, logits.max(-1))
        weights = jnp.exp(logits - new_max[..., None])
        rescale = jnp.exp(running_max - new_max)
        # A weight of 0 does not silence a NaN in a page that nobody wrote: the values are masked too.
        values = jnp.where(used[:, None, :, None], fetch(row_ids + 1), 0)
        weighted = jax.lax.dot_general(
            weights.astype(q.dtype),
            values,
            (((3,), (2,)), ((0, 1), (0, 1))),
            preferred_element_type=jnp.float32,
        )
        return new_max, total * rescale + weights.sum(-1), acc * rescale[..., None] + weighted

    shape = (num_tiles, num_kv_heads, group * block)
    init = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    first = jnp.int32(0)
    if sliding_window is not None:
        earliest = jnp.where(tiles.kv_len > 0, tiles.start - sliding_window + 1, jnp.iinfo(jnp.int32).max)
        first = jnp.clip(earliest.min(), 0) // kv_tile
    last = (tiles.kv_len.max() + kv_tile - 1) // kv_tile
    _, total, acc = jax.lax.fori_loop(first, last, body, init)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    out = out.reshape(num_tiles, num_kv_heads, group, block, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(num_tiles, block, num_heads, head_dim).astype(q.dtype)
