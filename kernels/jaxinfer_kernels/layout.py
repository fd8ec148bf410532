"""The shape of the KV cache and of the metadata that describes one step to the kernels.

Dims: T tokens of the step, R query tiles, B queries a tile, P pages a sequence, N query heads,
K kv heads, H head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

KV_TILE_TOKENS = 64  # keys that one pass of the reduction takes; 128 and 256 read more padding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueryTiles:
    """Query rows in tiles of B, each of one sequence; a decode is a tile of one query.

    A tile holds the queries at positions start ... kv_len - 1 of its sequence; its rows past those
    are padding, and so is a whole tile whose kv_len is 0.
    """

    page_table: jax.Array  # [R, P] i32; entries past the sequence's pages are never read
    start: jax.Array  # [R] i32
    kv_len: jax.Array  # [R] i32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """One step: S decode rows come first, then R tiles of B prefill rows; T = S + R * B."""

    kv_write_index: jax.Array  # [T] i32: page * page_size + offset; padding rows write into page 0
    decode: QueryTiles | None
    prefill: QueryTiles | None


def kv_pages_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Shape of one layer's pages: [num_pages, 2K, page_size, H], K in even rows and V in odd ones.

    Heads come before positions so that one gather of (page, head) rows yields contiguous
    [R, K, tokens, H] operands: with positions first, XLA on the CPU spends more time transposing
    the gathered pages than multiplying them.
    """
    return (num_pages, 2 * num_kv_heads, page_size, head_dim)


def kv_tile_tokens(page_size: int) -> int:
    """Positions that one pass of the reduction takes. Sequences' page tables hold a multiple of it.

    Raises ValueError for a page size that neither divides the tile nor is a multiple of it.
    """
    if page_size < 1 or (KV_TILE_TOKENS % page_size and page_size % KV_TILE_TOKENS):
        raise ValueError(f"page_size={page_size} must divide {KV_TILE_TOKENS} or be a multiple of it")
    return max(KV_TILE_TOKENS, page_size)
