"""The layout of the KV cache, and the metadata that describes one step to the kernels.

Dims: T tokens of the step, R query tiles, B queries a tile, P pages a sequence, N query heads,
K kv heads, H head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxinfer_kernels.cpu.pages import unwritten_pages
from jaxinfer_kernels.tpu import attention_layout

Backend = Literal["cpu", "tpu", "gpu", "xla"]

KV_TILE_TOKENS = 64  # keys that one pass of the reduction takes; 128 and 256 read more padding
_DECODE_TILE_TOKENS = 128
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
KV_DTYPES = ("float32", "bfloat16", "float16", *QUANTIZED_DTYPES)

# What the xla backend keeps of a dtype: XLA on the CPU converts a whole float8 cache to write one row
# (a bfloat16 one too, with jax 0.10), so it gets their bits and only rows in use become floats.
_XLA_STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
_XLA_STORED = {storage: dtype for dtype, storage in _XLA_STORAGE.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """One layer's KV cache, donated to `paged_attention` so that it is written in place.

    Every backend's layout has pages as its first dimension and positions as its third.

    Attributes:
      data: in the shape of `kv_pages_shape`. The xla backend keeps bfloat16 as uint16 bits and
        float8_e4m3fn as uint8 bits.
      scales: in the shape of `kv_scales_shape`, f32, where data is int8 or float8_e4m3fn: what to
        multiply a token's K or V of one head by. None for floats.
    """

    data: jax.Array
    scales: jax.Array | None

    @property
    def dtype(self) -> Any:
        """The numpy dtype of the numbers, whatever they are kept as."""
        return jnp.dtype(_XLA_STORED.get(self.data.dtype.name, self.data.dtype.name))

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.data.shape[2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueryTiles:
    """Query rows in tiles of B, each of one sequence; a decode is a tile of one query.

    A tile holds the queries at positions start ... kv_len - 1 of its sequence; its rows past those
    are padding, and so is a whole tile whose kv_len is 0.
    """

    page_table: jax.Array  # [R, P] i32; entries past the sequence's pages are any valid page
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
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, backend: Backend = "xla"
) -> tuple[int, ...]:
    """Shape of one layer's `KVPages.data`.

    xla and cpu: [num_pages, 2K, page_size, H], K in even rows and V in odd ones. Heads come before positions
    so that one gather of (page, head) rows yields contiguous [R, K, tokens, H] operands: with
    positions first, XLA on the CPU spends more time transposing the gathered pages than multiplying
    them.

    gpu: [num_pages, K, page_size, 2, H up to a multiple of 64], a token's K and V side by side, so that
    one TMA copy brings a head's page in rows that wgmma's swizzled tiles divide.

    tpu: [num_pages, K, page_size, W], K and V side by side in W lanes; see tpu/attention_layout.py.

    Raises:
      ValueError: the backend has no layout.
    """
    if backend == "tpu":
        return attention_layout.pages_shape(num_pages, page_size, num_kv_heads, head_dim)
    if backend == "gpu":
        return (num_pages, num_kv_heads, page_size, 2, -(-head_dim // 64) * 64)
    if backend in ("cpu", "xla"):
        return (num_pages, 2 * num_kv_heads, page_size, head_dim)
    raise ValueError(f"backend={backend!r} must be cpu, tpu, gpu or xla")


def kv_scales_shape(
    num_pages: int, page_size: int, num_kv_heads: int, backend: Backend = "xla"
) -> tuple[int, ...]:
    """Shape of one layer's `KVPages.scales`.

    xla, cpu and gpu: [num_pages, 2K, page_size], K's in even rows and V's in odd ones.

    tpu: [num_pages, K, L], a head's K's and then its V's in L lanes; see tpu/attention_layout.py.
    """
    if backend == "tpu":
        return attention_layout.scales_shape(num_pages, page_size, num_kv_heads)
    return (num_pages, 2 * num_kv_heads, page_size)


def create_kv_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    backend: Backend = "xla",
    *,
    device: jax.sharding.Sharding | None = None,
) -> KVPages:
    """One layer's cache, placed as `device` says (kv heads are dimension 1 of both its arrays).

    Zeros, but for the cpu backend's on a single device, which hold anything.

    Raises:
      ValueError: dtype is none of KV_DTYPES, or what `kv_pages_shape` raises.
    """
    name = jnp.dtype(dtype).name
    if name not in KV_DTYPES:
        raise ValueError(f"dtype={name!r} must be one of {', '.join(KV_DTYPES)}")
    shape = kv_pages_shape(num_pages, page_size, num_kv_heads, head_dim, backend)
    if backend == "cpu" and device is None:
        return KVPages(unwritten_pages(shape), None)
    stored = _XLA_STORAGE.get(name, name) if backend == "xla" else name
    scales = None
    if name in QUANTIZED_DTYPES:
        scales_shape = kv_scales_shape(num_pages, page_size, num_kv_heads, backend)
        scales = jnp.zeros(scales_shape, jnp.float32, device=device)
    return KVPages(jnp.zeros(shape, stored, device=device), scales)


def create_mla_pages(
    num_pages: int, page_size: int, latent_dim: int, rope_dim: int, dtype: DTypeLike, backend: Backend = "xla"
) -> KVPages:
    """Zeros: one layer's cache of latent attention, a token's latent vector and then its rotary key.

    Raises:
      ValueError: the backend has no such layout, or dtype is no float of KV_DTYPES.
    """
    name = jnp.dtype(dtype).name
    if name not in KV_DTYPES or name in QUANTIZED_DTYPES:
        raise ValueError(f"dtype={name!r} must be float32, bfloat16 or float16")
    shape = mla_pages_shape(num_pages, page_size, latent_dim, rope_dim, backend)
    return KVPages(jnp.zeros(shape, _XLA_STORAGE.get(name, name) if backend == "xla" else name), None)


def mla_pages_shape(
    num_pages: int, page_size: int, latent_dim: int, rope_dim: int, backend: Backend = "xla"
) -> tuple[int, ...]:
    """Shape of one layer's `KVPages.data` of latent attention.

    xla: [num_pages, 1, page_size, latent_dim + rope_dim]. tpu: that, with the last up to a multiple of 128.

    gpu: [num_pages, 1, page_size, 1, latent_dim + rope_dim up to a multiple of 64]: as for
    `kv_pages_shape`, with one vector a token.

    Raises:
      ValueError: the backend has no layout.
    """
    if backend == "tpu":
        return attention_layout.latent_pages_shape(num_pages, page_size, latent_dim, rope_dim)
    if backend == "gpu":
        return (num_pages, 1, page_size, 1, -(-(latent_dim + rope_dim) // 64) * 64)
    if backend == "xla":
        return (num_pages, 1, page_size, latent_dim + rope_dim)
    raise ValueError(f"backend={backend!r} must be tpu, gpu or xla")


def pack_mla_pages(numbers: jax.Array, latent_dim: int, backend: Backend = "xla") -> KVPages:
    """Rows [num_pages, 1, page_size, R + Hr] of bfloat16, float16 or float32, in a backend's layout."""
    num_pages, _, page_size, width = numbers.shape
    shape = mla_pages_shape(num_pages, page_size, latent_dim, width - latent_dim, backend)
    name = numbers.dtype.name
    if backend == "xla":
        return KVPages(jax.lax.bitcast_convert_type(numbers, _XLA_STORAGE.get(name, name)), None)
    padding = ((0, 0), (0, 0), (0, 0), (0, shape[-1] - width))
    return KVPages(jnp.pad(numbers, padding).reshape(shape), None)


