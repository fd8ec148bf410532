"""Paged attention by the C++ kernel on a CPU: float32, in the layout of the xla backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer_kernels.cpu.build import target_name
from jaxinfer_kernels.layout import AttentionMetadata, KVPages, QueryTiles


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
    num_tokens, num_heads, head_dim = q.shape
    call = jax.ffi.ffi_call(
        target_name("paged_attention"),
        (
            jax.ShapeDtypeStruct((num_heads, head_dim, num_tokens), q.dtype),
            jax.ShapeDtypeStruct((num_heads, num_tokens), q.dtype),
            jax.ShapeDtypeStruct(kv_pages.data.shape, q.dtype),
        ),
        input_output_aliases={3: 2},
    )
    # Feature-major, as the products around are: XLA drops these transposes against the caller's.
    out, lse, data = call(
        *(x.transpose(1, 2, 0) for x in (q, k, v)),
        kv_pages.data,
        metadata.kv_write_index,
        *_arrays(metadata.decode),
        *_arrays(metadata.prefill),
        jnp.zeros((0,), jnp.float32) if sinks is None else sinks,
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0),
        window=np.int32(sliding_window or 0),
        chunk=np.int32(attention_chunk or 0),
    )
    return out.transpose(2, 0, 1), lse.T, KVPages(data, None)


def _arrays(tiles: QueryTiles | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Page table, start and kv_len; of no tiles where there are none."""
    if tiles is None:
        return jnp.zeros((0, 1), jnp.int32), jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.int32)
    return tiles.page_table, tiles.start, tiles.kv_len
