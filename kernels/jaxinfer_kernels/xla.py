"""Paged attention in plain XLA: what CPUs run, and the check for the other kernels.

Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over tiles of KV positions that start at
multiples of the tile, so that a query's reduction depends on its own sequence alone. The loop's
bounds are those of the step's longest and earliest rows: pages that nobody uses are not read.

Dims as in layout.py; V elements of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer_kernels.layout import (
    AttentionMetadata,
    KVPages,
    QueryTiles,
    decode_tile_tokens,
    first_seen,
    kv_tile_tokens,
)
from jaxinfer_kernels.quantize import quantize

# Prefill tiles pass in pairs, each with its own bounds: the first rows of a long prompt do not pay for
# the last (13% of a step of 512 tokens), and larger groups save less.
_GROUP = 2
_MASKED = -1e30  # finite, so that a row that sees nothing yet stays free of NaN

# Attends with queries [R, B, N, H]: outputs [R, B, N, V] and log-sum-exps [R, B, N].
_Attend = Callable[[jax.Array, QueryTiles], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class _Options:
    """What all of an op's tiles have in common; see `api.paged_attention`."""

    scale: float
    sliding_window: int | None = None
    attention_chunk: int | None = None
    soft_cap: float | None = None

    @property
    def bounded(self) -> bool:
        """Whether a query may not see all that came before it."""
        return self.sliding_window is not None or self.attention_chunk is not None

    def first_seen(self, positions: jax.Array) -> jax.Array:
        return first_seen(positions, self.sliding_window, self.attention_chunk)


@dataclass(frozen=True)
class _Tile:
    """Keys and values of one tile of positions, S of them."""

    keys: jax.Array  # [R, K, S, H]
    values: jax.Array  # [R, K, S, V]
    key_scales: jax.Array | None = None  # [R, K, 1, S]
    value_scales: jax.Array | None = None


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
    num_kv_heads, head_dim = k.shape[1:]
    kv = jnp.stack([k, v], axis=2).reshape(k.shape[0], 2 * num_kv_heads, head_dim)
    kv_pages = write_rows(kv_pages, kv, metadata.kv_write_index)
    options = _Options(scale, sliding_window, attention_chunk, soft_cap)

    def fetch(page_ids: jax.Array) -> _Tile:
        row_ids = page_ids[:, None] * 2 * num_kv_heads + 2 * jnp.arange(num_kv_heads)[None, :, None]
        scales = kv_pages.scales
        key_scales = value_scales = None
        if scales is not None:
            key_scales, value_scales = (_fetch_scales(scales, ids) for ids in (row_ids, row_ids + 1))
        keys, values = (_fetch_rows(kv_pages, ids).astype(q.dtype) for ids in (row_ids, row_ids + 1))
        return _Tile(keys, values, key_scales, value_scales)

    def attend(queries: jax.Array, tiles: QueryTiles) -> tuple[jax.Array, jax.Array]:
        return _attend(queries, tiles, fetch, num_kv_heads, head_dim, kv_pages.page_size, options, sinks)

    return *_by_kind(attend, q, metadata), kv_pages


def mla_paged_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> tuple[jax.Array, KVPages]:
    """See `api.mla_paged_attention`: attention with one kv head whose value is the key's latent part."""
    latent_dim = latent.shape[1]
    rows = jnp.concatenate([latent, k_rope], axis=1)[:, None]
    kv_pages = write_rows(kv_pages, rows, metadata.kv_write_index)
    q = jnp.concatenate([q_latent, q_rope], axis=2)

    def fetch(page_ids: jax.Array) -> _Tile:
        keys = _fetch_rows(kv_pages, page_ids[:, None]).astype(q.dtype)
        return _Tile(keys, keys[..., :latent_dim])

    def attend(queries: jax.Array, tiles: QueryTiles) -> tuple[jax.Array, jax.Array]:
        return _attend(queries, tiles, fetch, 1, latent_dim, kv_pages.page_size, _Options(scale), None)

    return _by_kind(attend, q, metadata)[0], kv_pages


