"""What the kernels share: shared-memory layouts, what a query sees, the logits' arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer_kernels.gpu.targets import Ref
from jaxinfer_kernels.layout import first_seen

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite, so that a row that sees nothing yet stays free of NaN
SWIZZLE_BYTES = 128
MMA_ROWS = 64  # a warpgroup's rows


def tiled_smem(shape: tuple[int, ...], dtype: Any, swizzle_bytes: int = SWIZZLE_BYTES) -> Any:
    """Shared memory in the layout that TMA writes and products read: 8 rows of so many bytes, swizzled."""
    columns = swizzle_bytes // jnp.dtype(dtype).itemsize
    tiling: Any = plgpu.TilingTransform  # abstract to a type checker, which does not see its base's maker
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, columns)), swizzle(swizzle_bytes)))


def compiler_params(reduction_scratch_bytes: int) -> plgpu.CompilerParams:
    """The scratch serves reductions across warps: those along a product's M side."""
    return plgpu.CompilerParams(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        reduction_scratch_bytes=reduction_scratch_bytes,
    )


def interpret_params(interpret: Any) -> Any:
    """What `plgpu.kernel(interpret=)` takes: False, True or jax's own parameters, as they are.

    Raises:
      ValueError: jax cannot interpret such kernels.
    """
    if interpret is not True:
        return interpret
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise ValueError(f"interpret=True for GPU kernels needs jax 0.11 or later, this is {jax.__version__}")
    return plgpu.InterpretGPUParams()


def ceil_div(numerator: Any, denominator: int) -> Any:
    """Of non-negative kernel scalars."""
    return lax.div(numerator + (denominator - 1), jnp.int32(denominator))


def row_positions(
    shape: tuple[int, int], axis: int, start: Any, layout: Any = plgpu.Layout.WGMMA
) -> jax.Array:
    """start + the index along an axis, in the layout of sums."""
    return start + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def load(ref: Ref, layout: Any) -> jax.Array:
    """What shared memory holds, read in a layout: `plgpu.load`, whose arguments jax 0.12 changed."""
    return plgpu.layout_cast(ref[...], layout)


def spread(
    vector: jax.Array, shape: tuple[int, int], axis: int, layout: Any = plgpu.Layout.WGMMA
) -> jax.Array:
    """A vector along an axis of a matrix, in the layout of sums, of which it is in the reduced one."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), layout)


@dataclass(frozen=True)
class Visibility:
    """Which positions a query sees beside the causal bound."""

    sliding_window: int | None
    attention_chunk: int | None

    def first(self, position: Any) -> Any:
        """The first position that the query at `position` sees: arrays and kernel scalars."""
        return first_seen(position, self.sliding_window, self.attention_chunk)

    def limit(self, tokens: int) -> int:
        """How many of `tokens` positions one query sees at most."""
        limits = [limit for limit in (self.sliding_window, self.attention_chunk) if limit is not None]
        return min([tokens, *limits])


@dataclass(frozen=True)
class Logits:
    """Scale and soft cap of the logits, in base 2: exp2 is the instruction that the chip has."""

    scale: float
    soft_cap: float | None

    def __call__(self, products: jax.Array) -> jax.Array:
        """f32 q.k of any shape -> logits * log2(e)."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2E)
        # tanh(x) = 1 - 2 / (1 + exp(2x)): within f32's rounding of the cap, which tanh.approx is not.
        exponential = jnp.exp2(products * (2 * LOG2E * self.scale / self.soft_cap))
        cap = self.soft_cap * LOG2E
        return cap - (2 * cap) / (1 + exponential)


@dataclass(frozen=True)
class TileOfKV:
    """Where one tile of KV lies: kernel scalars, positions of the sequence."""

    row: Any  # of the page table
    head: Any  # the KV head
    position: Any  # of the tile's first key
    first: Any  # the first position that anybody sees
    length: Any

    def is_whole(self, tokens: int) -> Any:
        """Whether all of the tile's positions are seen."""
        return (self.position >= self.first) & (self.position + tokens <= self.length)


def copy_tile(
    kv_pages: Ref, scales: Ref, page_table: Ref, tile: TileOfKV, smem: Ref, scales_smem: Ref, ready: Ref
) -> None:
    """Starts the TMA copies of a tile: one a page, K and V together, or of a part of a larger page.

    Pages without any position first ... length - 1 are not read: their arrivals at the barrier come at
    once. smem is [tokens, 2H], scales_smem [2, tokens]; without scales, both are None. The barrier
    expects `copies_a_tile` arrivals.
    """
    tokens, page_size = smem.shape[0], kv_pages.shape[2]
    span = min(page_size, tokens)
    for index in range(max(1, tokens // page_size)):
        begin = tile.position + index * span
        used = (begin < tile.length) & (begin + span > tile.first)
        target = pl.ds(index * span, span)

        @pl.when(used)
        def _(begin: Any = begin, target: Any = target) -> None:
            page = lax.div(begin, jnp.int32(page_size))
            page_id, source = page_table[tile.row, page], pl.ds(begin - page * page_size, span)
            plgpu.copy_gmem_to_smem(kv_pages.at[page_id, tile.head, source], smem.at[target], ready)
            if scales is not None:
                for which in range(2):
                    row = scales.at[page_id, 2 * tile.head + which, source]
                    plgpu.copy_gmem_to_smem(row, scales_smem.at[which, target], ready)

        @pl.when(jnp.logical_not(used))
        def _() -> None:
            for _ in range(1 if scales is None else 3):
                plgpu.barrier_arrive(ready)


def copies_a_tile(tokens: int, page_size: int, *, scaled: bool) -> int:
    """TMA copies that bring one tile: a page's numbers, and its scales of K and of V if any."""
    return max(1, tokens // page_size) * (3 if scaled else 1)


def widen_tile(narrow: Ref, wide: Ref, tile: TileOfKV) -> None:
    """int8 or float8 [tokens, 2H] as two-byte floats, exactly; zeros where nobody looks."""
    tokens, columns = narrow.shape
    for row in range(0, tokens, MMA_ROWS):
        positions = row_positions((MMA_ROWS, SWIZZLE_BYTES), 0, tile.position + row)
        seen = (positions >= tile.first) & (positions < tile.length)
        for column in range(0, columns, SWIZZLE_BYTES):
            part = (pl.ds(row, MMA_ROWS), pl.ds(column, SWIZZLE_BYTES))
            numbers = load(narrow.at[part], plgpu.Layout.WGMMA_UPCAST_2X)
            if narrow.dtype == jnp.float8_e4m3fn:
                numbers = numbers.astype(jnp.float16)  # the only conversion that the chip has
            numbers = plgpu.layout_cast(numbers.astype(wide.dtype), plgpu.Layout.WGMMA)
            wide.at[part][...] = jnp.where(seen, numbers, jnp.zeros_like(numbers))


def clear_unseen(v_smem: Ref, tile: TileOfKV) -> None:
    """Zeroes the rows of V [tokens, H] that nobody sees.

    A weight of 0 does not silence a NaN that another sequence, or nobody, left there.
    """
    tokens, head_dim = v_smem.shape
    for row in range(0, tokens, MMA_ROWS):
        for column in range(0, head_dim, 64):
            part = v_smem.at[pl.ds(row, MMA_ROWS), pl.ds(column, 64)]
            values = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
            positions = row_positions((MMA_ROWS, 64), 0, tile.position + row)
            seen = (positions >= tile.first) & (positions < tile.length)
            part[...] = jnp.where(seen, values, jnp.zeros_like(values))
