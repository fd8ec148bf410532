"""Ragged paged attention on TPU, in Pallas: `api.paged_attention` and `api.mla_paged_attention` where pages
have the TPU's layout.

Decode rows and prefill tiles each have a kernel, and a step of both runs the one after the other. Each
writes its rows and attends in one call, with the pool aliased in and out.

The ideas and where they come from: pages fetched by hand several blocks ahead (paged attention of the
jax wheel, and Ragged Paged Attention, arXiv 2604.15464), the online softmax (arXiv 1805.02867), and
masks on edge blocks alone (splash attention of the jax wheel). Unlike those, a page's K and V come in
one copy, heads lie apart in it so that a head's rows need no strided loads, and the blocks of the
reduction are multiples of positions of the sequence, whatever the step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer_kernels.layout import AttentionMetadata, KVPages, QueryTiles
from jaxinfer_kernels.quantize import quantize
from jaxinfer_kernels.tpu.attention_decode import decode_attention
from jaxinfer_kernels.tpu.attention_decode_body import DecodeBlocks
from jaxinfer_kernels.tpu.attention_layout import Lanes, pack_kv, pad_lanes
from jaxinfer_kernels.tpu.attention_prefill import prefill_attention
from jaxinfer_kernels.tpu.attention_prefill_body import PrefillBlocks
from jaxinfer_kernels.tpu.attention_softmax import AttentionOptions
from jaxinfer_kernels.tuning import tuned

QUERY_DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
SMALLEST_PAGE = 16  # tokens
TILE_ROWS = 16  # a prefill tile has a multiple

_BUFFER_BYTES = 2 << 20  # of a fetched block: enough to hide a DMA's latency behind the one before
_LARGEST_BUFFER_BYTES = 8 << 20
_SMEM_TABLE_BYTES = 512 << 10  # of page tables, half of SMEM
_LATENT_ROWS = 2048  # query rows of a tile of latent attention, all of which share one head's sums in VMEM


def compute_tokens(kv_token_bytes: int, sliding_window: int | None, attention_chunk: int | None) -> int:
    """c, positions of one pass of the reduction, of a layer. The sums of a sequence depend on it alone.

    512 keep the arithmetic units busy; where a query sees few, less, so that what a block has outside of
    the window is at most an eighth of it (128 are the fewest).
    """
    seen = sliding_window or attention_chunk
    largest = 512 if kv_token_bytes * 512 <= _LARGEST_BUFFER_BYTES else 256
    return next(c for c in (512, 256, 128) if c <= largest and (seen is None or 8 * c <= seen or c == 128))


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
    return_lse: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None, KVPages]:
    """See `api.paged_attention`: outputs [T, N, H], log-sum-exps [T, N] or None, and the pages.

    New rows go where the page tables say; `kv_write_index` says the same and is not read.

    Raises:
      ValueError: a dtype, a page size or a tile that the kernels do not have.
    """
    options = AttentionOptions(scale, sliding_window, attention_chunk, soft_cap)
    new_scales = None
    _check(q, kv_pages, metadata)
    if kv_pages.scales is not None:
        kv, new_scales = quantize(jnp.stack([k, v], axis=2), kv_pages.dtype)  # [T, K, 2, H], [T, K, 2]
        k, v = kv[:, :, 0], kv[:, :, 1]
        new_scales = new_scales.reshape(k.shape[0], -1)
    new_kv = pack_kv(k, v).astype(kv_pages.dtype)
    common: dict[str, Any] = dict(options=options, return_lse=return_lse, interpret=interpret)
    return _attend(q, new_kv, new_scales, kv_pages, metadata, sinks, lanes=Lanes.of(q.shape[2]), **common)


def mla_paged_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    scale: float,
    interpret: Any,
) -> tuple[jax.Array, KVPages]:
    """See `api.mla_paged_attention`: outputs [T, N, R] and the pages.

    All heads' queries are rows of one kv head, too many of which would not fit VMEM: prefill tiles are cut
    into smaller ones, which sees to the same sums.

    Raises:
      ValueError: a dtype, a page size or a tile that the kernels do not have.
    """
    q = jnp.concatenate([q_latent, q_rope], axis=2)
    _check(q, kv_pages, metadata)
    new_kv = pad_lanes(jnp.concatenate([latent, k_rope], axis=1))[:, None].astype(kv_pages.dtype)
    if metadata.prefill is not None:
        tile_rows, num_heads = _tile_rows(q, metadata), q.shape[1]
        fitting = (n for n in (128, 64, 32) if n * num_heads <= _LATENT_ROWS and tile_rows % n == 0)
        rows = next(fitting, TILE_ROWS)
        metadata = replace(metadata, prefill=_cut_tiles(metadata.prefill, rows, tile_rows // rows))
    out, _, kv_pages = _attend(
        q,
        new_kv,
        None,
        kv_pages,
        metadata,
        None,
        lanes=Lanes.of_latent(latent.shape[1], k_rope.shape[1]),
        options=AttentionOptions(scale),
        return_lse=False,
        interpret=interpret,
    )
    return out, kv_pages


def _cut_tiles(tiles: QueryTiles, rows: int, parts: int) -> QueryTiles:
    """So many tiles of so many rows in the place of each."""
    page_table, first, end = (jnp.repeat(x, parts, axis=0) for x in jax.tree.leaves(tiles))
    start = first + rows * jnp.tile(jnp.arange(parts, dtype=jnp.int32), tiles.start.shape[0])
    return QueryTiles(page_table, start, jnp.where(start < end, jnp.minimum(start + rows, end), 0))


def _attend(
    q: jax.Array,
    new_kv: jax.Array,
    new_scales: jax.Array | None,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    sinks: jax.Array | None,
    *,
    options: AttentionOptions,
    interpret: Any,
    **common: Any,
) -> tuple[jax.Array, jax.Array | None, KVPages]:
    """The kernel of each kind of row, one after the other."""
    num_decodes = _num_decodes(metadata)
    common |= dict(options=options, interpret=interpret)
    unrolled = dict(unroll=1) if interpret else {}  # XLA takes long over what Mosaic overlaps
    results = []
    if metadata.decode is not None:
        rows = slice(0, num_decodes)
        out, lse, kv_pages = decode_attention(
            q[rows],
            new_kv[rows],
            None if new_scales is None else new_scales[rows],
            kv_pages,
            metadata.decode,
            sinks,
            blocks=replace(decode_blocks(q, kv_pages, metadata.decode, options), **unrolled),
            **common,
        )
        results.append((out, lse))
    if metadata.prefill is not None:
        rows = slice(num_decodes, None)
        tile_rows = _tile_rows(q, metadata)
        out, lse, kv_pages = prefill_attention(
            q[rows],
            new_kv[rows],
            None if new_scales is None else new_scales[rows],
            kv_pages,
            metadata.prefill,
            sinks,
            blocks=replace(prefill_blocks(q, kv_pages, tile_rows, options), **unrolled),
            **common,
        )
        results.append((out, lse))
    if len(results) == 1:
        return *results[0], kv_pages
    out, lse = jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)
    return out, lse, kv_pages


def _num_decodes(metadata: AttentionMetadata) -> int:
    return 0 if metadata.decode is None else metadata.decode.start.shape[0]


def _tile_rows(q: jax.Array, metadata: AttentionMetadata) -> int:
    """B of a step that has prefill tiles."""
    assert metadata.prefill is not None
    return (q.shape[0] - _num_decodes(metadata)) // metadata.prefill.start.shape[0]


def _check(q: jax.Array, kv_pages: KVPages, metadata: AttentionMetadata) -> None:
    if q.dtype.name not in QUERY_DTYPES:
        raise ValueError(f"q ({q.dtype}) must be one of {', '.join(QUERY_DTYPES)} with backend='tpu'")
    if kv_pages.dtype.name not in KV_DTYPES:
        names = ", ".join(KV_DTYPES)
        raise ValueError(f"kv_pages.data ({kv_pages.dtype}) must be one of {names} with backend='tpu'")
    if kv_pages.page_size < SMALLEST_PAGE:
        raise ValueError(
            f"page_size={kv_pages.page_size} must be at least {SMALLEST_PAGE} with backend='tpu'"
        )
    if kv_pages.scales is not None and 128 % kv_pages.page_size and kv_pages.page_size % 128:
        raise ValueError(
            f"page_size={kv_pages.page_size} must divide 128 or be a multiple of it with backend='tpu' and "
            f"kv_pages.data ({kv_pages.dtype})"
        )
    if metadata.prefill is not None:
        tile = _tile_rows(q, metadata)
        if tile % TILE_ROWS:
            raise ValueError(
                f"metadata.prefill has tiles of {tile} rows, which must be a multiple of {TILE_ROWS} with "
                "backend='tpu'"
            )


def decode_blocks(
    q: jax.Array, kv_pages: KVPages, tiles: QueryTiles, options: AttentionOptions
) -> DecodeBlocks:
    """The decode kernel's block sizes, tuned or by default."""
    sizes = dict(unroll=8) | _block_sizes("paged_attention_decode", q, kv_pages, options)
    table_bytes = 4 * tiles.page_table.shape[1] * 4  # of two steps, each twice, for the one after
    most = max(1, _SMEM_TABLE_BYTES // table_bytes)
    sequences = min(sizes.pop("sequences", 8), 1 << (most.bit_length() - 1))
    return DecodeBlocks(**sizes, sequences=sequences)


def prefill_blocks(
    q: jax.Array, kv_pages: KVPages, tile_rows: int, options: AttentionOptions
) -> PrefillBlocks:
    """The prefill kernel's block sizes, tuned or by default."""
    sizes = dict(compute_rows=512, unroll=1) | _block_sizes("paged_attention_prefill", q, kv_pages, options)
    bounded = options.sliding_window is not None or options.attention_chunk is not None
    halves = bounded and tile_rows == sizes["compute_tokens"]
    return PrefillBlocks(**sizes, part_rows=tile_rows // 2 if halves else tile_rows)


def _block_sizes(op: str, q: jax.Array, kv_pages: KVPages, options: AttentionOptions) -> dict[str, int]:
    _, num_kv_heads, page_size, width = kv_pages.data.shape
    token_bytes = num_kv_heads * width * kv_pages.data.dtype.itemsize
    c = compute_tokens(token_bytes, options.sliding_window, options.attention_chunk)
    unit = math.lcm(c, page_size, 128)
    fetch = unit * max(1, _BUFFER_BYTES // (token_bytes * unit))
    key = attention_key(q.shape[1], num_kv_heads, q.shape[2], kv_pages.dtype.name, page_size, c)
    return dict(fetch_tokens=fetch, num_buffers=3) | dict(tuned(op, key)) | dict(compute_tokens=c)


def attention_key(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: str, page_size: int, tokens: int
) -> str:
    """What tuned block sizes are kept by; `tokens` is c."""
    return f"{num_heads}x{num_kv_heads}x{head_dim} {kv_dtype} page {page_size} tile {tokens}"