def write_rows(kv_pages: KVPages, rows: jax.Array, kv_write_index: jax.Array) -> KVPages:
    """Writes into the pages, in place if they are donated; quantises where they are.

    Args:
      kv_pages: of the xla backend, or the gpu's.
      rows: [T, ...], of a token what the pages have of one position.
      kv_write_index: [T].
    """
    page_size = kv_pages.page_size
    if kv_write_index.shape[0] == 1:
        # XLA turns a scatter of one index into a slice update before which it copies all the pages.
        kv_write_index, rows = (jnp.concatenate([x, x]) for x in (kv_write_index, rows))
    at = (kv_write_index // page_size, slice(None), kv_write_index % page_size)
    scales = kv_pages.scales
    if scales is not None:
        rows, new_scales = quantize(rows, kv_pages.dtype)
        scales = scales.at[at].set(new_scales.reshape(len(rows), -1), mode="promise_in_bounds")
    stored = jax.lax.bitcast_convert_type(rows.astype(kv_pages.dtype), kv_pages.data.dtype)
    return KVPages(kv_pages.data.at[at].set(stored, mode="promise_in_bounds"), scales)


def _fetch_rows(kv_pages: KVPages, row_ids: jax.Array) -> jax.Array:
    """Rows [R, K, pages] of the pool, page by page -> [R, K, S, H]."""
    num_pages, num_rows, page_size, head_dim = kv_pages.data.shape
    # Only leading dimensions are merged: a TPU, whose tiles span the last two, would copy all pages else.
    rows = kv_pages.data.reshape(num_pages * num_rows, page_size, head_dim)
    fetched = rows.at[row_ids.reshape(-1)].get(mode="promise_in_bounds")
    fetched = jax.lax.bitcast_convert_type(fetched, kv_pages.dtype)
    return fetched.reshape(*row_ids.shape[:2], -1, head_dim)


def _fetch_scales(scales: jax.Array, row_ids: jax.Array) -> jax.Array:
    """Rows [R, K, pages] -> [R, K, 1, S]."""
    rows = scales.reshape(-1, scales.shape[2])
    fetched = rows.at[row_ids.reshape(-1)].get(mode="promise_in_bounds")
    return fetched.reshape(*row_ids.shape[:2], 1, -1)


def _by_kind(attend: _Attend, q: jax.Array, metadata: AttentionMetadata) -> tuple[jax.Array, jax.Array]:
    """q [T, N, H] in tiles, decodes and then prefills -> outputs [T, N, V] and log-sum-exps [T, N]."""
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
        outputs.append(out.reshape(num_rows, q.shape[1], out.shape[-1]))
        lses.append(lse.reshape(num_rows, q.shape[1]))
        row += num_rows
    return jnp.concatenate(outputs), jnp.concatenate(lses)


def _attend(
    q: jax.Array,
    tiles: QueryTiles,
    fetch: Callable[[jax.Array], _Tile],
    num_kv_heads: int,
    value_dim: int,
    page_size: int,
    options: _Options,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """q [R, B, N, H]; fetch takes page ids [R, pages] -> outputs [R, B, N, V], log-sum-exps [R, B, N]."""
    num_tiles, block, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    kv_tile = decode_tile_tokens(page_size) if block == 1 else kv_tile_tokens(page_size)
    pages_a_tile = kv_tile // page_size
    page_table = jnp.pad(tiles.page_table, ((0, 0), (0, -tiles.page_table.shape[1] % pages_a_tile)))
    positions = tiles.start[:, None] + jnp.arange(block)  # [R, B]

    # [R, K, G * B, H]: one matmul a kv head, whatever the group.
    queries = (q * options.scale).reshape(num_tiles, block, num_kv_heads, group, head_dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, group * block, head_dim)

    def body(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        page_ids = jax.lax.dynamic_slice_in_dim(page_table, index * pages_a_tile, pages_a_tile, axis=1)
        kv_positions = index * kv_tile + jnp.arange(kv_tile)
        seen = kv_positions <= positions[..., None]  # [R, B, S]
        if options.bounded:
            seen &= kv_positions >= options.first_seen(positions)[..., None]
        used = kv_positions < tiles.kv_len[:, None]  # [R, S]
        seen = jnp.tile(seen & used[:, None], (1, group, 1))[:, None]
        return _add_tile(carry, queries, fetch(page_ids), seen, used, options.soft_cap)

    shape = (num_tiles, num_kv_heads, group * block)
    running_max, total = jnp.full(shape, _MASKED), jnp.zeros(shape)
    if sinks is not None:  # as a position that is seen first and whose value is 0
        of_rows = jnp.repeat(sinks.reshape(num_kv_heads, group), block, axis=1)
        running_max, total = jnp.broadcast_to(of_rows, shape), jnp.ones(shape)
    first = jnp.int32(0)
    if options.bounded:
        earliest = options.first_seen(tiles.start)
        first = jnp.where(tiles.kv_len > 0, earliest, jnp.iinfo(jnp.int32).max).min() // kv_tile
    last = (tiles.kv_len.max() + kv_tile - 1) // kv_tile
    init = (running_max, total, jnp.zeros((*shape, value_dim)))
    running_max, total, acc = jax.lax.fori_loop(first, last, body, init)

    def by_query(x: jax.Array) -> jax.Array:  # [R, K, G * B, ...] -> [R, B, N, ...]
        x = x.reshape(num_tiles, num_kv_heads, group, block, *x.shape[3:])
        return jnp.moveaxis(x, 3, 1).reshape(num_tiles, block, num_heads, *x.shape[4:])

    total = jnp.maximum(total, 1e-30)
    return by_query(acc / total[..., None]).astype(q.dtype), by_query(running_max + jnp.log(total))


def _add_tile(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    queries: jax.Array,
    tile: _Tile,
    seen: jax.Array,
    used: jax.Array,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of the online softmax. queries [R, K, G * B, H], seen [R, 1, G * B, S], used [R, S]."""
    running_max, total, acc = carry
    logits = jax.lax.dot_general(
        queries, tile.keys, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )
    if tile.key_scales is not None:
        logits = logits * tile.key_scales
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(seen, logits, _MASKED)
    new_max = jnp.maximum(running_max, logits.max(-1))
    weights = jnp.exp(logits - new_max[..., None])
    rescale = jnp.exp(running_max - new_max)
    total = total * rescale + weights.sum(-1)
    # A weight of 0 does not silence a NaN in a page that nobody wrote: the values are masked too.
    values = jnp.where(used[:, None, :, None], tile.values, 0)
    if tile.value_scales is not None:
        weights = weights * jnp.where(used[:, None, None], tile.value_scales, 0)
    weighted = jax.lax.dot_general(
        weights.astype(queries.dtype),
        values,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    return new_max, total, acc * rescale[..., None] + weighted
