"""The body of the TPU's prefill kernel.

The grid passes over the tiles twice. The first pass writes their rows: whole groups of a page's rows are
copied from HBM to HBM, all on their way together; a group that a tile fills in part is read, merged and
written back before the next, since the tiles of one sequence may share it. The second pass attends, with
nothing to wait for between tiles of one sequence. A block in which every query of the tile sees every
position passes without masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels.tpu.attention_body import Blocks, Body
from jaxinfer_kernels.tpu.attention_layout import LANES
from jaxinfer_kernels.tpu.attention_pipeline import join_scales, part_of_page
from jaxinfer_kernels.tpu.attention_softmax import LOG2_E, Ref, Scalar, silence_values


@dataclass(frozen=True, kw_only=True)
class PrefillBlocks(Blocks):
    """Block sizes of the prefill kernel.

    Attributes:
      compute_rows: query rows that are computed at once, at most; heads of a group share a pass.
      part_rows: rows of a part of a tile. Each part of several skips halves of blocks that it does not see.
    """

    compute_rows: int
    part_rows: int


@dataclass(frozen=True)
class Pass:
    """Query rows that are computed at once: some heads of a group, each with some of the tile's rows.

    Attributes:
      head: the kv head.
      part: which of the tile's parts they belong to, where they are passed by parts.
      rows: where they lie among the head's.
    """

    head: Scalar
    part: Scalar
    rows: pl.Slice


@dataclass(frozen=True, kw_only=True)
class PrefillBody(Body):
    """One step of the grid."""

    blocks: PrefillBlocks
    num_tiles: int  # R
    tile_rows: int  # B
    phase: Scalar
    tile: Scalar
    start: Ref

    def first_seen(self, item: Scalar) -> Scalar:
        return self.options.first_seen(self.start[item])

    def page_id(self, item: Scalar, page: Scalar) -> Scalar:
        """From the table of this tile or of the next one."""
        here, there = (table[0, page] for table in self.page_tables)
        return jnp.where(item > self.tile, there, here)

    # --- The new tokens -----------------------------------------------------------------------------

    def group_of(self, name: str) -> int:
        """Positions that are written at once."""
        return self.page_size if name == "scales" else self.inputs["new_kv"].shape[3]

    def write_new(self) -> None:
        """Starts or completes the copies of the tile's rows to their pages."""
        start, kv_len = self.start[self.tile], self.kv_len[self.tile]
        for name, pool in self.pools.items():
            group = self.group_of(name)
            base = start - lax.rem(start, group)
            num_groups = jnp.where(kv_len > start, lax.div(kv_len - base + group - 1, group), 0)
            write = partial(self.write_group, name, pool, group, base)
            lax.fori_loop(0, num_groups, write, None)

    def write_group(self, name: str, pool: Ref, group: int, base: Scalar, index: Scalar, _: None) -> None:
        """One group of those from position `base` on."""
        position = base + index * group
        page = lax.div(position, self.page_size)
        old = part_of_page(pool, self.page_id(self.tile, page), position - page * self.page_size, group)
        new = self.inputs[f"new_{name}"].at[self.tile, index]
        whole = (position >= self.start[self.tile]) & (position + group <= self.kv_len[self.tile])
        pl.when(whole)(lambda: self.write_whole(name, new, old))
        pl.when(jnp.logical_not(whole))(lambda: self.write_merged(name, new, old, position))

    def write_whole(self, name: str, new: Ref, old: Ref) -> None:
        pltpu.make_async_copy(new, old, self.scratch["write_sem"].at[0]).start()
        writing = self.scratch[f"writing_{name}"]
        writing[0] = writing[0] + 1

    def write_merged(self, name: str, new: Ref, old: Ref, position: Scalar) -> None:
        merged, before = self.scratch[f"merged_{name}"], self.scratch[f"old_{name}"]
        sems = self.scratch["merge_sems"]
        reads = (
            pltpu.make_async_copy(old, before, sems.at[0]),
            pltpu.make_async_copy(new, merged, sems.at[1]),
        )
        for read in reads:
            read.start()
        for read in reads:
            read.wait()
        # Positions of numbers are rows; of scales they are lanes, once for K and once for V.
        at = position + lax.rem(lax.broadcasted_iota(jnp.int32, before.shape, 1), self.page_size)
        is_new = (at >= self.start[self.tile]) & (at < self.kv_len[self.tile])
        rows = jnp.where(is_new, merged[...].astype(jnp.float32), before[...].astype(jnp.float32))
        merged[...] = rows.astype(merged.dtype)
        write = pltpu.make_async_copy(merged, old, sems.at[0])
        write.start()
        write.wait()

    def wait_writes(self) -> None:
        """Waits for the copies of whole groups, of all tiles."""
        for name, pool in self.pools.items():
            part = part_of_page(pool, jnp.int32(0), jnp.int32(0), self.group_of(name))
            copy = pltpu.make_async_copy(part, part, self.scratch["write_sem"].at[0])
            lax.fori_loop(0, self.scratch[f"writing_{name}"][0], lambda _, __, copy=copy: copy.wait(), None)

    # --- Attention ----------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        return self.tile_rows // self.blocks.part_rows

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.inputs["q"].shape[1] // self.tile_rows

    def each_pass(self, rows: int, body: Callable[[Pass], None]) -> None:
        """Calls body for all of the tile's query rows, in parts of so many rows of each head."""
        heads = max(
            n
            for n in range(1, self.group + 1)
            if self.group % n == 0 and (n == 1 or n * rows <= self.blocks.compute_rows)
        )
        passes_a_part = self.group // heads
        passes = passes_a_part * (self.tile_rows // rows)

        def call(index: Scalar, _: None) -> None:
            in_head = lax.rem(index, passes)
            at = pl.multiple_of(in_head * (heads * rows), heads * rows)
            part = lax.div(in_head, passes_a_part)
            body(Pass(lax.div(index, passes), part, pl.ds(at, heads * rows)))

        count = self.num_kv_heads * passes
        unroll = self.blocks.unroll if count % self.blocks.unroll == 0 else 1
        lax.fori_loop(0, count, call, None, unroll=unroll)

    def run_block(self, block: Scalar, buffer: Scalar) -> None:
        """All computed blocks of a fetched block in which any query of the tile sees something."""
        f, c = self.blocks.fetch_tokens, self.blocks.compute_tokens
        self.wait_fetch(self.tile, block, buffer)
        if "scales" in self.pools:
            join_scales(self.scratch["scales"].at[buffer], self.scratch["joined_scales"], self.page_size)
        start, kv_len = self.start[self.tile], self.kv_len[self.tile]
        first = self.first_seen(self.tile)
        last_first = self.options.first_seen(kv_len - 1)  # what the tile's last query sees first
        kv = self.scratch["kv"].at[buffer]

        def attend(index: Scalar, _: None) -> None:
            position = index * c
            rows = pl.ds(pl.multiple_of(position - block * f, c), c)

            @pl.when((first > position) | (kv_len < position + c))
            def _() -> None:
                at = position + lax.broadcasted_iota(jnp.int32, (c, self.lanes.num_values), 0)
                silence_values(kv, rows, self.lanes.values, (at >= first) & (at < kv_len))

            whole = (position + c - 1 <= start) & (position >= last_first)

            @pl.when(whole)
            def _() -> None:
                self.each_pass(self.tile_rows, lambda p: self.attend(p, kv, rows, slice(0, c), None))

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                self.each_pass(self.blocks.part_rows, lambda p: self.attend_edge(p, kv, rows, position))

        lax.fori_loop(*self.computed_blocks(self.tile, block), attend, None)

    def attend_edge(self, queries: Pass, kv: Ref, rows: pl.Slice, position: Scalar) -> None:
        """A computed block that begins at `position`, of which each part of several takes what it sees.

        The half that a part leaves out would only add zeros, so that no sum depends on where tiles begin.
        """
        c = self.blocks.compute_tokens
        if self.num_parts == 1:
            self.attend(queries, kv, rows, slice(0, c), position)
            return
        begin = self.start[self.tile] + queries.part * self.blocks.part_rows
        end = jnp.minimum(begin + self.blocks.part_rows, self.kv_len[self.tile])
        first, middle = self.options.first_seen(begin), position + c // 2
        has_queries = begin < end
        low = has_queries & (first < middle) & (end > position)
        high = has_queries & (first < position + c) & (end > middle)
        for wanted, part in (
            (low & high, slice(0, c)),
            (low & jnp.logical_not(high), slice(0, c // 2)),
            (high & jnp.logical_not(low), slice(c // 2, c)),
        ):
            pl.when(wanted)(partial(self.attend, queries, kv, rows, part, position))

    def attend(self, queries: Pass, kv: Ref, rows: pl.Slice, part: slice, position: Scalar | None) -> None:
        """A part of a computed block; `position`, where the block begins, is given if masks are needed."""
        q = self.inputs["q"][queries.head, queries.rows, :]
        masks = None
        if position is not None:
            positions = part.stop - part.start
            seen = self.seen(queries.part, position + part.start, (q.shape[0], positions))
            at = position + part.start + lax.broadcasted_iota(jnp.int32, (1, positions), 1)
            masks = seen, (at >= self.first_seen(self.tile)) & (at < self.kv_len[self.tile])
        max_, total, acc = (
            self.scratch[name].at[queries.head, queries.rows] for name in ("max", "total", "acc")
        )
        self.add_block(q, kv, queries.head, rows, part, (max_, total, acc), masks)

    def seen(self, part: Scalar, position: Scalar, shape: tuple[int, ...]) -> jax.Array:
        """[rows of a pass, positions]: which of the positions from `position` on each query sees."""
        at = position + lax.broadcasted_iota(jnp.int32, shape, 1)
        row = lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), self.blocks.part_rows)
        query = self.start[self.tile] + part * self.blocks.part_rows + row
        seen = (at <= query) & (at < self.kv_len[self.tile])
        if self.options.sliding_window is not None:
            seen &= at > query - self.options.sliding_window
        if self.options.attention_chunk is not None:
            chunk = self.options.attention_chunk
            border = self.first_seen(self.tile)
            seen &= at >= border
            for _ in range((self.tile_rows - 1) // chunk + 1):
                border = border + chunk
                seen &= (query < border) | (at >= border)
        return seen

    def begin_with_sinks(self) -> None:
        rows = self.blocks.part_rows
        for part in range(self.num_parts):
            for query_head in range(self.group):
                at = pl.ds((part * self.group + query_head) * rows, rows)
                for head in range(self.num_kv_heads):
                    sink = self.inputs["sinks"][head, pl.ds(query_head, 1), :] * LOG2_E
                    self.scratch["max"][head, at, :] = jnp.broadcast_to(sink, (rows, LANES))

    def end_tile(self) -> None:
        def store(queries: Pass) -> None:
            at = (queries.head, queries.rows)
            self.store(tuple(self.scratch[name][at] for name in ("max", "total", "acc")), at)

        self.each_pass(self.tile_rows, store)

    def run(self) -> None:
        pipeline = self.pipeline(self.num_tiles)

        @pl.when(self.phase == 0)
        def _() -> None:
            @pl.when(self.tile == 0)
            def _() -> None:
                for name in self.pools:
                    self.scratch[f"writing_{name}"][0] = 0

            self.write_new()

        @pl.when(self.phase == 1)
        def _() -> None:
            @pl.when(self.tile == 0)
            def _() -> None:
                self.wait_writes()
                pipeline.reset()

            in_sight = jnp.minimum(self.tile + 2, self.num_tiles)
            pipeline.fill(in_sight)
            self.begin_state()

            def run_block(block: Scalar, _: None) -> None:
                self.run_block(block, pipeline.buffer)
                pipeline.release()
                pipeline.fill(in_sight)

            lax.fori_loop(*self.span(self.tile), run_block, None)
            self.end_tile()


def prefill_kernel(
    start: Ref,
    kv_len: Ref,
    page_table: Ref,
    next_page_table: Ref,
    inputs: Mapping[str, Ref],
    _pools_in: Mapping[str, Ref],
    outputs: Mapping[str, Ref],
    pools: Mapping[str, Ref],
    scratch: Mapping[str, Ref],
    **static: Any,
) -> None:
    """What `pl.pallas_call` runs at each step of the grid."""
    PrefillBody(
        phase=pl.program_id(0),  # which interpretation knows only here, outside of loops
        tile=pl.program_id(1),
        start=start,
        kv_len=kv_len,
        page_tables=(page_table, next_page_table),
        inputs=inputs,
        pools=pools,
        outputs=outputs,
        scratch=scratch,
        **static,
    ).run()
