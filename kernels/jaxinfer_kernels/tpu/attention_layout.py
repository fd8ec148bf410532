"""How the TPU's attention kernels lay out pages, queries and new keys and values.

A page is [K, page_size, W]: K and V of one head and token lie side by side in W lanes, so that one DMA
brings both, and W is a multiple of 128, so that XLA and the kernels agree on the layout of the pool.
With V at a lane that is no multiple of 128 (head_dim 64 and 192) the kernels still slice at multiples:
queries are 0 over the lanes that are not K's, and the output has V's lanes and a few others. A latent
page is that of one head whose value is the first part of its key.

The scales of a quantised page are [K, L]: those of a head's keys and then of its values, L lanes, a
multiple of 128. Rows of page_size lanes, fewer than 128, XLA would keep in another order than the kernels,
as it does still where K is not 1, 2, 4 or a multiple of 8: it then copies all scales at each step.

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
      key_dim: elements of a key, which begins at lane 0.
      value: the first lane of the value.
      value_dim: elements of a value.
    """

    width: int
    key_dim: int
    value: int
    value_dim: int

    @classmethod
    def of(cls, head_dim: int) -> Lanes:
        """The lanes for a head_dim: the fewest multiples of 128 that hold K and V."""
        width = round_up(2 * head_dim, LANES)
        value = width // 2 if width == 2 * round_up(head_dim, LANES) else head_dim
        return cls(width, head_dim, value, head_dim)

    @classmethod
    def of_latent(cls, latent_dim: int, rope_dim: int) -> Lanes:
        """The lanes for a latent vector, which is the value, and its rotary key."""
        key_dim = latent_dim + rope_dim
        return cls(round_up(key_dim, LANES), key_dim, 0, latent_dim)

    @property
    def keys(self) -> slice:
        """Lanes that QK multiplies."""
        return slice(0, round_up(self.key_dim, LANES))

    @property
    def values(self) -> slice:
        """Lanes that PV multiplies."""
        return slice(self.value // LANES * LANES, round_up(self.value + self.value_dim, LANES))

    @property
    def num_values(self) -> int:
        """Lanes of an output row."""
        return self.values.stop - self.values.start

    def output(self, rows: jax.Array) -> jax.Array:
        """The lanes of output rows, [..., lanes], that are the head's: [..., elements of a value]."""
        first = self.value - self.values.start
        return rows[..., first : first + self.value_dim]


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


def latent_pages_shape(
    num_pages: int, page_size: int, latent_dim: int, rope_dim: int
) -> tuple[int, int, int, int]:
    """Shape of one layer's latent pages."""
    return (num_pages, 1, page_size, Lanes.of_latent(latent_dim, rope_dim).width)


def scales_shape(num_pages: int, page_size: int, num_kv_heads: int) -> tuple[int, int, int]:
    """Shape of the scales of one layer's pages."""
    return (num_pages, num_kv_heads, round_up(2 * page_size, LANES))


def pack_scales(scales: jax.Array) -> jax.Array:
    """[..., 2K, page_size], K in even rows and V in odd ones, as pages have them: [..., K, L]."""
    *outer, rows, page_size = scales.shape
    scales = scales.reshape(*outer, rows // 2, 2 * page_size)
    return pad_lanes(scales)


def unpack_scales(scales: jax.Array, page_size: int) -> jax.Array:
    """What `pack_scales` takes."""
    *outer, num_kv_heads, _ = scales.shape
    return scales[..., : 2 * page_size].reshape(*outer, 2 * num_kv_heads, page_size)


def pad_lanes(x: jax.Array) -> jax.Array:
    """With zeros, to a multiple of 128."""
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % LANES)])


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
    """q [S, N, H] -> [S, K, G', lanes]: G' is G in whole tiles, and padding is 0."""
    num_rows, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    q = pad_lanes(q).reshape(num_rows, num_kv_heads, group, -1)
    return jnp.pad(q, [(0, 0), (0, 0), (0, -group % 8), (0, 0)])


def unpack_decode_rows(rows: jax.Array, num_heads: int) -> jax.Array:
    """What the decode kernel gives, [S, K, G', lanes] -> [S, N, lanes]."""
    num_rows, num_kv_heads, _, width = rows.shape
    return rows[:, :, : num_heads // num_kv_heads].reshape(num_rows, num_heads, width)


def pack_prefill_queries(q: jax.Array, num_tiles: int, num_kv_heads: int, rows: int) -> jax.Array:
    """q [R * B, N, H] -> [R, K, B * G, lanes]: `rows` of a query head, and so of each head of the group, lie
    together, then the next rows of the tile; padding is 0.
    """
    num_rows, num_heads, _ = q.shape
    parts, group = num_rows // num_tiles // rows, num_heads // num_kv_heads
    q = pad_lanes(q).reshape(num_tiles, parts, rows, num_kv_heads, group, -1).transpose(0, 3, 1, 4, 2, 5)
    return q.reshape(num_tiles, num_kv_heads, parts * group * rows, -1)


def unpack_prefill_rows(packed: jax.Array, num_heads: int, rows: int) -> jax.Array:
    """What the prefill kernel gives, [R, K, B * G, lanes] -> [R * B, N, lanes]."""
    num_tiles, num_kv_heads, _, width = packed.shape
    packed = packed.reshape(num_tiles, num_kv_heads, -1, num_heads // num_kv_heads, rows, width)
    return packed.transpose(0, 2, 4, 1, 3, 5).reshape(-1, num_heads, width)