def pack_kv_pages(numbers: jax.Array, scales: jax.Array | None, backend: Backend = "xla") -> KVPages:
    """Numbers [num_pages, 2K, page_size, H] (K in even rows) in one of KV_DTYPES, and their scales
    [num_pages, 2K, page_size], in a backend's layout.
    """
    num_pages, num_rows, page_size, head_dim = numbers.shape
    shape = kv_pages_shape(num_pages, page_size, num_rows // 2, head_dim, backend)
    if backend == "tpu":
        scales = None if scales is None else attention_layout.pack_scales(scales)
        return KVPages(attention_layout.pack_pages(numbers), scales)
    if backend == "gpu":
        numbers = numbers.reshape(num_pages, num_rows // 2, 2, page_size, head_dim).swapaxes(2, 3)
        padding = [(0, size - had) for size, had in zip(shape, numbers.shape, strict=True)]
        return KVPages(jnp.pad(numbers, padding), scales)
    name = numbers.dtype.name
    return KVPages(jax.lax.bitcast_convert_type(numbers, _XLA_STORAGE.get(name, name)), scales)


def unpack_kv_pages(
    kv_pages: KVPages, num_kv_heads: int, head_dim: int, backend: Backend = "xla"
) -> jax.Array:
    """The numbers that `pack_kv_pages` takes, not yet multiplied by their scales."""
    num_pages, page_size = kv_pages.data.shape[0], kv_pages.page_size
    kv_pages_shape(num_pages, page_size, num_kv_heads, head_dim, backend)
    if backend == "tpu":
        return attention_layout.unpack_pages(kv_pages.data, head_dim)
    if backend == "gpu":
        numbers = kv_pages.data[..., :head_dim].swapaxes(2, 3)
        return numbers.reshape(num_pages, 2 * num_kv_heads, page_size, head_dim)
    return jax.lax.bitcast_convert_type(kv_pages.data, kv_pages.dtype)


def unpack_kv_scales(kv_pages: KVPages, backend: Backend = "xla") -> jax.Array | None:
    """The scales that `pack_kv_pages` takes."""
    if backend != "tpu" or kv_pages.scales is None:
        return kv_pages.scales
    return attention_layout.unpack_scales(kv_pages.scales, kv_pages.page_size)


def kv_tile_tokens(page_size: int) -> int:
    """Positions that one pass of the reduction takes. Sequences' page tables hold a multiple of it.

    Raises ValueError for a page size that neither divides the tile nor is a multiple of it.
    """
    if page_size < 1 or (KV_TILE_TOKENS % page_size and page_size % KV_TILE_TOKENS):
        raise ValueError(f"page_size={page_size} must divide {KV_TILE_TOKENS} or be a multiple of it")
    return max(KV_TILE_TOKENS, page_size)


def decode_tile_tokens(page_size: int) -> int:
    """The same for a decode on the xla backend, which has little to compute and pays for every pass.

    A pass has 14 operations, which XLA takes some microseconds each to start: with 1,500 positions of one
    sequence 30 layers take 24 ms instead of 53. Tiles of 256 take 18, but twice as long as 64 for many
    short sequences.
    """
    return max(_DECODE_TILE_TOKENS, kv_tile_tokens(page_size))


def prefill_tile_tokens(backend: Backend = "xla") -> int:
    """B, the rows of a prefill tile that the backend is fastest with.

    Raises:
      ValueError: the backend has no such number.
    """
    tiles: dict[str, int] = {"tpu": 128, "gpu": 128, "cpu": 32, "xla": 32}
    if backend not in tiles:
        raise ValueError(f"backend={backend!r} must be cpu, tpu, gpu or xla")
    return tiles[backend]


def first_seen(positions: jax.Array, sliding_window: int | None, attention_chunk: int | None) -> jax.Array:
    """The first position that queries at `positions` see.

    A window of w shows w positions, the query's own included; with chunks of c, a query sees its own
    chunk, which starts at a multiple of c. At most one is not None.
    """
    if sliding_window is not None:
        return jnp.maximum(positions - (sliding_window - 1), 0)
    if attention_chunk is not None:
        return positions - jax.lax.rem(positions, jnp.int32(attention_chunk))
    return jnp.zeros_like(positions)
