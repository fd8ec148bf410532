"""Decode: one query a sequence against its pages, split over the chip and merged.

Memory-bound, so everything serves the stream of pages. A persistent grid takes work items (one split of
one sequence, one KV head) from a list made once a step; in each block a producer warpgroup copies pages
by TMA into a ring of stages, across the borders of items, while one warpgroup computes. The tile of KV
sits on the products' M side (64 rows on Hopper, 128 on Blackwell) and the group's queries on their N side,
of which 8 suffice (16).

Splits are made and merged in splits.py.

Dims: R sequences, N query heads, K kv heads, G queries a kv head, n = G up to a multiple of that,
H head_dim of the pages, I splits in all, B blocks of n queries that attend to pages together, W columns of a
page's row, D of a key, V of a value.
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
    MASKED,
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
from jaxinfer_kernels.gpu.splits import WorkList, make_work_list, merge_splits
from jaxinfer_kernels.gpu.targets import Ref, Sums, Target
from jaxinfer_kernels.layout import QueryTiles

SKEW = 4  # numbers between rows of results, so that what is stored transposed meets all banks


def decode_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    scales: jax.Array | None,
    tiles: QueryTiles,
    *,
    target: Target,
    logits: Logits,
    visibility: Visibility,
    sinks: jax.Array | None,
    num_blocks: int,
    num_stages: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """q [R, N, H], one query a sequence -> outputs [R, N, H] and natural log-sum-exps [R, N] f32."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv_pages.shape[1]
    group = num_heads // num_kv_heads
    padding = (-group % target.columns, kv_pages.shape[3] // 2 - head_dim)
    queries = q.reshape(num_rows, num_kv_heads, group, head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padding[0]), (0, padding[1])))
    max_tokens = tiles.page_table.shape[1] * kv_pages.shape[2]
    work = make_work_list(tiles.kv_len, max_tokens, visibility, target.rows)
    kernel = DecodeKernel(
        target=target,
        logits=logits,
        visibility=visibility,
        values=(kv_pages.shape[3] // 2, kv_pages.shape[3]),
        queries=group,
        num_blocks=num_blocks,
        num_stages=num_stages,
        interpret=interpret,
    )
    partial_out, partial_lse = kernel(queries, kv_pages, scales, tiles, work)
    return merge_splits(partial_out, partial_lse, work, sinks, q)


@dataclass(frozen=True)
class _Refs:
    """The kernel's operands, results and scratch, as `plgpu.kernel` hands them over."""

    q: Ref  # [R, B, n, D]
    kv_pages: Ref
    page_table: Ref
    kv_len: Ref
    num_items: Ref
    rows: Ref
    begins: Ref
    ends: Ref
    out: Ref
    lse: Ref
    q_smem: Ref  # [2, n, D]
    kv_smem: Ref  # [stages, tile, W], as in the pages
    weights_smem: Ref  # [n, tile]
    out_smem: Ref  # [n, rows of the products and SKEW], V of which are the values'
    lse_smem: Ref  # [n]
    q_ready: Ref  # two barriers
    q_consumed: Ref
    kv_ready: Ref  # a barrier a stage
    kv_consumed: Ref
    key_sums: Sums
    value_sums: Sums
    scales: Ref = None  # of quantised pages, as what follows
    scales_smem: Ref = None  # [stages, 2, tile]
    wide_smem: Ref = None  # [tile, W]


@dataclass(frozen=True)
class _Item:
    """One split of one sequence and one block of queries, as kernel scalars. Positions are the sequence's."""

    tile_tokens: int
    split: Any  # its index in the work list
    row: Any
    block: Any  # of queries
    head: Any  # of the pages
    begin: Any
    num_tiles: Any
    first: Any  # the first position that the query sees
    length: Any
    q_slot: Any

    def tile(self, index: Any) -> TileOfKV:
        return TileOfKV(self.row, self.head, self.begin + index * self.tile_tokens, self.first, self.length)


@dataclass(frozen=True)
class DecodeKernel:
    """The kernel for pages whose rows hold a key, as wide as the queries, and somewhere a value.

    Attributes:
      target: the generation of GPUs.
      logits, visibility: of the layer.
      values: the first column of a page's row that is the value's, and one past the last.
      queries: how many of a block's n are no padding.
      num_blocks: of the grid.
      num_stages: tiles of KV in shared memory.
      interpret: False, True or jax's parameters.
    """

    target: Target
    logits: Logits
    visibility: Visibility
    values: tuple[int, int]
    queries: int
    num_blocks: int
    num_stages: int
    interpret: Any

    def __call__(
        self,
        q: jax.Array,
        kv_pages: jax.Array,
        scales: jax.Array | None,
        tiles: QueryTiles,
        work: WorkList,
    ) -> tuple[jax.Array, jax.Array]:
        """Attends the queries to their splits.

        Args:
          q: [R, B, n, D]; B is a multiple of the pages' heads, and neighbours share one.
          kv_pages: [pages, K, page_size, W].
          scales: [pages, 2K, page_size] of quantised pages, else None.
          tiles: page tables and lengths of the rows.
          work: the splits.

        Returns:
          Normalised outputs [I, B, queries, V] f32 and base-2 log-sum-exps [I, B, n].
        """
        num_items, (query_blocks, columns, head_dim) = work.row.shape[0], q.shape[1:]
        stages, width, tile_tokens = self.num_stages, kv_pages.shape[3], self.target.rows
        parts = self.target.value_rows(self.values)
        rows = parts[-1].stop - parts[0].start + SKEW
        copies = copies_a_tile(tile_tokens, kv_pages.shape[2], scaled=scales is not None)
        scratch_types: dict[str, Any] = dict(
            q_smem=tiled_smem((2, columns, head_dim), q.dtype),
            kv_smem=tiled_smem((stages, tile_tokens, width), kv_pages.dtype),
            weights_smem=tiled_smem((columns, tile_tokens), q.dtype),
            out_smem=plgpu.SMEM((columns, rows), jnp.float32),
            lse_smem=plgpu.SMEM((columns,), jnp.float32),
            q_ready=plgpu.Barrier(num_barriers=2),
            q_consumed=plgpu.Barrier(num_barriers=2),
            kv_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            kv_consumed=plgpu.Barrier(num_barriers=stages),
            key_sums=self.target.sums((tile_tokens, columns), 1),
            value_sums=self.target.sums((tile_tokens, columns), len(parts)),
        )
        if scales is not None:
            scratch_types["scales_smem"] = plgpu.SMEM((stages, 2, tile_tokens), jnp.float32)
            scratch_types["wide_smem"] = tiled_smem((tile_tokens, width), q.dtype)
        run = plgpu.kernel(
            self._body,
            out_type=(
                jax.ShapeDtypeStruct((num_items, query_blocks, self.queries, rows), jnp.float32),
                jax.ShapeDtypeStruct((num_items, query_blocks, columns), jnp.float32),
            ),
            scratch_types=scratch_types,
            grid=(self.num_blocks,),
            grid_names=("block",),
            num_threads=2,
            thread_name="warpgroup",
            kernel_name="paged_attention_decode",
            compiler_params=compiler_params(reduction_scratch_bytes=2048),
            interpret=interpret_params(self.interpret),
        )
        lists = (work.num_items, work.row, work.begin, work.end)
        scaled = () if scales is None else (scales,)
        out, lse = run(q, kv_pages, tiles.page_table, tiles.kv_len, *lists, *scaled)
        first, last = (column - parts[0].start for column in self.values)
        return out[..., first:last], lse

    def _body(self, *refs: Ref, **scratch: Ref) -> None:
        *inputs, out, lse = refs
        names = ("q", "kv_pages", "page_table", "kv_len", "num_items", "rows", "begins", "ends", "scales")
        r = _Refs(**dict(zip(names, inputs, strict=False)), out=out, lse=lse, **scratch)
        left = r.num_items[0] * r.q.shape[1] - lax.axis_index("block")
        num_items = ceil_div(jnp.maximum(left, 0), self.num_blocks)  # items are dealt in turn
        for warpgroup, part in enumerate((self._attend_item, self._fetch_item)):

            @pl.when(lax.axis_index("warpgroup") == warpgroup)
            def _(part: Any = part) -> None:
                lax.fori_loop(0, num_items, lambda index, step: part(r, index, step), jnp.int32(0))

        # The last results must have left the shared memory before the block ends.
        plgpu.wait_smem_to_gmem(0)

    def _item(self, r: _Refs, index: Any) -> _Item:
        """The block's item of this index; queries of one split are neighbours in the grid."""
        query_blocks, num_kv_heads = r.q.shape[1], r.kv_pages.shape[1]
        flat = lax.axis_index("block") + index * self.num_blocks
        split = lax.div(flat, jnp.int32(query_blocks))
        row, begin = r.rows[split], r.begins[split]
        length = r.kv_len[row]
        block = flat - split * query_blocks
        return _Item(
            tile_tokens=self.target.rows,
            split=split,
            row=row,
            block=block,
            head=lax.div(block, jnp.int32(query_blocks // num_kv_heads)),
            begin=begin,
            num_tiles=ceil_div(r.ends[split] - begin, self.target.rows),
            first=self.visibility.first(length - 1),
            length=length,
            q_slot=lax.rem(index, jnp.int32(2)),
        )

    def _fetch_item(self, r: _Refs, index: Any, step: Any) -> Any:
        """Starts the copies of one item. `step` counts the block's tiles; returns the next one's."""
        item = self._item(r, index)

        @pl.when(index >= 2)
        def _() -> None:
            plgpu.barrier_wait(r.q_consumed.at[item.q_slot])

        plgpu.copy_gmem_to_smem(
            r.q.at[item.row, item.block], r.q_smem.at[item.q_slot], r.q_ready.at[item.q_slot]
        )

        def fetch(tile: Any, step: Any) -> Any:
            stage = lax.rem(step, jnp.int32(self.num_stages))

            @pl.when(step >= self.num_stages)
            def _() -> None:
                plgpu.barrier_wait(r.kv_consumed.at[stage])

            smem, ready = r.kv_smem.at[stage], r.kv_ready.at[stage]
            scales_smem = None if r.scales is None else r.scales_smem.at[stage]
            copy_tile(r.kv_pages, r.scales, r.page_table, item.tile(tile), smem, scales_smem, ready)
            return step + 1

        return lax.fori_loop(0, item.num_tiles, fetch, step)

    def _attend_item(self, r: _Refs, index: Any, step: Any) -> Any:
        """Attends to one item's tiles and stores its part of the output. See `_fetch_item`."""
        item = self._item(r, index)
        layout, columns = self.target.layout, r.out_smem.shape[0]
        parts = self.target.value_rows(self.values)
        plgpu.barrier_wait(r.q_ready.at[item.q_slot])
        by_column = layout.reduce(0)
        carry = (
            step,
            plgpu.layout_cast(jnp.full((columns,), -jnp.inf, jnp.float32), by_column),
            plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), by_column),
            tuple(
                plgpu.layout_cast(jnp.zeros((part.stop - part.start, columns), jnp.float32), layout)
                for part in parts
            ),
        )
        step, maximum, total, accs = lax.fori_loop(
            0, item.num_tiles, lambda tile, carry: self._attend_tile(r, item, tile, carry), carry
        )
        plgpu.barrier_arrive(r.q_consumed.at[item.q_slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for index, acc in enumerate(accs):
            rows = pl.ds(index * acc.shape[0], acc.shape[0])
            out = plgpu.layout_cast(acc / spread(total, acc.shape, 1, layout), self.target.transposed)
            r.out_smem.at[:, rows].T[...] = out
        r.lse_smem[...] = maximum + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(r.out_smem.at[pl.ds(0, self.queries)], r.out.at[item.split, item.block])
        plgpu.copy_smem_to_gmem(r.lse_smem, r.lse.at[item.split, item.block])
        return step

    def _attend_tile(self, r: _Refs, item: _Item, tile: Any, carry: Any) -> Any:
        """One step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867), transposed."""
        step, maximum, total, accs = carry
        stage = lax.rem(step, jnp.int32(self.num_stages))
        place, layout, tile_tokens = item.tile(tile), self.target.layout, self.target.rows
        shape = (tile_tokens, r.q_smem.shape[1])
        plgpu.barrier_wait(r.kv_ready.at[stage])
        kv_smem, k_scales, v_scales = r.kv_smem.at[stage], None, None
        if r.scales is not None:
            kv_smem, by_row = r.wide_smem, layout.reduce(1)
            k_scales, v_scales = (load(r.scales_smem.at[stage, i], by_row) for i in range(2))
            widen_tile(r.kv_smem.at[stage], kv_smem, place)
            plgpu.commit_smem()
            plgpu.barrier_arrive(r.kv_consumed.at[stage])
        keys, queries = kv_smem.at[:, pl.ds(0, r.q_smem.shape[2])], r.q_smem.at[item.q_slot].T
        products = self.target.multiply(r.key_sums, keys, queries)
        if k_scales is not None:
            products *= spread(k_scales, shape, 0, layout)
        positions = row_positions(shape, 0, place.position, layout)
        seen = (positions >= item.first) & (positions < item.length)
        logits = jnp.where(seen, self.logits(products), MASKED)
        new_maximum = jnp.maximum(maximum, logits.max(axis=0))
        weights = jnp.exp2(logits - spread(new_maximum, shape, 1, layout))
        rescale = jnp.exp2(maximum - new_maximum)
        total = total * rescale + weights.sum(axis=0)
        if v_scales is not None:
            weights = jnp.where(seen, weights * spread(v_scales, shape, 0, layout), 0.0)
        weights = plgpu.layout_cast(weights.astype(r.weights_smem.dtype), self.target.transposed)
        r.weights_smem.T[...] = weights

        if r.scales is None:

            @pl.when(jnp.logical_not(place.is_whole(tile_tokens)))
            def _() -> None:
                clear_unseen(kv_smem.at[:, pl.ds(self.values[0], self.values[1] - self.values[0])], place)

        plgpu.commit_smem()
        parts = self.target.value_rows(self.values)
        values = [kv_smem.at[:, pl.ds(part.start, part.stop - part.start)].T for part in parts]
        accs = tuple(acc * spread(rescale, acc.shape, 1, layout) for acc in accs)
        pairs = [(value, r.weights_smem.T) for value in values]
        accs = self.target.add_products(accs, r.value_sums, pairs)
        if r.scales is None:
            plgpu.barrier_arrive(r.kv_consumed.at[stage])
        return step + 1, new_maximum, total, accs
