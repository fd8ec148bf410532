"""Paged attention of one query a sequence on TPU: one call writes the new K and V and attends.

A step of the grid takes several sequences. Their blocks arrive through the fetch pipeline; the last
block of a sequence gets the new token's row in VMEM, from where the row's group of rows goes back to
its page while attention proceeds.

Dims as in attention_layout.py; f and c as in attention_pipeline.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels.layout import KVPages, QueryTiles
from jaxinfer_kernels.tpu.attention_layout import (
    LANES,
    Lanes,
    output_lanes,
    pack_decode_queries,
    round_up,
    sublanes,
    unpack_decode_rows,
)
from jaxinfer_kernels.tpu.attention_pipeline import (
    CURSOR_WORDS,
    LOG2_E,
    MASKED,
    AttentionOptions,
    FetchPipeline,
    Ref,
    Scalar,
    copy_pages,
    finish_rows,
    fused_call,
    head_scales,
    join_scales,
    matmul,
    online_softmax,
    part_of_page,
    pools_of,
    scale_buffers,
    silence_values,
    wait_pages,
)


@dataclass(frozen=True)
class DecodeBlocks:
    """Block sizes of the decode kernel. Only `compute_tokens` decides how sums are associated.

    Attributes:
      fetch_tokens: f, positions of a buffer.
      compute_tokens: c, positions of one pass of the reduction; divides f.
      num_buffers: buffers of f positions.
      sequences: sequences a step of the grid.
      unroll: kv heads that the compiler may overlap.
    """

    fetch_tokens: int
    compute_tokens: int
    num_buffers: int
    sequences: int
    unroll: int


@dataclass(frozen=True)
class _Decode:
    """One run of the kernel's body: what is static, and the references."""

    options: AttentionOptions
    blocks: DecodeBlocks
    lanes: Lanes
    num_rows: int  # S
    step: Scalar  # of the grid
    kv_len: Ref
    page_tables: tuple[Ref, Ref]
    inputs: Mapping[str, Ref]
    pools: Mapping[str, Ref]
    outputs: Mapping[str, Ref]
    scratch: Mapping[str, Ref]

    @property
    def num_kv_heads(self) -> int:
        return self.inputs["q"].shape[1]

    @property
    def page_size(self) -> int:
        return self.pools["kv"].shape[2]

    def each_head(self, body: Callable[[Scalar], None]) -> None:
        unroll = math.gcd(self.num_kv_heads, self.blocks.unroll)
        lax.fori_loop(0, self.num_kv_heads, lambda head, _: body(head), None, unroll=unroll)

    # --- Where a sequence's positions lie -----------------------------------------------------------

    def first_seen(self, row: Scalar) -> Scalar:
        return self.options.first_seen(jnp.maximum(self.kv_len[row] - 1, 0))

    def span(self, row: Scalar) -> tuple[Scalar, Scalar]:
        """The fetched blocks of a sequence."""
        f = self.blocks.fetch_tokens
        return lax.div(self.first_seen(row), f), lax.div(self.kv_len[row] + f - 1, f)

    def pages(self, row: Scalar, block: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Of a fetched block: the first page in use, the one after the last, and where the block begins."""
        pages_a_block = self.blocks.fetch_tokens // self.page_size
        at = block * pages_a_block
        first = jnp.maximum(at, lax.div(self.first_seen(row), self.page_size))
        last = lax.div(self.kv_len[row] + self.page_size - 1, self.page_size)
        return first, jnp.minimum(at + pages_a_block, last), at

    def page_id(self, row: Scalar, page: Scalar) -> Scalar:
        """From the table of this step's sequences or of the next step's."""
        at = lax.rem(row, self.blocks.sequences)
        ahead = lax.div(row, self.blocks.sequences) > self.step
        here, there = (table[at, page] for table in self.page_tables)
        return jnp.where(ahead, there, here)

    def buffers(self, buffer: Scalar) -> dict[str, Ref]:
        return {name: self.scratch[name].at[buffer] for name in self.pools}

    def start_fetch(self, row: Scalar, block: Scalar, buffer: Scalar) -> None:
        sem = self.scratch["fetch_sems"].at[buffer]
        page_id = partial(self.page_id, row)
        copy_pages(self.pools, self.buffers(buffer), sem, page_id, self.pages(row, block))

    def wait_fetch(self, row: Scalar, block: Scalar, buffer: Scalar) -> None:
        sem = self.scratch["fetch_sems"].at[buffer]
        wait_pages(self.pools, self.buffers(buffer), sem, self.pages(row, block))

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
            lane = lax.broadcasted_iota(jnp.int32, fetched.shape, 1)
            is_new = lane == lax.rem(in_block, self.page_size)
            merged = jnp.where(is_new, self.inputs["new_scales"][place], fetched[...])
            fetched[...] = merged
            self.scratch["written_scales"][place] = merged
        for copy in self.write_copies(row, position):
            copy.start()
        self.scratch["writing"][place] = 1

    # --- Attention ----------------------------------------------------------------------------------

    def attend_block(self, row: Scalar, block: Scalar, buffer: Scalar) -> None:
        """All computed blocks of a fetched block in which the sequence sees something."""
        f, c = self.blocks.fetch_tokens, self.blocks.compute_tokens
        begin = jnp.maximum(lax.div(self.first_seen(row), c), block * (f // c))
        end = jnp.minimum(lax.div(self.kv_len[row] + c - 1, c), (block + 1) * (f // c))

        def attend(index: Scalar, _: None) -> None:
            offset = pl.multiple_of(index * c - block * f, c)
            self.attend(row, index * c, pl.ds(offset, c), buffer)

        lax.fori_loop(begin, end, attend, None)

    def attend(self, row: Scalar, position: Scalar, rows: pl.Slice, buffer: Scalar) -> None:
        """One computed block: it begins at `position`, and lies in `rows` of the buffer."""
        c = self.blocks.compute_tokens
        first, kv_len = self.first_seen(row), self.kv_len[row]
        kv = self.scratch["kv"].at[buffer]

        @pl.when((first > position) | (kv_len < position + c))
        def _() -> None:
            at = position + lax.broadcasted_iota(jnp.int32, (c, self.lanes.output), 0)
            silence_values(kv, rows, self.lanes.value_start, (at >= first) & (at < kv_len))

        place = lax.rem(row, self.blocks.sequences)
        at = position + lax.broadcasted_iota(jnp.int32, (self.inputs["q"].shape[2], c), 1)
        seen = (at >= first) & (at < kv_len)

        def attend_head(head: Scalar) -> None:
            q = self.inputs["q"][place, head]
            keys = kv[head, rows, : self.lanes.key_end].astype(q.dtype)
            values = kv[head, rows, self.lanes.value_start :].astype(q.dtype)
            key_scales, value_scales = head_scales(self.scratch, head, rows)
            logits = self.options.logits(matmul(q, keys, (1, 1)), key_scales)
            logits = jnp.where(seen, logits, MASKED)
            if value_scales is not None:
                value_scales = jnp.where(seen[:1], value_scales, 0.0)
            refs = [self.scratch[name].at[head] for name in ("max", "total", "acc")]
            state = online_softmax(logits, values, value_scales, (refs[0][...], refs[1][...], refs[2][...]))
            for ref, value in zip(refs, state, strict=True):
                ref[...] = value

        self.each_head(attend_head)

    def begin_row(self) -> None:
        scratch = self.scratch
        scratch["acc"][...] = jnp.zeros_like(scratch["acc"])
        if "sinks" in self.inputs:
            scratch["max"][...] = self.inputs["sinks"][...] * LOG2_E
            scratch["total"][...] = jnp.ones_like(scratch["total"])
        else:
            scratch["max"][...] = jnp.full_like(scratch["max"], MASKED)
            scratch["total"][...] = jnp.zeros_like(scratch["total"])

    def end_row(self, row: Scalar) -> None:
        place = lax.rem(row, self.blocks.sequences)

        def store(head: Scalar) -> None:
            state = (self.scratch[name][head] for name in ("max", "total", "acc"))
            out, lse = finish_rows(*state)
            self.outputs["out"][place, head] = out.astype(self.outputs["out"].dtype)
            if "lse" in self.outputs:
                self.outputs["lse"][place, head] = lse

        self.each_head(store)

    def run(self) -> None:
        sequences = self.blocks.sequences
        pipeline = FetchPipeline(
            self.scratch["cursor"], self.blocks.num_buffers, self.num_rows, self.span, self.start_fetch
        )
        in_sight = jnp.minimum((self.step + 2) * sequences, self.num_rows)

        @pl.when(self.step == 0)
        def _() -> None:
            pipeline.reset()
            for place in range(sequences):
                self.scratch["writing"][place] = 0

        pipeline.fill(in_sight)

        def run_row(place: Scalar, _: None) -> None:
            row = self.step * sequences + place
            self.begin_row()

            def run_block(block: Scalar, _: None) -> None:
                buffer = pipeline.buffer
                self.wait_fetch(row, block, buffer)
                is_last = block == self.span(row)[1] - 1
                pl.when(is_last)(lambda: self.write_new(row, block, buffer))
                if "scales" in self.pools:
                    join_scales(self.scratch["scales"].at[buffer], self.scratch["joined_scales"])
                self.attend_block(row, block, buffer)
                pipeline.release()
                pipeline.fill(in_sight)

            lax.fori_loop(*self.span(row), run_block, None)
            self.end_row(row)

        lax.fori_loop(0, sequences, run_row, None)

        @pl.when(self.step == self.num_rows // sequences - 1)
        def _() -> None:
            lax.fori_loop(0, sequences, lambda place, _: self.wait_write(place), None)


def _kernel(
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
    _Decode(
        step=pl.program_id(0),  # which interpretation knows only here, outside of loops
        kv_len=kv_len,
        page_tables=(page_table, next_page_table),
        inputs=inputs,
        pools=pools,
        outputs=outputs,
        scratch=scratch,
        **static,
    ).run()


def decode_attention(
    q: jax.Array,
    new_kv: jax.Array,
    new_scales: jax.Array | None,
    kv_pages: KVPages,
    tiles: QueryTiles,
    sinks: jax.Array | None,
    *,
    options: AttentionOptions,
    blocks: DecodeBlocks,
    return_lse: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None, KVPages]:
    """Attends from one query a sequence.

    Args:
      q: [S, N, H].
      new_kv: [S, K, W] in the cache's dtype.
      new_scales: [S, 2K] or None.
      kv_pages: the cache.
      tiles: of S sequences.
      sinks: [N] or None.
      options: of the op.
      blocks: the kernel's block sizes.
      return_lse: whether to give log-sum-exps.
      interpret: as of pl.pallas_call.

    Returns:
      Outputs [S, N, H], log-sum-exps [S, N] or None, and the pages.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = new_kv.shape[1]
    lanes = Lanes.of(head_dim)
    blocks = replace(blocks, sequences=min(blocks.sequences, num_rows))
    sequences = blocks.sequences
    padded = round_up(num_rows, sequences)
    num_steps = padded // sequences

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, padded - num_rows), *[(0, 0)] * (x.ndim - 1)])

    inputs = {"q": pack_decode_queries(pad(q), num_kv_heads), "new_kv": pad(new_kv).astype(jnp.float32)}
    if new_scales is not None:
        inputs["new_scales"] = jnp.broadcast_to(
            pad(new_scales)[..., None], (padded, new_scales.shape[1], kv_pages.page_size)
        )

    def of_step(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((sequences, *shape[1:]), lambda step, *_: (step, *[0] * (len(shape) - 1)))

    specs = {name: of_step(x.shape) for name, x in inputs.items()}
    group = inputs["q"].shape[2]
    if sinks is not None:
        by_head = sinks.reshape(num_kv_heads, -1)
        by_head = jnp.pad(by_head, [(0, 0), (0, group - by_head.shape[1])])
        inputs["sinks"] = jnp.broadcast_to(by_head[..., None], (*by_head.shape, LANES))
        specs["sinks"] = pl.BlockSpec(inputs["sinks"].shape, lambda *_: (0, 0, 0))
    outputs = {"out": jax.ShapeDtypeStruct((padded, num_kv_heads, group, lanes.output), q.dtype)}
    if return_lse:
        outputs["lse"] = jax.ShapeDtypeStruct((padded, num_kv_heads, group, LANES), jnp.float32)
    pools = pools_of(kv_pages)
    rows = sublanes(kv_pages.data.dtype)
    scratch = {
        "kv": pltpu.VMEM(
            (blocks.num_buffers, num_kv_heads, blocks.fetch_tokens, lanes.width), kv_pages.data.dtype
        ),
        "fetch_sems": pltpu.SemaphoreType.DMA((blocks.num_buffers,)),
        "written_kv": pltpu.VMEM((sequences, num_kv_heads, rows, lanes.width), kv_pages.data.dtype),
        "write_sems": pltpu.SemaphoreType.DMA((sequences,)),
        "writing": pltpu.SMEM((sequences,), jnp.int32),
        "max": pltpu.VMEM((num_kv_heads, group, LANES), jnp.float32),
        "total": pltpu.VMEM((num_kv_heads, group, LANES), jnp.float32),
        "acc": pltpu.VMEM((num_kv_heads, group, lanes.output), jnp.float32),
        "cursor": pltpu.SMEM((CURSOR_WORDS,), jnp.int32),
    }
    if kv_pages.scales is not None:
        scratch |= scale_buffers(blocks.num_buffers, blocks.fetch_tokens, kv_pages.scales)
        scratch["written_scales"] = pltpu.VMEM((sequences, *kv_pages.scales.shape[1:]), jnp.float32)
    page_table = pad(tiles.page_table).reshape(num_steps, sequences, -1)
    table_block = (None, *page_table.shape[1:])
    last = num_steps - 1
    results, pools = fused_call(
        partial(_kernel, options=options, blocks=blocks, lanes=lanes, num_rows=padded),
        name="paged_attention_decode",
        grid=(num_steps,),
        scalars=[pad(tiles.kv_len)],
        tables=[page_table, page_table],
        table_specs=[
            pl.BlockSpec(table_block, lambda step, *_: (step, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec(
                table_block, lambda step, *_: (jnp.minimum(step + 1, last), 0, 0), memory_space=pltpu.SMEM
            ),
        ],
        inputs=inputs,
        input_specs=specs,
        pools=pools,
        outputs=outputs,
        output_specs={name: of_step(x.shape) for name, x in outputs.items()},
        scratch=scratch,
        interpret=interpret,
    )
    out = unpack_decode_rows(output_lanes(results["out"], head_dim), num_heads)[:num_rows]
    lse = unpack_decode_rows(results["lse"], num_heads)[:num_rows, :, 0] if return_lse else None
    return out, lse, KVPages(pools["kv"], pools.get("scales"))
