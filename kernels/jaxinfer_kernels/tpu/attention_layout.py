"""How the TPU's attention kernels lay out pages, queries and new keys and values.

A page is [K, page_size, W]: K and V of one head and token lie side by side in W lanes, so that one DMA
brings both, and W is a multiple of 128, so that XLA and the kernels agree on the layout of the pool.
With V at a lane that is no multiple of 128 (head_dim 64 and 192) the kernels still slice at multiples:
queries are 0 over the lanes that are not K's, and the output has V's lanes and a few others.

Dims: T tokens, S decode rows, R prefill tiles of B rows, N query heads, K kv heads, G = N / K query
heads a kv head, H head_dim, W lanes of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LANES = 128


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Lanes:
    """Which lanes of a token's W hold what.

    Attributes:
      width: W.
      value: the first lane of V; K begins at 0.
      key_end: QK multiplies lanes 0 to here.
      value_start: PV multiplies lanes from here to W.
    """

    width: int
    value: int
    key_end: int
    value_start: int

    @classmethod
    def of(cls, head_dim: int) -> Lanes:
        """The lanes for a head_dim: the fewest multiples of 128 that hold K and V."""
        width = round_up(2 * head_dim, LANES)
        key_end = round_up(head_dim, LANES)
        value = width // 2 if width == 2 * key_end else head_dim
        return cls(width, value, key_end, value // LANES * LANES)

    @property
    def output(self) -> int:
        """Lanes of an output row."""
        return self.width - self.value_start


def sublanes(dtype: DTypeLike) -> int:
    """Rows of a register tile: what VMEM is addressed by."""
    return 32 // jnp.dtype(dtype).itemsize


def pack_kv(k: jax.Array, v: jax.Array) -> jax.Array:
    """k and v [T, K, H] side by side, as a page has them: [T, K, W]."""
    head_dim = k.shape[-1]
    lanes = Lanes.of(head_dim)
    gap = [(0, 0), (0, 0), (0, lanes.value - head_dim)]
    end = [(0, 0), (0, 0), (0, lanes.width - lanes.value - head_dim)]
    return jnp.concatenate([jnp.pad(k, gap), jnp.pad(v, end)], axis=-1)


def pages_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Shape of one layer's pages."""
    return (num_pages, num_kv_heads, page_size, Lanes.of(head_dim).width)


def pack_pages(numbers: jax.Array) -> jax.Array:
    """[num_pages, 2K, page_size, H], K in even rows and V in odd ones, as pages have them."""
    num_pages, num_rows, page_size, head_dim = numbers.shape
    k, v = (numbers[:, first::2].reshape(-1, page_size, head_dim) for first in (0, 1))
    return pack_kv(k, v).reshape(num_pages, num_rows // 2, page_size, -1)


def unpack_pages(pages: jax.Array, head_dim: int) -> jax.Array:
    """The numbers that `pack_pages` takes."""
    num_pages, num_kv_heads, page_size, _ = pages.shape
    value = Lanes.of(head_dim).value
    kv = jnp.stack([pages[..., :head_dim], pages[..., value : value + head_dim]], axis=2)
    return kv.reshape(num_pages, 2 * num_kv_heads, page_size, head_dim)


def group_rows(rows: jax.Array, start: jax.Array, group: int) -> jax.Array:
    """Puts each tile's rows [R * B, heads, ...] in groups as pages have them: [R, n, heads, group, ...].

    Row i of a tile's groups is position start // group * group + i; places that are not the tile's hold
    any of the rows.
    """
    num_tiles = start.shape[0]
    tile_rows = rows.shape[0] // num_tiles
    at = jnp.arange(round_up(tile_rows, group) + group) - (start % group)[:, None]
    at = jnp.clip(at, 0, tile_rows - 1) + tile_rows * jnp.arange(num_tiles)[:, None]
    return rows[at.reshape(num_tiles, -1, group)].swapaxes(2, 3)


def pack_decode_queries(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """q [S, N, H] -> [S, K, G', key_end]: G' is G in whole tiles, and padding is 0."""
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    q = q.reshape(num_rows, num_kv_heads, group, head_dim)
    padding = [(0, 0), (0, 0), (0, -group % 8), (0, Lanes.of(head_dim).key_end - head_dim)]
    return jnp.pad(q, padding)


def unpack_decode_rows(rows: jax.Array, num_heads: int) -> jax.Array:
    """What the decode kernel gives, [S, K, G', lanes] -> [S, N, lanes]."""
    num_rows, num_kv_heads, _, width = rows.shape
    return rows[:, :, : num_heads // num_kv_heads].reshape(num_rows, num_heads, width)


def pack_prefill_queries(q: jax.Array, num_tiles: int, num_kv_heads: int) -> jax.Array:
    """q [R * B, N, H] -> [R, K, G * B, key_end]: rows of one query head lie together; padding is 0."""
    num_rows, num_heads, head_dim = q.shape
    tile_rows, group = num_rows // num_tiles, num_heads // num_kv_heads
    q = jnp.pad(q, [(0, 0), (0, 0), (0, Lanes.of(head_dim).key_end - head_dim)])
    q = q.reshape(num_tiles, tile_rows, num_kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
    return q.reshape(num_tiles, num_kv_heads, group * tile_rows, -1)


def unpack_prefill_rows(rows: jax.Array, num_heads: int) -> jax.Array:
    """What the prefill kernel gives, [R, K, G * B, lanes] -> [R * B, N, lanes]."""
    num_tiles, num_kv_heads, num_rows, width = rows.shape
    group = num_heads // num_kv_heads
    rows = rows.reshape(num_tiles, num_kv_heads, group, num_rows // group, width)
    return rows.transpose(0, 3, 1, 2, 4).reshape(-1, num_heads, width)


def output_lanes(out: jax.Array, head_dim: int) -> jax.Array:
    """The lanes of an output row, [..., lanes], that are the head's: [..., H]."""
    lanes = Lanes.of(head_dim)
    first = lanes.value - lanes.value_start
    return out[..., first : first + head_dim]
