"""Each op in its plainest form, float64 and loops in numpy: what the kernels are tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxinfer_kernels.layout import AttentionMetadata, KVPages
from jaxinfer_kernels.quantize import LARGEST


def paged_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """The contract of `api.paged_attention`, on pages in the layout of the xla backend.

    Returns:
      Outputs [T, N, H] and log-sum-exps [T, N], 0 in padding rows; the cache's data [num_pages, 2K,
      page_size, H] in float64, before it is scaled, and its scales or None.
    """
    queries, k, v = np.asarray(q, np.float64), np.asarray(k, np.float32), np.asarray(v, np.float32)
    data = np.asarray(kv_pages.data).view(kv_pages.dtype).astype(np.float64)
    scales = None if kv_pages.scales is None else np.array(kv_pages.scales)
    with np.errstate(invalid="ignore"):  # padding rows and pages that nobody owns hold what they like
        for index, *kv in zip(np.asarray(metadata.kv_write_index), k, v, strict=True):
            page, offset = divmod(int(index), kv_pages.page_size)
            for first, numbers in enumerate(kv):
                if scales is not None:
                    numbers, scales[page, first::2, offset] = _quantize(numbers, kv_pages.dtype)
                data[page, first::2, offset] = numbers.astype(kv_pages.dtype)
        cache = data if scales is None else data * scales[..., None].astype(np.float64)
    sink_logits = None if sinks is None else np.asarray(sinks, np.float64)
    out, lse = np.zeros(queries.shape), np.zeros(queries.shape[:2])
    for row, position, page_table in _rows(metadata, len(queries)):
        first = 0
        if sliding_window is not None:
            first = max(0, position - sliding_window + 1)
        elif attention_chunk is not None:
            first = position // attention_chunk * attention_chunk
        seen = np.arange(first, position + 1)
        kv = cache[page_table[seen // kv_pages.page_size], :, seen % kv_pages.page_size]  # [seen, 2K, H]
        group = queries.shape[1] // (kv.shape[1] // 2)
        for head in range(queries.shape[1]):
            logits = kv[:, 2 * (head // group)] @ queries[row, head] * scale
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            everything = logits if sink_logits is None else np.append(logits, sink_logits[head])
            lse[row, head] = everything.max() + np.log(np.exp(everything - everything.max()).sum())
            out[row, head] = np.exp(logits - lse[row, head]) @ kv[:, 2 * (head // group) + 1]
    return out, lse, data, scales


def mla_paged_attention(
    q_latent: ArrayLike,
    q_rope: ArrayLike,
    latent: ArrayLike,
    k_rope: ArrayLike,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The contract of `api.mla_paged_attention`: outputs [T, N, R], 0 in padding rows, and the data."""
    queries = np.concatenate([np.asarray(q_latent, np.float64), np.asarray(q_rope, np.float64)], axis=2)
    keys = np.concatenate([np.asarray(latent, np.float32), np.asarray(k_rope, np.float32)], axis=1)
    latent_dim = np.shape(latent)[1]
    cache = np.asarray(kv_pages.data).view(kv_pages.dtype).astype(np.float64)
    for index, key in zip(np.asarray(metadata.kv_write_index), keys, strict=True):
        page, offset = divmod(int(index), kv_pages.page_size)
        cache[page, 0, offset] = key.astype(kv_pages.dtype)
    out = np.zeros((*queries.shape[:2], latent_dim))
    for row, position, page_table in _rows(metadata, len(queries)):
        seen = np.arange(position + 1)
        rows = cache[page_table[seen // kv_pages.page_size], 0, seen % kv_pages.page_size]  # [seen, R + Hr]
        logits = rows @ queries[row].T * scale  # [seen, N]
        weights = np.exp(logits - logits.max(0))
        out[row] = (weights / weights.sum(0)).T @ rows[:, :latent_dim]
    return out, cache


def _quantize(x: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """float32 [K, H] to numbers of the dtype, still float32, and scales [K]."""
    largest = LARGEST[np.dtype(dtype).name]
    scale = np.abs(x).max(-1) * np.float32(1 / largest)
    numbers = np.clip(x * (1 / np.where(scale > 0, scale, 1))[:, None], -largest, largest)
    return np.rint(numbers) if dtype == np.int8 else numbers, scale


def _rows(metadata: AttentionMetadata, num_rows: int) -> list[tuple[int, int, np.ndarray]]:
    """Row, position in its sequence and page table of each row that is not padding."""
    rows = []
    first = 0
    for tiles in (metadata.decode, metadata.prefill):
        if tiles is None:
            continue
        start, kv_len, page_table = (np.asarray(x) for x in (tiles.start, tiles.kv_len, tiles.page_table))
        block = 1 if tiles is metadata.decode else (num_rows - first) // len(start)
        for tile in range(len(start)):
            for offset in range(kv_len[tile] - start[tile]):
                rows.append((first + tile * block + offset, int(start[tile]) + offset, page_table[tile]))
        first += len(start) * block
    return rows


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


def grouped_matmul(lhs: ArrayLike, rhs: ArrayLike, group_sizes: ArrayLike) -> np.ndarray:
    """The contract of `matmul.grouped_matmul`, in float64."""
    rows, matrices = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out = np.zeros((len(rows), matrices.shape[1]))
    first = 0
    for matrix, size in zip(matrices, np.asarray(group_sizes).tolist(), strict=True):
        out[first : first + size] = rows[first : first + size] @ matrix.T
        first += size
    return out


def quantized_matmul(
    lhs: ArrayLike, weights: ArrayLike, scales: ArrayLike, *, quantize_lhs: bool = False
) -> np.ndarray:
    """The contract of `matmul.quantized_matmul`, in float64."""
    rows, row_scales = np.asarray(lhs, np.float64), np.ones(np.shape(lhs)[0])
    numbers, scales = np.asarray(weights), np.asarray(scales, np.float64)
    if quantize_lhs:
        rows, row_scales = _quantize(np.asarray(lhs, np.float32), numbers.dtype)
        rows = rows.astype(numbers.dtype).astype(np.float64)
    numbers = numbers.astype(np.float64)
    if scales.ndim == 1:
        wide = (numbers * scales[:, None]).T
    else:
        wide = numbers * np.repeat(scales, len(numbers) // len(scales), axis=0)
    return rows @ wide * row_scales[:, None]
