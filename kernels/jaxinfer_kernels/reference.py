"""Each op in its plainest form, one query at a time: what the kernels are tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer_kernels.layout import AttentionMetadata, QueryTiles


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
) -> tuple[np.ndarray, np.ndarray]:
    """Same contract as `api.paged_attention`, in float64 and Python loops. Padding rows are 0."""
    pages = np.array(kv_pages, np.float64)
    page_size = pages.shape[2]
    queries = np.asarray(q, np.float64)
    for token, index in enumerate(np.asarray(metadata.kv_write_index)):
        pages[index // page_size, 0::2, index % page_size] = np.asarray(k[token], np.float64)
        pages[index // page_size, 1::2, index % page_size] = np.asarray(v[token], np.float64)
    out = np.zeros_like(queries)
    row = 0
    for tiles in (metadata.decode, metadata.prefill):
        if tiles is None:
            continue
        num_tiles = tiles.start.shape[0]
        block = 1 if tiles is metadata.decode else (q.shape[0] - row) // num_tiles
        for tile in range(num_tiles):
            for offset in range(int(tiles.kv_len[tile]) - int(tiles.start[tile])):
                out[row + tile * block + offset] = _attend_one(
                    queries[row + tile * block + offset],
                    pages,
                    tiles,
                    tile,
                    offset,
                    scale,
                    sliding_window,
                    soft_cap,
                )
        row += num_tiles * block
    return out, pages


def _attend_one(
    query: np.ndarray,
    pages: np.ndarray,
    tiles: QueryTiles,
    tile: int,
    offset: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> np.ndarray:
    position = int(tiles.start[tile]) + offset
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    seen = np.arange(first, position + 1)
    page_ids = np.asarray(tiles.page_table[tile])[seen // pages.shape[2]]
    kv = pages[page_ids, :, seen % pages.shape[2]]  # [seen, 2K, H]
    num_kv_heads = kv.shape[1] // 2
    group = query.shape[0] // num_kv_heads
    out = np.zeros_like(query)
    for head in range(query.shape[0]):
        logits = kv[:, 2 * (head // group)] @ query[head] * scale
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        weights = np.exp(logits - logits.max())
        out[head] = weights @ kv[:, 2 * (head // group) + 1] / weights.sum()
    return out


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Causal attention of one whole sequence without a cache. q [T, N, H], k and v [T, K, H] -> [T, N, H]."""
    num_tokens, num_heads, _ = q.shape
    k, v = (jnp.repeat(x, num_heads // x.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("tnh,snh->nts", q, k, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    distance = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)[None]
    seen = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    return jnp.einsum("nts,snh->tnh", weights, v.astype(jnp.float32)).astype(q.dtype)
