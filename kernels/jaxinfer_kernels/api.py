"""The public ops: arguments checked by name, then the path for the platform."""

from __future__ import annotations

import jax

from jaxinfer_kernels import xla
from jaxinfer_kernels.layout import AttentionMetadata


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
    """Writes a step's keys and values into their pages, then attends to everything up to each query.

    Args:
      q: [T, N, H] queries, rotated.
      k: [T, K, H] keys, rotated; N is a multiple of K.
      v: [T, K, H] values.
      kv_pages: [num_pages, 2K, page_size, H], donated by the caller so that it is written in place.
      metadata: which rows belong to which sequence, and where their pages lie.
      scale: multiplies q.k.
      sliding_window: a query sees so many positions, its own included; None sees all.
      soft_cap: c in c * tanh(logits / c); None is off.

    Returns:
      [T, N, H] outputs in q's dtype (padding rows hold what they like) and the pages.

    Raises:
      ValueError: a shape does not fit, by the argument's name.
    """
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q{q.shape}, k{k.shape} and v{v.shape} must be [T, N, H], [T, K, H], [T, K, H], K dividing N"
        )
    if kv_pages.shape[1] != 2 * k.shape[1] or kv_pages.shape[3] != k.shape[2]:
        raise ValueError(
            f"kv_pages{kv_pages.shape} must be [num_pages, {2 * k.shape[1]}, page_size, {k.shape[2]}]"
        )
    if metadata.kv_write_index.shape != q.shape[:1]:
        raise ValueError(f"metadata.kv_write_index{metadata.kv_write_index.shape} must be [{q.shape[0]}]")
    if metadata.decode is None and metadata.prefill is None:
        raise ValueError("metadata holds neither decode nor prefill rows")
    return xla.paged_attention(
        q, k, v, kv_pages, metadata, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
    )
