"""The body of the TPU's decode kernel.

A step of the grid takes several sequences. Their blocks arrive through the fetch pipeline; the last
block of a sequence gets the new token's row in VMEM, from where the row's group of rows goes back to
its page while attention proceeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels.tpu.attention_body import Blocks, Body
from jaxinfer_kernels.tpu.attention_pipeline import join_scales, part_of_page
from jaxinfer_kernels.tpu.attention_softmax import Ref, Scalar, silence_values


@dataclass(frozen=True, kw_only=True)
class DecodeBlocks(Blocks):
    """Block sizes of the decode kernel.

    Attributes:
      sequences: sequences a step of the grid.
    """

    sequences: int


@dataclass(frozen=True, kw_only=True)
class DecodeBody(Body):
    """One step of the grid."""

    blocks: DecodeBlocks
    num_rows: int  # S
    step: Scalar

    def each_head(self, body: Callable[[Scalar], None]) -> None:
        unroll = math.gcd(self.num_kv_heads, self.blocks.unroll)
        lax.fori_loop(0, self.num_kv_heads, lambda head, _: body(head), None, unroll=unroll)

    def first_seen(self, item: Scalar) -> Scalar:
        return self.options.first_seen(jnp.maximum(self.kv_len[item] - 1, 0))

    def page_id(self, item: Scalar, page: Scalar) -> Scalar:
        """From the table of this step's sequences or of the next step's."""
        at = lax.rem(item, self.blocks.sequences)
        ahead = lax.div(item, self.blocks.sequences) > self.step
        here, there = (table[at, page] for table in self.page_tables)
        return jnp.where(ahead, there, here)

    # --- The new token ------------------------------------------------------------------------------

    def write_copies(self, row: Scalar, position: Scalar) -> list[Any]:
        """The copies of the groups of rows with the new token to the page of `position`."""
        place = lax.rem(row, self.blocks.sequences)
        page = lax.div(position, self.page_size)
        row_in_page = position - page * self.page_size
        copies = []
        for name, pool in self.pools.items():
            written = self.scratch[f"written_{name}"].at[place]
            group = min(written.shape[1], pool.shape[2])
            if group < written.shape[1]:  # a tile of rows holds several pages
                at = lax.rem(position, written.shape[1])
                written = written.at[:, pl.ds(pl.multiple_of(at - lax.rem(at, group), group), group)]
            part = part_of_page(pool, self.page_id(row, page), row_in_page, group)
            copies.append(pltpu.make_async_copy(written, part, self.scratch["write_sems"].at[place]))
        return copies

    def wait_write(self, place: Scalar) -> None:
        """Waits for what the sequence at `place` in an earlier step wrote, if it did."""

        @pl.when(self.scratch["writing"][place] == 1)
        def _() -> None:
            for copy in self.write_copies(self.step * self.blocks.sequences + place, jnp.int32(0)):
                copy.wait()
            self.scratch["writing"][place] = 0

    def write_new(self, row: Scalar, block: Scalar, buffer: Scalar) -> None:
        """Merges the new token into its block, and starts the copy of its group of rows to the page."""
        position = self.kv_len[row] - 1
        place = lax.rem(row, self.blocks.sequences)
        self.wait_write(place)
        in_block = position - block * self.blocks.fetch_tokens
        written = self.scratch["written_kv"].at[place]
        group = written.shape[1]
        offset = lax.rem(in_block, group)
        rows = pl.ds(pl.multiple_of(in_block - offset, group), group)
        is_new = lax.broadcasted_iota(jnp.int32, (group, self.lanes.width), 0) == offset

        def merge(head: Scalar) -> None:
            fetched = self.scratch["kv"].at[buffer, head]
            new = self.inputs["new_kv"][place, pl.ds(head, 1), :]
            merged = jnp.where(is_new, new, fetched[rows, :].astype(jnp.float32)).astype(fetched.dtype)
            fetched[rows, :] = merged
            written[head] = merged

        self.each_head(merge)
        if "scales" in self.pools:
            fetched = self.scratch["scales"].at[buffer, lax.div(in_block, self.page_size)]
            offsets = lax.rem(lax.broadcasted_iota(jnp.int32, fetched.shape, 1), self.page_size)
            is_new = offsets == lax.rem(in_block, self.page_size)
            merged = jnp.where(is_new, self.inputs["new_scales"][place], fetched[...])
            fetched[...] = merged
            self.scratch["written_scales"][place] = merged
        for copy in self.write_copies(row, position):
            copy.start()
        self.scratch["writing"][place] = 1

    # --- Attention ----------------------------------------------------------------------------------

    def attend(self, row: Scalar, position: Scalar, rows: pl.Slice, buffer: Scalar) -> None:
        """One computed block: it begins at `position`, and lies in `rows` of the buffer."""
        c = self.blocks.compute_tokens
        first, kv_len = self.first_seen(row), self.kv_len[row]
        kv = self.scratch["kv"].at[buffer]

        @pl.when((first > position) | (kv_len < position + c))
        def _() -> None:
            at = position + lax.broadcasted_iota(jnp.int32, (c, self.lanes.num_values), 0)
            silence_values(kv, rows, self.lanes.values, (at >= first) & (at < kv_len))

        place = lax.rem(row, self.blocks.sequences)
        at = position + lax.broadcasted_iota(jnp.int32, (self.inputs["q"].shape[2], c), 1)
        seen = (at >= first) & (at < kv_len)

        def attend_head(head: Scalar) -> None:
            q = self.inputs["q"][place, head]
            state, masks = self.load_state((head,)), (seen, seen[:1])
            self.store_state((head,), self.add_block(q, kv, head, rows, slice(0, c), state, masks))

        self.each_head(attend_head)

    def run_block(self, row: Scalar, block: Scalar, buffer: Scalar) -> None:
        """All computed blocks of a fetched block in which the sequence sees something."""
        f, c = self.blocks.fetch_tokens, self.blocks.compute_tokens
        self.wait_fetch(row, block, buffer)
        is_last = block == self.span(row)[1] - 1
        pl.when(is_last)(lambda: self.write_new(row, block, buffer))
        if "scales" in self.pools:
            join_scales(self.scratch["scales"].at[buffer], self.scratch["joined_scales"], self.page_size)

        def attend(index: Scalar, _: None) -> None:
            offset = pl.multiple_of(index * c - block * f, c)
            self.attend(row, index * c, pl.ds(offset, c), buffer)

        lax.fori_loop(*self.computed_blocks(row, block), attend, None)

    def end_row(self, row: Scalar) -> None:
        place = lax.rem(row, self.blocks.sequences)
        self.each_head(lambda head: self.store_output((place, head), self.load_state((head,))))

    def run(self) -> None:
        sequences = self.blocks.sequences
        pipeline = self.pipeline(self.num_rows)
        in_sight = jnp.minimum((self.step + 2) * sequences, self.num_rows)

        @pl.when(self.step == 0)
        def _() -> None:
            pipeline.reset()
            for place in range(sequences):
                self.scratch["writing"][place] = 0

        pipeline.fill(in_sight)

        def run_row(place: Scalar, _: None) -> None:
            row = self.step * sequences + place
            self.begin_state()

            def run_block(block: Scalar, _: None) -> None:
                self.run_block(row, block, pipeline.buffer)
                pipeline.release()
                pipeline.fill(in_sight)

            lax.fori_loop(*self.span(row), run_block, None)
            self.end_row(row)

        lax.fori_loop(0, sequences, run_row, None)

        @pl.when(self.step == self.num_rows // sequences - 1)
        def _() -> None:
            lax.fori_loop(0, sequences, lambda place, _: self.wait_write(place), None)


def decode_kernel(
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
    DecodeBody(
        step=pl.program_id(0),  # which interpretation knows only here, outside of loops
        kv_len=kv_len,
        page_tables=(page_table, next_page_table),
        inputs=inputs,
        pools=pools,
        outputs=outputs,
        scratch=scratch,
        **static,
    ).run()
