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
from typing import Any, NamedTuple

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
      part_rows: rows of a part of a tile, which are all, or half: then halves of computed blocks that a
        part does not see are skipped.
    """

    compute_rows: int
    part_rows: int


class Pass(NamedTuple):
    """Query heads of a kv head's group that are computed at once, with all of the tile's rows."""

    kv_head: Scalar
    first: Scalar
    num_heads: int


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

    def each_pass(self, body: Callable[[Pass], None]) -> None:
        """Calls body for all of the tile's query rows."""
        heads = max(
            n
            for n in range(1, self.group + 1)
            if self.group % n == 0 and (n == 1 or n * self.tile_rows <= self.blocks.compute_rows)
        )
        passes = self.group // heads

        def call(index: Scalar, _: None) -> None:
            body(Pass(lax.div(index, passes), lax.rem(index, passes) * heads, heads))

        count = self.num_kv_heads * passes
        unroll = self.blocks.unroll if count % self.blocks.unroll == 0 else 1
        lax.fori_loop(0, count, call, None, unroll=unroll)

    def rows_of(self, heads: Pass, part: int) -> tuple[Scalar, pl.Slice]:
        """Where the rows of a part of the tile lie, of the heads of a pass."""
        rows = self.blocks.part_rows
        at = part * self.group * rows + heads.first * rows
        return heads.kv_head, pl.ds(pl.multiple_of(at, rows), heads.num_heads * rows)

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

            everything = (slice(0, c),) * self.num_parts
            pl.when(whole)(lambda: self.attend(kv, rows, everything, None))
            pl.when(jnp.logical_not(whole))(lambda: self.attend_edge(kv, rows, position))

        lax.fori_loop(*self.computed_blocks(self.tile, block), attend, None)

    def attend_edge(self, kv: Ref, rows: pl.Slice, position: Scalar) -> None:
        """A computed block, from `position` on, of which queries see parts.

        Of two parts of a tile one may see half of it only. The other half would add zeros, so that no sum
        depends on where tiles begin.
        """
        half = self.blocks.compute_tokens // 2
        everything, low, high = slice(0, 2 * half), slice(0, half), slice(half, 2 * half)
        if self.num_parts == 1:
            self.attend(kv, rows, (everything,), position)
            return
        second, middle = self.start[self.tile] + self.blocks.part_rows, position + half
        first_sees_low = jnp.minimum(second, self.kv_len[self.tile]) <= middle
        second_sees_high = jnp.logical_not(first_sees_low) & (self.options.first_seen(second) >= middle)
        neither = jnp.logical_not(first_sees_low | second_sees_high)
        pl.when(first_sees_low)(lambda: self.attend(kv, rows, (low, everything), position))
        pl.when(second_sees_high)(lambda: self.attend(kv, rows, (everything, high), position))
        pl.when(neither)(lambda: self.attend(kv, rows, (everything, everything), position))

    def attend(self, kv: Ref, rows: pl.Slice, parts: tuple[slice, ...], position: Scalar | None) -> None:
        """A computed block, of which each part of the tile gets what `parts` says.

        `position`, where the block begins, is given if masks are needed.
        """

        def attend_pass(heads: Pass) -> None:
            places = [self.rows_of(heads, part) for part in range(self.num_parts)]
            states = [self.load_state(at) for at in places]  # all, so that nothing waits for a part's stores
            for part, of_block in enumerate(parts):
                q = self.inputs["q"][places[part]]
                masks = None
                if position is not None:
                    masks = self.masks(part, position + of_block.start, of_block.stop - of_block.start, q)
                states[part] = self.add_block(q, kv, heads.kv_head, rows, of_block, states[part], masks)
            for at, state in zip(places, states, strict=True):
                self.store_state(at, state)

        self.each_pass(attend_pass)

    def masks(self, part: int, position: Scalar, count: int, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of `count` positions: which each query of a part sees, and which are any query's."""
        at = position + lax.broadcasted_iota(jnp.int32, (1, count), 1)
        used = (at >= self.first_seen(self.tile)) & (at < self.kv_len[self.tile])
        return self.seen(part, position, (q.shape[0], count)), used

    def seen(self, part: int, position: Scalar, shape: tuple[int, ...]) -> jax.Array:
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
        def store(heads: Pass) -> None:
            for part in range(self.num_parts):
                at = self.rows_of(heads, part)
                self.store_output(at, self.load_state(at))

        self.each_pass(store)

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
