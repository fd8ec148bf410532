"""Paged attention by the C++ kernel on a CPU: float32, in the layout of the xla backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer_kernels.cpu.build import target_name
from jaxinfer_kernels.layout import AttentionMetadata, KVPages, QueryTiles
from jaxinfer_kernels.xla import by_kind, write_rows


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
    """See `api.paged_attention`: outputs [T, N, H], log-sum-exps [T, N] and the pages.

    Raises:
      ValueError: q or the pages are not float32.
    """
    for name, dtype in (("q", q.dtype), ("kv_pages.data", kv_pages.data.dtype)):
        if dtype != jnp.float32:
            raise ValueError(f"{name} ({dtype}) must be float32 with backend='cpu'; xla takes the others")
    kv = jnp.stack([k, v], axis=2).reshape(k.shape[0], 2 * k.shape[1], k.shape[2])
    kv_pages = write_rows(kv_pages, kv, metadata.kv_write_index)

    def attend(queries: jax.Array, tiles: QueryTiles) -> tuple[jax.Array, jax.Array]:
        call = jax.ffi.ffi_call(
            target_name("paged_attention"),
            (
                jax.ShapeDtypeStruct(queries.shape, jnp.float32),
                jax.ShapeDtypeStruct(queries.shape[:3], jnp.float32),
            ),
        )
        return call(
            queries,
            kv_pages.data,
            tiles.page_table,
            tiles.start,
            tiles.kv_len,
            jnp.zeros((0,), jnp.float32) if sinks is None else sinks,
            scale=np.float32(scale),
            soft_cap=np.float32(soft_cap or 0),
            window=np.int32(sliding_window or 0),
            chunk=np.int32(attention_chunk or 0),
        )

    return *by_kind(attend, q, metadata), kv_pages
