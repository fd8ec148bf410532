"""Paged attention in plain XLA: what CPUs run, and the check for the other kernels.

Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over tiles of KV positions that start at
multiples of the tile, so that a query's reduction depends on its own sequence alone. The loop's
bounds are those of the step's longest and earliest rows: pages that nobody uses are not read.

Dims as in layout.py.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer_kernels.layout import AttentionMetadata, KVPages, QueryTiles, first_seen, kv_tile_tokens
from jaxinfer_kernels.quantize import quantize

# Prefill tiles pass in pairs, each with its own bounds: the first rows of a long prompt do not pay for
# the last (13% of a step of 512 tokens), and larger groups save less.
_GROUP = 2
_MASKED = -1e30  # finite, so that a row that sees nothing yet stays free of NaN


def write_kv(kv_pages: KVPages, k: jax.Array, v: jax.Array, kv_write_index: jax.Array) -> KVPages:
    """Writes k and v [T, K, H] into the pages, in place where they are donated; quantises where they are."""
    num_rows, page_size = kv_pages.data.shape[1], kv_pages.page_size
    if kv_write_index.shape[0] == 1:
        # XLA turns a scatter of one index into a slice update before which it copies all the pages.
        kv_write_index, k, v = (jnp.concatenate([x, x]) for x in (kv_write_index, k, v))
    kv = jnp.stack([k, v], axis=2).reshape(k.shape[0], num_rows, k.shape[2])  # [T, 2K, H]
    at = (kv_write_index // page_size, slice(None), kv_write_index % page_size)
    scales = kv_pages.scales
    if scales is not None:
        kv, new_scales = quantize(kv, kv_pages.dtype)
        scales = scales.at[at].set(new_scales, mode="promise_in_bounds")
    stored = jax.lax.bitcast_convert_type(kv.astype(kv_pages.dtype), kv_pages.data.dtype)
    return KVPages(kv_pages.data.at[at].set(stored, mode="promise_in_bounds"), scales)


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    sinks: jax.Array | None,
    *,
    scale: float,
    sliding_window: int | None,
    attention_chunk: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """See `api.paged_attention`: outputs [T, N, H], log-sum-exps [T, N] and the pages."""
    kv_pages = write_kv(kv_pages, k, v, metadata.kv_write_index)
    attend = partial(
        _attend,
        kv_pages,
        scale=scale,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    outputs, lses = [], []
    row = 0
    for tiles in (metadata.decode, metadata.prefill):
        if tiles is None:
            continue
        num_tiles = tiles.start.shape[0]
        num_rows = num_tiles if tiles is metadata.decode else q.shape[0] - row
        queries = q[row : row + num_rows].reshape(num_tiles, num_rows // num_tiles, *q.shape[1:])
        if tiles is metadata.prefill and num_tiles % _GROUP == 0:
            grouped = jax.tree.map(lambda x: x.reshape(-1, _GROUP, *x.shape[1:]), (queries, tiles))
            out, lse = jax.lax.map(lambda group: attend(*group), grouped)
        else:
            out, lse = attend(queries, tiles)
        outputs.append(out.reshape(num_rows, *q.shape[1:]))
        lses.append(lse.reshape(num_rows, q.shape[1]))
        row += num_rows
    return jnp.concatenate(outputs), jnp.concatenate(lses), kv_pages


def _attend(
    kv_pages: KVPages,
    q: jax.Array,
    tiles: QueryTiles,
    *,
    scale: float,
    sliding_window: int | None,
    attention_chunk: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """q [R, B, N, H] -> outputs [R, B, N, H] and log-sum-exps [R, B, N]."""
    num_tiles, block, num_heads, head_dim = q.shape
    num_pages, num_kv_rows, page_size, _ = kv_pages.data.shape
    num_kv_heads = num_kv_rows // 2
    group = num_heads // num_kv_heads
    kv_tile = kv_tile_tokens(page_size)
    pages_a_tile = kv_tile // page_size
    rows = kv_pages.data.reshape(num_pages * num_kv_rows, page_size * head_dim)
    scale_rows = None
    if kv_pages.scales is not None:
        scale_rows = kv_pages.scales.reshape(num_pages * num_kv_rows, page_size)
    heads = 2 * jnp.arange(num_kv_heads)[None, :, None]
    positions = tiles.start[:, None] + jnp.arange(block)  # [R, B]
    bounded = sliding_window is not None or attention_chunk is not None

    # [R, K, G * B, H]: one matmul a kv head, whatever the group.
    queries = (q * scale).reshape(num_tiles, block, num_kv_heads, group, head_dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, group * block, head_dim)

    def fetch(row_ids: jax.Array) -> jax.Array:  # [R, K, pages] -> [R, K, kv_tile, H]
        fetched = rows.at[row_ids.reshape(-1)].get(mode="promise_in_bounds")
        fetched = jax.lax.bitcast_convert_type(fetched, kv_pages.dtype).astype(q.dtype)
        return fetched.reshape(num_tiles, num_kv_heads, kv_tile, head_dim)

    def fetch_scales(scale_rows: jax.Array, row_ids: jax.Array) -> jax.Array:  # -> [R, K, 1, kv_tile]
        fetched = scale_rows.at[row_ids.reshape(-1)].get(mode="promise_in_bounds")
        return fetched.reshape(num_tiles, num_kv_heads, 1, kv_tile)

    def body(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        running_max, total, acc = carry
        page_ids = jax.lax.dynamic_slice_in_dim(tiles.page_table, index * pages_a_tile, pages_a_tile, axis=1)
        row_ids = page_ids[:, None] * num_kv_rows + heads
        kv_positions = index * kv_tile + jnp.arange(kv_tile)
        seen = kv_positions <= positions[..., None]  # [R, B, kv_tile]
        if bounded:
            seen &= kv_positions >= first_seen(positions, sliding_window, attention_chunk)[..., None]
        used = kv_positions < tiles.kv_len[:, None]  # [R, kv_tile]
        seen &= used[:, None]
        logits = jax.lax.dot_general(
            queries, fetch(row_ids), (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
        )
        if scale_rows is not None:
            logits = logits * fetch_scales(scale_rows, row_ids)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(jnp.tile(seen, (1, group, 1))[:, None], logits, _MASKED)
        new_max = jnp.maximum(running_max, logits.max(-1))
        weights = jnp.exp(logits - new_max[..., None])
        rescale = jnp.exp(running_max - new_max)
        total = total * rescale + weights.sum(-1)
        # A weight of 0 does not silence a NaN in a page that nobody wrote: the values are masked too.
        values = jnp.where(used[:, None, :, None], fetch(row_ids + 1), 0)
        if scale_rows is not None:
            weights = weights * jnp.where(used[:, None, None], fetch_scales(scale_rows, row_ids + 1), 0)
        weighted = jax.lax.dot_general(
            weights.astype(q.dtype),
            values,
            (((3,), (2,)), ((0, 1), (0, 1))),
            preferred_element_type=jnp.float32,
        )
        return new_max, total, acc * rescale[..., None] + weighted

    shape = (num_tiles, num_kv_heads, group * block)
    running_max, total = jnp.full(shape, _MASKED), jnp.zeros(shape)
    if sinks is not None:  # as a position that is seen first and whose value is 0
        of_rows = jnp.repeat(sinks.reshape(num_kv_heads, group), block, axis=1)
        running_max, total = jnp.broadcast_to(of_rows.astype(jnp.float32), shape), jnp.ones(shape)
    first = jnp.int32(0)
    if bounded:
        earliest = first_seen(tiles.start, sliding_window, attention_chunk)
        first = jnp.where(tiles.kv_len > 0, earliest, jnp.iinfo(jnp.int32).max).min() // kv_tile
    last = (tiles.kv_len.max() + kv_tile - 1) // kv_tile
    init = (running_max, total, jnp.zeros((*shape, head_dim)))
    running_max, total, acc = jax.lax.fori_loop(first, last, body, init)

    def by_query(x: jax.Array) -> jax.Array:  # [R, K, G * B, ...] -> [R, B, N, ...]
        x = x.reshape(num_tiles, num_kv_heads, group, block, *x.shape[3:])
        return jnp.moveaxis(x, 3, 1).reshape(num_tiles, block, num_heads, *x.shape[4:])

    total = jnp.maximum(total, 1e-30)
    return by_query(acc / total[..., None]).astype(q.dtype), by_query(running_max + jnp.log(total))
