"""Prefill: tiles of 64 or 128 queries of one sequence against its pages (FlashAttention 3's shape).

A block takes one tile of queries of one head. Each of its one or two compute warpgroups owns 64 rows,
and a producer warpgroup streams K and V by TMA through a ring of stages. Tiles of KV that none of a
warpgroup's rows see are skipped; masks are applied only where an edge (the diagonal, a window's or a
chunk's start) crosses the tile. The heads of a group run side by side, so that L2 serves their pages.

Tiles of KV start at multiples of their size, and a tile of which a row sees nothing leaves the row
as it was: results depend neither on the chunk nor on the query's place in its tile.

Dims: R query tiles of B rows, N query heads, K kv heads, H head_dim of the pages, T = R * B rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer_kernels.gpu.common import (
    LOG2E,
    MASKED,
    MMA_ROWS,
    Logits,
    TileOfKV,
    Visibility,
    ceil_div,
    clear_unseen,
    compiler_params,
    copies_a_tile,
    copy_tile,
    interpret_params,
    load,
    row_positions,
    spread,
    tiled_smem,
    widen_tile,
)
from jaxinfer_kernels.gpu.targets import Ref, Sums, Target
from jaxinfer_kernels.layout import QueryTiles


def prefill_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    scales: jax.Array | None,
    tiles: QueryTiles,
    *,
    target: Target,
    logits: Logits,
    visibility: Visibility,
    sinks: jax.Array | None,
    kv_tile_tokens: int,
    num_stages: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """q [T, N, H] in tiles of T / R rows -> outputs [T, N, H] and natural log-sum-exps [T, N] f32."""
    num_rows, num_heads, head_dim = q.shape
    kernel = _Prefill(
        target=target,
        logits=logits,
        visibility=visibility,
        group=num_heads // kv_pages.shape[1],
        page_size=kv_pages.shape[2],
        kv_tile=kv_tile_tokens,
        num_stages=num_stages,
        num_warpgroups=num_rows // tiles.start.shape[0] // MMA_ROWS,
        interpret=interpret,
    )
    q = jnp.pad(q, ((0, 0), (0, 0), (0, kv_pages.shape[3] // 2 - head_dim)))
    if sinks is None:
        sinks = jnp.full((num_heads,), MASKED, jnp.float32)
    out, lse = kernel(q, kv_pages, scales, tiles, sinks.astype(jnp.float32))
    return out[..., :head_dim], lse.T


@dataclass(frozen=True)
class _Refs:
    """The kernel's operands, results and scratch, as `plgpu.kernel` hands them over."""

    q: Ref
    kv_pages: Ref
    page_table: Ref
    start: Ref
    kv_len: Ref
    sinks: Ref
    out: Ref
    lse: Ref
    q_smem: Ref  # [warpgroups, 64, H]; the outputs leave through it
    kv_smem: Ref  # [stages, kv_tile, 2H]
    lse_smem: Ref  # [warpgroups, 64]
    q_ready: Ref  # a barrier a warpgroup
    kv_ready: Ref  # a barrier a stage
    kv_landed: Ref  # a tile has come, but wants clearing or widening
    kv_consumed: Ref
    key_sums: Sums
    value_sums: Sums
    scales: Ref = None  # of quantised pages, as what follows
    narrow_smem: Ref = None  # [2, kv_tile, 2H]
    narrow_scales_smem: Ref = None  # [2, 2, kv_tile]
    scales_smem: Ref = None  # [stages, 2, kv_tile]
    weights_smem: Ref = None  # [warpgroups, 64, kv_tile], where registers cannot hold them


@dataclass(frozen=True)
class _Block:
    """One block's part of the work, as kernel scalars. Positions are of the sequence."""

    tile: Any
    head: Any
    start: Any  # of the first query
    length: Any
    first: Any  # the first position that any query sees
    begin: Any  # of the first tile of KV
    num_tiles: Any


