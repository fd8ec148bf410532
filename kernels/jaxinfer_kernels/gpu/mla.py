"""Latent attention for GPUs: the decode kernel on pages of one latent row a token.

As in FlashMLA a tile of latent rows is read once, as keys whole and as values but for its rotary part.
The tile sits on the products' M side and 16 heads on their N side, as in decode.py; more heads are more
blocks of 16, which read the rows again, from L2. Pages are [num_pages, 1, page_size, 1, W], W = R + Hr up to
a multiple of 64.

Prefill rows run as decodes, each of its own position: right, but a step of many rows reads the pages once
a row, so that long prompts are better computed with keys and values by heads.

Dims: T tokens, N heads, R elements of a latent vector, Hr of a rotary key.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer_kernels.gpu.common import Logits, Visibility
from jaxinfer_kernels.gpu.decode import DecodeKernel
from jaxinfer_kernels.gpu.splits import MAX_SPLITS, make_work_list, merge_splits
from jaxinfer_kernels.gpu.targets import Target, current_target
from jaxinfer_kernels.layout import AttentionMetadata, KVPages, QueryTiles
from jaxinfer_kernels.xla import write_rows

HEADS = 16  # of a block of queries: as many as leave room for R = 512 and Hr = 64
STAGED_TOKENS = 128  # in shared memory at a time
MIN_SPLIT_TOKENS = 1024  # of 512, the results would be a tenth of what is moved
MAX_WIDTH = 576


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

    Raises:
      ValueError: what the kernel does not support, by the argument's name.
    """
    target = current_target()
    _check(q_latent, kv_pages, target)
    latent_dim, width = latent.shape[1], kv_pages.data.shape[-1]
    queries = jnp.concatenate([q_latent, q_rope], axis=2)
    padding = width - queries.shape[2]
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padding)))
    rows = jnp.pad(jnp.concatenate([latent, k_rope], axis=1), ((0, 0), (0, padding)))
    kv_pages = write_rows(kv_pages, rows[:, None, None], metadata.kv_write_index)
    num_decodes = 0 if metadata.decode is None else metadata.decode.start.shape[0]
    outputs = []
    if metadata.decode is not None:
        outputs.append((queries[:num_decodes], metadata.decode, MAX_SPLITS))
    if metadata.prefill is not None:
        prefill = queries[num_decodes:]
        outputs.append((prefill, _as_decodes(metadata.prefill, prefill.shape[0]), 1))
    pages = kv_pages.data.reshape(*kv_pages.data.shape[:3], width)
    outputs = [_attend(target, *part, pages, latent_dim, scale, interpret) for part in outputs]
    return jnp.concatenate(outputs), kv_pages


def _attend(
    target: Target,
    q: jax.Array,
    tiles: QueryTiles,
    max_splits: int,
    pages: jax.Array,
    latent_dim: int,
    scale: float,
    interpret: Any,
) -> jax.Array:
    """q [rows, N, W], a row a tile -> [rows, N, R]."""
    num_rows, num_heads, width = q.shape
    heads = min(HEADS, -(-num_heads // target.columns) * target.columns)
    blocks = -(-num_heads // heads)
    padded = jnp.pad(q, ((0, 0), (0, blocks * heads - num_heads), (0, 0)))
    visibility = Visibility(None, None)
    work = make_work_list(
        tiles.kv_len,
        tiles.page_table.shape[1] * pages.shape[2],
        visibility,
        target.rows,
        max_splits=max_splits,
        min_split_tokens=MIN_SPLIT_TOKENS,
    )
    kernel = DecodeKernel(
        target=target,
        logits=Logits(scale, None),
        visibility=visibility,
        values=(0, -(-latent_dim // 64) * 64),
        queries=heads,
        num_blocks=2 if interpret else target.num_sms,  # interpreted blocks run one after the other
        num_stages=STAGED_TOKENS // target.rows,
        interpret=interpret,
    )
    out, lse = kernel(padded.reshape(num_rows, blocks, heads, width), pages, None, tiles, work)
    return merge_splits(out, lse, work, None, padded[..., :latent_dim])[0][:, :num_heads]


def _as_decodes(tiles: QueryTiles, num_rows: int) -> QueryTiles:
    """A tile of one row for each of the rows; those of padding have a length of 0."""
    block = num_rows // tiles.start.shape[0]
    positions = (tiles.start[:, None] + jnp.arange(block)).ravel()
    lens = jnp.where(positions < jnp.repeat(tiles.kv_len, block), positions + 1, 0)
    return QueryTiles(jnp.repeat(tiles.page_table, block, axis=0), positions, lens)


def _check(q_latent: jax.Array, kv_pages: KVPages, target: Target) -> None:
    """Raises ValueError for what the kernel does not have."""
    dtype = kv_pages.data.dtype
    if q_latent.dtype not in (jnp.bfloat16, jnp.float16) or dtype != q_latent.dtype:
        raise ValueError(
            f"q_latent ({q_latent.dtype}) and kv_pages.data ({dtype}) must both be bfloat16 or both float16 "
            "for backend='gpu'"
        )
    if kv_pages.page_size % 8:
        raise ValueError(f"page_size={kv_pages.page_size} must be a multiple of 8 for backend='gpu'")
    if not target.rows <= kv_pages.data.shape[-1] <= MAX_WIDTH:
        raise ValueError(
            f"kv_pages.data{kv_pages.data.shape} must have rows of {target.rows} to {MAX_WIDTH} for "
            f"backend='gpu' on {target.name}"
        )
