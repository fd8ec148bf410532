"""Paged attention of tiles of queries on TPU: one call writes the new K and V and attends.

The grid passes over the tiles twice. The first pass writes their rows: whole groups of a page's rows are
copied from HBM to HBM, all on their way together; a group that a tile fills in part is read, merged and
written back before the next, since the tiles of one sequence may share it. The second pass attends, with
nothing to wait for between tiles of one sequence. A block in which every query of the tile sees every
position passes without masks.

Dims as in attention_layout.py; f and c as in attention_pipeline.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    group_rows,
    output_lanes,
    pack_prefill_queries,
    sublanes,
    unpack_prefill_rows,
)
from jaxinfer_kernels.tpu.attention_pipeline import (
    CURSOR_WORDS,
    HBM,
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
class PrefillBlocks:
    """Block sizes of the prefill kernel. Only `compute_tokens` decides how sums are associated.

    Attributes:
      fetch_tokens: f, positions of a buffer.
      compute_tokens: c, positions of one pass of the reduction; divides f.
      num_buffers: buffers of f positions.
      compute_rows: query rows that are computed at once, at most; heads of a group share a pass.
      unroll: passes that the compiler may overlap.
    """

    fetch_tokens: int
    compute_tokens: int
    num_buffers: int
    compute_rows: int
    unroll: int


@dataclass(frozen=True)
class _Prefill:
    """One run of the kernel's body: what is static, and the references."""

    options: AttentionOptions
    blocks: PrefillBlocks
    lanes: Lanes
    num_tiles: int  # R
    tile_rows: int  # B
    phase: Scalar
    tile: Scalar
    start: Ref
    kv_len: Ref
    page_tables: tuple[Ref, Ref]
    inputs: Mapping[str, Ref]
    pools: Mapping[str, Ref]
    outputs: Mapping[str, Ref]
    scratch: Mapping[str, Ref]

    @property
    def num_kv_heads(self) -> int:
        return self.inputs["q"].shape[0]

    @property
    def page_size(self) -> int:
        return self.pools["kv"].shape[2]

    def page_id(self, tile: Scalar, page: Scalar) -> Scalar:
        """From the table of this tile or of the next one."""
        here, there = (table[0, page] for table in self.page_tables)
        return jnp.where(tile > self.tile, there, here)

    # --- The new tokens -----------------------------------------------------------------------------

    def write_new(self) -> None:
        """Starts or completes the copies of the tile's rows to their pages."""
        start, kv_len = self.start[self.tile], self.kv_len[self.tile]
        for name, pool in self.pools.items():
            group = self.inputs[f"new_{name}"].shape[3]
            base = start - lax.rem(start, group)

            def write(
                index: Scalar,
                _: None,
                name: str = name,
                pool: Ref = pool,
                group: int = group,
                base: Scalar = base,
            ) -> None:
                position = base + index * group
                page = lax.div(position, self.page_size)
                row = position - page * self.page_size
                old = part_of_page(pool, self.page_id(self.tile, page), row, group)
                new = self.inputs[f"new_{name}"].at[self.tile, index]
                whole = (position >= start) & (position + group <= kv_len)
                pl.when(whole)(lambda: self.write_whole(name, new, old))
                pl.when(jnp.logical_not(whole))(lambda: self.write_merged(name, new, old, position))

            num_groups = jnp.where(kv_len > start, lax.div(kv_len - base + group - 1, group), 0)
            lax.fori_loop(0, num_groups, write, None)

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
        at = position + lax.broadcasted_iota(jnp.int32, before.shape, 1)
        is_new = (at >= self.start[self.tile]) & (at < self.kv_len[self.tile])
        rows = jnp.where(is_new, merged[...].astype(jnp.float32), before[...].astype(jnp.float32))
        merged[...] = rows.astype(merged.dtype)
        write = pltpu.make_async_copy(merged, old, sems.at[0])
        write.start()
        write.wait()

    def wait_writes(self) -> None:
        """Waits for the copies of whole groups, of all tiles."""
        for name, pool in self.pools.items():
            group = self.inputs[f"new_{name}"].shape[3]
            part = part_of_page(pool, jnp.int32(0), jnp.int32(0), group)
            copy = pltpu.make_async_copy(part, part, self.scratch["write_sem"].at[0])
            lax.fori_loop(0, self.scratch[f"writing_{name}"][0], lambda _, __, copy=copy: copy.wait(), None)

    # --- Fetching -----------------------------------------------------------------------------------

    def first_seen(self, tile: Scalar) -> Scalar:
        """The first position that any query of the tile sees."""
        return self.options.first_seen(self.start[tile])

    def span(self, tile: Scalar) -> tuple[Scalar, Scalar]:
        """The fetched blocks of a tile."""
        f = self.blocks.fetch_tokens
        end = lax.div(self.kv_len[tile] + f - 1, f)
        return jnp.minimum(lax.div(self.first_seen(tile), f), end), end

    def pages(self, tile: Scalar, block: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Of a fetched block: the first page in use, the one after the last, and where the block begins."""
        pages_a_block = self.blocks.fetch_tokens // self.page_size
        at = block * pages_a_block
        first = jnp.maximum(at, lax.div(self.first_seen(tile), self.page_size))
        last = lax.div(self.kv_len[tile] + self.page_size - 1, self.page_size)
        return first, jnp.minimum(at + pages_a_block, last), at

    def buffers(self, buffer: Scalar) -> dict[str, Ref]:
        return {name: self.scratch[name].at[buffer] for name in self.pools}

    def start_fetch(self, tile: Scalar, block: Scalar, buffer: Scalar) -> None:
        sem = self.scratch["fetch_sems"].at[buffer]
        page_id = partial(self.page_id, tile)
        copy_pages(self.pools, self.buffers(buffer), sem, page_id, self.pages(tile, block))

    def wait_fetch(self, tile: Scalar, block: Scalar, buffer: Scalar) -> None:
        sem = self.scratch["fetch_sems"].at[buffer]
        wait_pages(self.pools, self.buffers(buffer), sem, self.pages(tile, block))

    # --- Attention ----------------------------------------------------------------------------------

    @property
    def pass_rows(self) -> int:
        """Query rows of one pass: as many heads of a group as fit, each with the tile's rows."""
        group = self.inputs["q"].shape[1] // self.tile_rows
        heads = max(
            n
            for n in range(1, group + 1)
            if group % n == 0 and (n == 1 or n * self.tile_rows <= self.blocks.compute_rows)
        )
        return heads * self.tile_rows

    def each_pass(self, body: Any) -> None:
        """Calls body(head, rows) for all of the tile's query rows."""
        passes = self.inputs["q"].shape[1] // self.pass_rows

        def call(index: Scalar, _: None) -> None:
            at = pl.multiple_of(lax.rem(index, passes) * self.pass_rows, self.pass_rows)
            body(lax.div(index, passes), pl.ds(at, self.pass_rows))

        count = self.num_kv_heads * passes
        unroll = self.blocks.unroll if count % self.blocks.unroll == 0 else 1
        lax.fori_loop(0, count, call, None, unroll=unroll)

    def attend_block(self, block: Scalar, buffer: Scalar) -> None:
        """All computed blocks of a fetched block in which any query of the tile sees something."""
        f, c = self.blocks.fetch_tokens, self.blocks.compute_tokens
        start, kv_len = self.start[self.tile], self.kv_len[self.tile]
        first = self.first_seen(self.tile)
        last_first = self.options.first_seen(kv_len - 1)  # what the tile's last query sees first
        kv = self.scratch["kv"].at[buffer]

        def attend(index: Scalar, _: None) -> None:
            position = index * c
            rows = pl.ds(pl.multiple_of(position - block * f, c), c)

            @pl.when((first > position) | (kv_len < position + c))
            def _() -> None:
                at = position + lax.broadcasted_iota(jnp.int32, (c, self.lanes.output), 0)
                silence_values(kv, rows, self.lanes.value_start, (at >= first) & (at < kv_len))

            whole = (position + c - 1 <= start) & (position >= last_first)
            pl.when(whole)(lambda: self.attend(buffer, rows, None))
            pl.when(jnp.logical_not(whole))(lambda: self.attend(buffer, rows, position))

        begin = jnp.maximum(lax.div(first, c), block * (f // c))
        end = jnp.minimum(lax.div(kv_len + c - 1, c), (block + 1) * (f // c))
        lax.fori_loop(begin, end, attend, None)

    def attend(self, buffer: Scalar, rows: pl.Slice, position: Scalar | None) -> None:
        """One computed block; `position`, where it begins, is given if masks are needed."""
        kv = self.scratch["kv"].at[buffer]

        def attend_pass(head: Scalar, queries: pl.Slice) -> None:
            q = self.inputs["q"][head, queries, :]
            keys = kv[head, rows, : self.lanes.key_end].astype(q.dtype)
            values = kv[head, rows, self.lanes.value_start :].astype(q.dtype)
            key_scales, value_scales = head_scales(self.scratch, head, rows)
            logits = self.options.logits(matmul(q, keys, (1, 1)), key_scales)
            if position is not None:
                logits = jnp.where(self.seen(position, logits.shape), logits, MASKED)
                if value_scales is not None:
                    at = position + lax.broadcasted_iota(jnp.int32, value_scales.shape, 1)
                    used = (at >= self.first_seen(self.tile)) & (at < self.kv_len[self.tile])
                    value_scales = jnp.where(used, value_scales, 0.0)
            refs = [self.scratch[name].at[head, queries] for name in ("max", "total", "acc")]
            state = online_softmax(logits, values, value_scales, (refs[0][...], refs[1][...], refs[2][...]))
            for ref, value in zip(refs, state, strict=True):
                ref[...] = value

        self.each_pass(attend_pass)

    def seen(self, position: Scalar, shape: tuple[int, ...]) -> jax.Array:
        """[rows of a pass, c]: which positions of the block that begins at `position` each query sees."""
        at = position + lax.broadcasted_iota(jnp.int32, shape, 1)
        row = lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), self.tile_rows)
        query = self.start[self.tile] + row
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

    def begin_tile(self) -> None:
        scratch = self.scratch
        scratch["acc"][...] = jnp.zeros_like(scratch["acc"])
        if "sinks" in self.inputs:
            for query_head in range(self.inputs["q"].shape[1] // self.tile_rows):
                rows = pl.ds(query_head * self.tile_rows, self.tile_rows)
                for head in range(self.num_kv_heads):
                    sink = self.inputs["sinks"][head, pl.ds(query_head, 1), :] * LOG2_E
                    scratch["max"][head, rows, :] = jnp.broadcast_to(sink, (self.tile_rows, LANES))
            scratch["total"][...] = jnp.ones_like(scratch["total"])
        else:
            scratch["max"][...] = jnp.full_like(scratch["max"], MASKED)
            scratch["total"][...] = jnp.zeros_like(scratch["total"])

    def end_tile(self) -> None:
        def store(head: Scalar, rows: pl.Slice) -> None:
            state = (self.scratch[name][head, rows, :] for name in ("max", "total", "acc"))
            out, lse = finish_rows(*state)
            self.outputs["out"][head, rows, :] = out.astype(self.outputs["out"].dtype)
            if "lse" in self.outputs:
                self.outputs["lse"][head, rows, :] = lse

        self.each_pass(store)

    def run(self) -> None:
        pipeline = FetchPipeline(
            self.scratch["cursor"], self.blocks.num_buffers, self.num_tiles, self.span, self.start_fetch
        )

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
            self.begin_tile()

            def run_block(block: Scalar, _: None) -> None:
                buffer = pipeline.buffer
                self.wait_fetch(self.tile, block, buffer)
                if "scales" in self.pools:
                    join_scales(self.scratch["scales"].at[buffer], self.scratch["joined_scales"])
                self.attend_block(block, buffer)
                pipeline.release()
                pipeline.fill(in_sight)

            lax.fori_loop(*self.span(self.tile), run_block, None)
            self.end_tile()


def _kernel(
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
    _Prefill(
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


def prefill_attention(
    q: jax.Array,
    new_kv: jax.Array,
    new_scales: jax.Array | None,
    kv_pages: KVPages,
    tiles: QueryTiles,
    sinks: jax.Array | None,
    *,
    options: AttentionOptions,
    blocks: PrefillBlocks,
    return_lse: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None, KVPages]:
    """Attends from R tiles of B queries.

    Args:
      q: [R * B, N, H].
      new_kv: [R * B, K, W] in the cache's dtype.
      new_scales: [R * B, 2K] or None.
      kv_pages: the cache.
      tiles: of R tiles.
      sinks: [N] or None.
      options: of the op.
      blocks: the kernel's block sizes.
      return_lse: whether to give log-sum-exps.
      interpret: as of pl.pallas_call.

    Returns:
      Outputs [R * B, N, H], log-sum-exps [R * B, N] or None, and the pages.
    """
    num_rows, num_heads, head_dim = q.shape
    num_tiles, num_kv_heads = tiles.start.shape[0], new_kv.shape[1]
    lanes = Lanes.of(head_dim)
    dtype = kv_pages.data.dtype
    group = min(sublanes(dtype), kv_pages.page_size)
    inputs = {
        "q": pack_prefill_queries(q, num_tiles, num_kv_heads),
        "new_kv": group_rows(new_kv, tiles.start, group),
    }
    if new_scales is not None:
        inputs["new_scales"] = group_rows(new_scales, tiles.start, kv_pages.page_size)

    def of_tile(shape: tuple[int, ...]) -> pl.BlockSpec:  # the first one's, as long as rows are written
        return pl.BlockSpec(
            (None, *shape[1:]), lambda phase, tile, *_: (phase * tile, *[0] * (len(shape) - 1))
        )

    specs = dict.fromkeys(inputs, HBM) | {"q": of_tile(inputs["q"].shape)}
    if sinks is not None:
        by_head = sinks.reshape(num_kv_heads, -1, 1)
        inputs["sinks"] = jnp.broadcast_to(by_head, (*by_head.shape[:2], LANES))
        specs["sinks"] = pl.BlockSpec(inputs["sinks"].shape, lambda *_: (0, 0, 0))
    rows = inputs["q"].shape[2]
    outputs = {"out": jax.ShapeDtypeStruct((num_tiles, num_kv_heads, rows, lanes.output), q.dtype)}
    if return_lse:
        outputs["lse"] = jax.ShapeDtypeStruct((num_tiles, num_kv_heads, rows, LANES), jnp.float32)
    pools = pools_of(kv_pages)
    scratch = {
        "kv": pltpu.VMEM((blocks.num_buffers, num_kv_heads, blocks.fetch_tokens, lanes.width), dtype),
        "fetch_sems": pltpu.SemaphoreType.DMA((blocks.num_buffers,)),
        "old_kv": pltpu.VMEM((num_kv_heads, group, lanes.width), dtype),
        "merged_kv": pltpu.VMEM((num_kv_heads, group, lanes.width), dtype),
        "merge_sems": pltpu.SemaphoreType.DMA((2,)),
        "write_sem": pltpu.SemaphoreType.DMA((1,)),
        "writing_kv": pltpu.SMEM((1,), jnp.int32),
        "max": pltpu.VMEM((num_kv_heads, rows, LANES), jnp.float32),
        "total": pltpu.VMEM((num_kv_heads, rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((num_kv_heads, rows, lanes.output), jnp.float32),
        "cursor": pltpu.SMEM((CURSOR_WORDS,), jnp.int32),
    }
    if kv_pages.scales is not None:
        scratch |= scale_buffers(blocks.num_buffers, blocks.fetch_tokens, kv_pages.scales)
        scratch["old_scales"] = pltpu.VMEM(kv_pages.scales.shape[1:], jnp.float32)
        scratch["merged_scales"] = pltpu.VMEM(kv_pages.scales.shape[1:], jnp.float32)
        scratch["writing_scales"] = pltpu.SMEM((1,), jnp.int32)
    page_table = tiles.page_table[:, None]
    table_block = (None, *page_table.shape[1:])
    last = num_tiles - 1
    results, pools = fused_call(
        partial(
            _kernel,
            options=options,
            blocks=blocks,
            lanes=lanes,
            num_tiles=num_tiles,
            tile_rows=num_rows // num_tiles,
        ),
        name="paged_attention_prefill",
        grid=(2, num_tiles),
        scalars=[tiles.start, tiles.kv_len],
        tables=[page_table, page_table],
        table_specs=[
            pl.BlockSpec(table_block, lambda _, tile, *__: (tile, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec(
                table_block, lambda _, tile, *__: (jnp.minimum(tile + 1, last), 0, 0), memory_space=pltpu.SMEM
            ),
        ],
        inputs=inputs,
        input_specs=specs,
        pools=pools,
        outputs=outputs,
        output_specs={name: of_tile(x.shape) for name, x in outputs.items()},
        scratch=scratch,
        interpret=interpret,
    )
    out = unpack_prefill_rows(output_lanes(results["out"], head_dim), num_heads)
    lse = unpack_prefill_rows(results["lse"][..., :1], num_heads)[..., 0] if return_lse else None
    return out, lse, KVPages(pools["kv"], pools.get("scales"))