@dataclass(frozen=True)
class _Prefill:
    target: Target
    logits: Logits
    visibility: Visibility
    group: int
    page_size: int
    kv_tile: int
    num_stages: int
    num_warpgroups: int
    interpret: Any

    def __call__(
        self,
        q: jax.Array,
        kv_pages: jax.Array,
        scales: jax.Array | None,
        tiles: QueryTiles,
        sinks: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """q [T, N, H] -> outputs [T, N, H] and log-sum-exps [N, T]."""
        num_rows, num_heads, head_dim = q.shape
        stages, warpgroups = self.num_stages, self.num_warpgroups
        copies = copies_a_tile(self.kv_tile, self.page_size, scaled=scales is not None)
        swizzle, value_columns = self.target.swizzle_bytes, self.target.value_columns(head_dim)
        scratch_types: dict[str, Any] = dict(
            q_smem=tiled_smem((warpgroups, MMA_ROWS, head_dim), q.dtype, swizzle),
            kv_smem=tiled_smem((stages, self.kv_tile, 2 * head_dim), q.dtype, swizzle),
            lse_smem=plgpu.SMEM((warpgroups, MMA_ROWS), jnp.float32),
            q_ready=plgpu.Barrier(num_barriers=warpgroups),
            kv_ready=plgpu.Barrier(num_arrivals=copies if scales is None else 1, num_barriers=stages),
            kv_landed=plgpu.Barrier(num_arrivals=copies, num_barriers=1 if scales is None else 2),
            kv_consumed=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            key_sums=self.target.sums((MMA_ROWS, self.kv_tile), 1, warpgroups),
            value_sums=self.target.sums((MMA_ROWS, value_columns[0].stop), len(value_columns), warpgroups),
        )
        if scales is not None:
            narrow = (2, self.kv_tile, 2 * head_dim)
            scratch_types["narrow_smem"] = tiled_smem(narrow, kv_pages.dtype)
            scratch_types["narrow_scales_smem"] = plgpu.SMEM((2, 2, self.kv_tile), jnp.float32)
            scratch_types["scales_smem"] = plgpu.SMEM((stages, 2, self.kv_tile), jnp.float32)
        if self.interpret or not self.target.weights_in_registers:
            weights = (warpgroups, MMA_ROWS, self.kv_tile)
            scratch_types["weights_smem"] = tiled_smem(weights, q.dtype, swizzle)
        run = plgpu.kernel(
            self._body,
            out_type=(
                jax.ShapeDtypeStruct(q.shape, q.dtype),
                jax.ShapeDtypeStruct((num_heads, num_rows), jnp.float32),
            ),
            scratch_types=scratch_types,
            grid=(num_heads, tiles.start.shape[0]),
            grid_names=("head", "tile"),
            num_threads=warpgroups + 1,
            thread_name="warpgroup",
            kernel_name="paged_attention_prefill",
            compiler_params=compiler_params(reduction_scratch_bytes=0),
            interpret=interpret_params(self.interpret),
        )
        scaled = () if scales is None else (scales,)
        return run(q, kv_pages, tiles.page_table, tiles.start, tiles.kv_len, sinks, *scaled)

    def _body(self, *refs: Ref, **scratch: Ref) -> None:
        *inputs, out, lse = refs
        names = ("q", "kv_pages", "page_table", "start", "kv_len", "sinks", "scales")
        r = _Refs(**dict(zip(names, inputs, strict=False)), out=out, lse=lse, **scratch)
        tile = lax.axis_index("tile")
        start, length = r.start[tile], r.kv_len[tile]
        first = self.visibility.first(start)
        begin = first - lax.rem(first, jnp.int32(self.kv_tile))
        block = _Block(
            tile=tile,
            head=lax.axis_index("head"),
            start=start,
            length=length,
            first=first,
            begin=begin,
            num_tiles=ceil_div(jnp.maximum(length - begin, 0), self.kv_tile),
        )
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == self.num_warpgroups)
        def _() -> None:
            self._produce(r, block)

        @pl.when(warpgroup < self.num_warpgroups)
        def _() -> None:
            self._consume(r, block, warpgroup)

    def _produce(self, r: _Refs, block: _Block) -> None:
        """Brings the block's tiles of K and V into the stages, as they become free."""
        if r.scales is None:
            plgpu.set_max_registers(40, action="decrease")
            lax.fori_loop(0, block.num_tiles, lambda index, _: self._stream(r, block, index), None)
            return
        plgpu.set_max_registers(72, action="decrease")
        pl.when(block.num_tiles > 0)(lambda: self._copy_narrow(r, block, jnp.int32(0)))
        lax.fori_loop(0, block.num_tiles, lambda index, _: self._widen(r, block, index), None)

    def _tile(self, block: _Block, index: Any) -> TileOfKV:
        position = block.begin + index * self.kv_tile
        head = lax.div(block.head, jnp.int32(self.group))
        return TileOfKV(block.tile, head, position, block.first, block.length)

    def _wait_until_free(self, r: _Refs, index: Any) -> Any:
        """The stage of a tile, once the one before it there is done with."""
        stage = lax.rem(index, jnp.int32(self.num_stages))

        @pl.when(index >= self.num_stages)
        def _() -> None:
            plgpu.barrier_wait(r.kv_consumed.at[stage])

        return stage

    def _stream(self, r: _Refs, block: _Block, index: Any) -> None:
        """Copies a tile straight into its stage; clears one that an edge crosses."""
        tile, stage = self._tile(block, index), self._wait_until_free(r, index)
        smem, ready, landed = r.kv_smem.at[stage], r.kv_ready.at[stage], r.kv_landed.at[0]

        @pl.when(tile.is_whole(self.kv_tile))
        def _() -> None:
            copy_tile(r.kv_pages, None, r.page_table, tile, smem, None, ready)

        @pl.when(jnp.logical_not(tile.is_whole(self.kv_tile)))
        def _() -> None:
            copy_tile(r.kv_pages, None, r.page_table, tile, smem, None, landed)
            plgpu.barrier_wait(landed)
            head_dim = r.q_smem.shape[2]
            clear_unseen(smem.at[:, pl.ds(head_dim, head_dim)], tile)
            plgpu.commit_smem()
            for _ in range(copies_a_tile(self.kv_tile, self.page_size, scaled=False)):
                plgpu.barrier_arrive(ready)

    def _copy_narrow(self, r: _Refs, block: _Block, index: Any) -> None:
        slot = lax.rem(index, jnp.int32(2))
        smem, scales_smem = r.narrow_smem.at[slot], r.narrow_scales_smem.at[slot]
        tile = self._tile(block, index)
        copy_tile(r.kv_pages, r.scales, r.page_table, tile, smem, scales_smem, r.kv_landed.at[slot])

    def _widen(self, r: _Refs, block: _Block, index: Any) -> None:
        """Starts the copy of the next quantised tile, and widens this one into its stage."""
        pl.when(index + 1 < block.num_tiles)(lambda: self._copy_narrow(r, block, index + 1))
        slot, stage = lax.rem(index, jnp.int32(2)), self._wait_until_free(r, index)
        plgpu.barrier_wait(r.kv_landed.at[slot])
        tile, by_row = self._tile(block, index), plgpu.Layout.WGMMA.reduce(1)
        widen_tile(r.narrow_smem.at[slot], r.kv_smem.at[stage], tile)
        for row in range(0, self.kv_tile, MMA_ROWS):
            part = pl.ds(row, MMA_ROWS)
            positions = tile.position + row + plgpu.broadcasted_iota(jnp.int32, (MMA_ROWS,), 0, layout=by_row)
            seen = (positions >= tile.first) & (positions < tile.length)
            for which in range(2):
                scales = load(r.narrow_scales_smem.at[slot, which, part], by_row)
                # Those that nobody wrote may be NaN.
                r.scales_smem.at[stage, which, part][...] = jnp.where(seen, scales, 0.0)
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.kv_ready.at[stage])

    def _consume(self, r: _Refs, block: _Block, warpgroup: Any) -> None:
        """Attends the warpgroup's 64 rows to the tiles that they see."""
        plgpu.set_max_registers(232 if r.scales is None else 216, action="increase")
        value_columns = self.target.value_columns(r.q_smem.shape[2])
        rows = pl.ds(block.tile * (self.num_warpgroups * MMA_ROWS) + warpgroup * MMA_ROWS, MMA_ROWS)
        q_smem, lse_smem = r.q_smem.at[warpgroup], r.lse_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(r.q.at[rows, block.head], q_smem, r.q_ready.at[warpgroup])
        plgpu.barrier_wait(r.q_ready.at[warpgroup])

        by_row = plgpu.Layout.WGMMA.reduce(1)
        carry = (
            plgpu.layout_cast(jnp.full((MMA_ROWS,), -jnp.inf, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((MMA_ROWS,), jnp.float32), by_row),
            tuple(
                plgpu.layout_cast(
                    jnp.zeros((MMA_ROWS, part.stop - part.start), jnp.float32), plgpu.Layout.WGMMA
                )
                for part in value_columns
            ),
        )
        maximum, total, accs = self._attend_tiles(r, block, warpgroup, carry)

        sink = r.sinks[block.head] * LOG2E
        final = jnp.maximum(maximum, sink)
        rescale = jnp.exp2(maximum - final)
        total = total * rescale + jnp.exp2(sink - final)
        # A warpgroup of padding alone has seen nothing.
        factor = rescale / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        for part, acc in zip(value_columns, accs, strict=True):
            columns = q_smem.at[:, pl.ds(part.start, acc.shape[1])]
            columns[...] = (acc * spread(factor, acc.shape, 0)).astype(q_smem.dtype)
        lse_smem[...] = final / LOG2E + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, r.out.at[rows, block.head])
        plgpu.copy_smem_to_gmem(lse_smem, r.lse.at[block.head, rows])
        plgpu.wait_smem_to_gmem(0)

    def _attend_tiles(self, r: _Refs, block: _Block, warpgroup: Any, carry: Any) -> Any:
        """Runs the block's tiles: released unseen, then masked, whole, masked, released again."""
        top = block.start + warpgroup * MMA_ROWS
        masked, whole, diagonal, end = seen_tiles(
            self.visibility, self.kv_tile, block.begin, top, jnp.minimum(top + MMA_ROWS, block.length)
        )

        def release(index: Any, _: None) -> None:
            stage = lax.rem(index, jnp.int32(self.num_stages))
            # Waiting keeps the warpgroups within one round of each other, as the barriers' counts need.
            plgpu.barrier_wait(r.kv_ready.at[stage])
            plgpu.barrier_arrive(r.kv_consumed.at[stage])

        def attend(mask: bool) -> Any:
            return lambda index, carry: self._attend_tile(r, block, warpgroup, top, index, carry, mask)

        if self.visibility != Visibility(None, None):
            lax.fori_loop(0, masked, release, None)
            carry = lax.fori_loop(masked, whole, attend(True), carry)
        carry = lax.fori_loop(whole, diagonal, attend(False), carry)
        carry = lax.fori_loop(diagonal, end, attend(True), carry)
        lax.fori_loop(end, block.num_tiles, release, None)
        return carry

    def _attend_tile(
        self, r: _Refs, block: _Block, warpgroup: Any, top: Any, index: Any, carry: Any, mask: bool
    ) -> Any:
        """One step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867)."""
        maximum, total, accs = carry
        # 0, which the compiler does not know: what depends on it stays in the loop. It would else keep the
        # addresses of all operands of the products in registers, of which wide heads leave it none.
        zero = lax.div(index, jnp.int32(1 << 24))
        stage = lax.rem(index, jnp.int32(self.num_stages)) + zero
        shape, head_dim = (MMA_ROWS, self.kv_tile), r.q_smem.shape[2]
        keys = r.kv_smem.at[stage, :, pl.ds(0, head_dim)]
        values = r.kv_smem.at[stage, :, pl.ds(head_dim, head_dim)]
        plgpu.barrier_wait(r.kv_ready.at[stage])

        queries = r.q_smem.at[warpgroup + zero]
        products = self.target.multiply(r.key_sums, queries, keys.T, warpgroup)
        by_column = plgpu.Layout.WGMMA.reduce(0)
        if r.scales is not None:
            k_scales = load(r.scales_smem.at[stage, 0], by_column)
            products *= spread(k_scales, shape, 1)
        logits = self.logits(products)
        if mask:
            rows = row_positions(shape, 0, top)
            positions = row_positions(shape, 1, block.begin + index * self.kv_tile)
            # The length matters to rows of padding, whose own positions lie past it.
            seen = (positions <= rows) & (positions < block.length)
            if self.visibility != Visibility(None, None):
                seen &= positions >= self.visibility.first(rows)
            logits = jnp.where(seen, logits, MASKED)
        new_maximum = jnp.maximum(maximum, logits.max(axis=1))
        weights = jnp.exp2(logits - spread(new_maximum, shape, 0))
        rescale = jnp.exp2(maximum - new_maximum)
        total = total * rescale + weights.sum(axis=1)
        accs = tuple(acc * spread(rescale, acc.shape, 0) for acc in accs)
        if r.scales is not None:
            v_scales = load(r.scales_smem.at[stage, 1], by_column)
            weights *= spread(v_scales, shape, 1)
        accs = self._add_weighted(r, warpgroup, accs, weights.astype(r.kv_smem.dtype), values)
        plgpu.barrier_arrive(r.kv_consumed.at[stage])
        return new_maximum, total, accs

    def _add_weighted(
        self, r: _Refs, warpgroup: Any, accs: tuple[jax.Array, ...], weights: jax.Array, values: Ref
    ) -> tuple[jax.Array, ...]:
        """accs + weights @ values, by parts of the values."""
        if r.weights_smem is None:
            accumulate: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))
            return (accumulate(plgpu.WGMMAAccumulatorRef.init(*accs)),)
        weights_smem = r.weights_smem.at[warpgroup]
        weights_smem[...] = weights
        plgpu.commit_smem()
        parts = self.target.value_columns(r.q_smem.shape[2])
        columns = [values.at[:, pl.ds(part.start, part.stop - part.start)] for part in parts]
        pairs = [(weights_smem, part) for part in columns]
        return self.target.add_products(accs, r.value_sums, pairs, warpgroup)


def seen_tiles(
    visibility: Visibility, kv_tile: int, begin: Any, top: Any, bottom: Any
) -> tuple[Any, Any, Any, Any]:
    """Which tiles the 64 rows at positions from `top` see, of those that start at `begin`.

    Args:
      visibility: of the layer.
      kv_tile: positions a tile.
      begin: of the first tile; at most what the first row sees first.
      top: position of the first row.
      bottom: one past the last row that is no padding.

    Returns:
      The first tile that a row sees, the first that all see whole, the first that the diagonal
      crosses, and one past the last; whole tiles may be none.
    """

    def tiles_before(position: Any) -> Any:
        return lax.div(jnp.maximum(position - begin, 0), jnp.int32(kv_tile))

    end = jnp.where(bottom > top, tiles_before(bottom + (kv_tile - 1)), 0)
    first = jnp.minimum(tiles_before(visibility.first(top)), end)
    whole = tiles_before(visibility.first(top + (MMA_ROWS - 1)) + (kv_tile - 1))
    whole = jnp.clip(whole, first, end)
    return first, whole, jnp.clip(tiles_before(top + 1), whole, end), end
