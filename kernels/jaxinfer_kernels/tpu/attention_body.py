"""What the bodies of the TPU's decode and prefill kernels share: where positions lie, and a computed block.

An *item* is what shares its blocks: a decode row, or a tile of prefill rows. Dims as in
attention_layout.py; f positions of a fetched block, c positions of a computed block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels.layout import KVPages
from jaxinfer_kernels.tpu.attention_layout import LANES, Lanes
from jaxinfer_kernels.tpu.attention_pipeline import (
    CURSOR_WORDS,
    FetchPipeline,
    copy_pages,
    head_scales,
    wait_pages,
)
from jaxinfer_kernels.tpu.attention_softmax import (
    LOG2_E,
    MASKED,
    AttentionOptions,
    Ref,
    Scalar,
    State,
    finish_rows,
    matmul,
    online_softmax,
)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Block sizes of a kernel. Only `compute_tokens` decides how sums are associated.

    Attributes:
      fetch_tokens: f, positions of a buffer.
      compute_tokens: c, positions of one pass of the reduction; divides f.
      num_buffers: buffers of f positions.
      unroll: passes over kv heads that the compiler may overlap.
    """

    fetch_tokens: int
    compute_tokens: int
    num_buffers: int
    unroll: int


def shared_scratch(kv_pages: KVPages, lanes: Lanes, rows: int, blocks: Blocks) -> dict[str, Any]:
    """The bodies' memory, by the names that they use: fetched blocks, and the state of `rows` a kv head."""
    _, num_kv_heads, page_size, _ = kv_pages.data.shape
    buffers, tokens = blocks.num_buffers, blocks.fetch_tokens
    scratch: dict[str, Any] = {
        "kv": pltpu.VMEM((buffers, num_kv_heads, tokens, lanes.width), kv_pages.data.dtype),
        "fetch_sems": pltpu.SemaphoreType.DMA((buffers,)),
        "max": pltpu.VMEM((num_kv_heads, rows, LANES), jnp.float32),
        "total": pltpu.VMEM((num_kv_heads, rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((num_kv_heads, rows, lanes.num_values), jnp.float32),
        "cursor": pltpu.SMEM((CURSOR_WORDS,), jnp.int32),
    }
    if kv_pages.scales is not None:  # by page, and of the block in use joined
        page_scales = kv_pages.scales.shape[1:]
        scratch["scales"] = pltpu.VMEM((buffers, tokens // page_size, *page_scales), jnp.float32)
        scratch["joined_scales"] = pltpu.VMEM((2, tokens // LANES, num_kv_heads, LANES), jnp.float32)
    return scratch


@dataclass(frozen=True, kw_only=True)
class Body(ABC):
    """One run of a kernel's body: what is static, and the references."""

    options: AttentionOptions
    blocks: Blocks
    lanes: Lanes
    kv_len: Ref
    page_tables: tuple[Ref, Ref]
    inputs: Mapping[str, Ref]
    pools: Mapping[str, Ref]
    outputs: Mapping[str, Ref]
    scratch: Mapping[str, Ref]

    @abstractmethod
    def first_seen(self, item: Scalar) -> Scalar:
        """The first position that any query of the item sees."""

    @abstractmethod
    def page_id(self, item: Scalar, page: Scalar) -> Scalar:
        """Where the item's page lies."""

    @property
    def num_kv_heads(self) -> int:
        return self.pools["kv"].shape[1]

    @property
    def page_size(self) -> int:
        return self.pools["kv"].shape[2]

    # --- Fetching -----------------------------------------------------------------------------------

    def pipeline(self, num_items: int) -> FetchPipeline:
        buffers = self.blocks.num_buffers
        return FetchPipeline(self.scratch["cursor"], buffers, num_items, self.span, self.start_fetch)

    def span(self, item: Scalar) -> tuple[Scalar, Scalar]:
        """The fetched blocks of an item."""
        f = self.blocks.fetch_tokens
        end = lax.div(self.kv_len[item] + f - 1, f)
        return jnp.minimum(lax.div(self.first_seen(item), f), end), end

    def pages(self, item: Scalar, block: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Of a fetched block: the first page in use, the one after the last, and where the block begins."""
        pages_a_block = self.blocks.fetch_tokens // self.page_size
        at = block * pages_a_block
        first = jnp.maximum(at, lax.div(self.first_seen(item), self.page_size))
        last = lax.div(self.kv_len[item] + self.page_size - 1, self.page_size)
        return first, jnp.minimum(at + pages_a_block, last), at

    def buffers(self, buffer: Scalar) -> dict[str, Ref]:
        return {name: self.scratch[name].at[buffer] for name in self.pools}

    def start_fetch(self, item: Scalar, block: Scalar, buffer: Scalar) -> None:
        sem = self.scratch["fetch_sems"].at[buffer]
        page_id = partial(self.page_id, item)
        copy_pages(self.pools, self.buffers(buffer), sem, page_id, self.pages(item, block))

    def wait_fetch(self, item: Scalar, block: Scalar, buffer: Scalar) -> None:
        sem = self.scratch["fetch_sems"].at[buffer]
        wait_pages(self.pools, self.buffers(buffer), sem, self.pages(item, block))

    # --- Attention ----------------------------------------------------------------------------------

    def computed_blocks(self, item: Scalar, block: Scalar) -> tuple[Scalar, Scalar]:
        """The computed blocks, first to end, of a fetched block in which the item sees anything."""
        f, c = self.blocks.fetch_tokens, self.blocks.compute_tokens
        begin = jnp.maximum(lax.div(self.first_seen(item), c), block * (f // c))
        return begin, jnp.minimum(lax.div(self.kv_len[item] + c - 1, c), (block + 1) * (f // c))

    def add_block(
        self,
        q: jax.Array,
        kv: Ref,
        head: Scalar,
        rows: pl.Slice,
        part: slice,
        state: State,
        masks: tuple[jax.Array, jax.Array] | None,
    ) -> State:
        """Attends from q [rows of queries, lanes] to a `part` of a block: the state after it.

        The block lies in `rows` of a head in the buffer kv. The masks, if any are needed, are which of the
        part's positions each query sees [rows of queries, positions], and which are in use [1, positions].
        """
        part_rows = pl.ds(rows.start + part.start, part.stop - part.start)
        keys = kv[head, part_rows, self.lanes.keys].astype(q.dtype)
        values = kv[head, part_rows, self.lanes.values].astype(q.dtype)
        key_scales, value_scales = head_scales(self.scratch, head, rows, part)
        logits = self.options.logits(matmul(q, keys, (1, 1)), key_scales)
        if masks is not None:
            seen, used = masks
            logits = jnp.where(seen, logits, MASKED)
            if value_scales is not None:
                value_scales = jnp.where(used, value_scales, 0.0)
        return online_softmax(logits, values, value_scales, state)

    def load_state(self, at: tuple[Any, ...]) -> State:
        """The state of the rows `at`."""
        running_max, total, acc = (self.scratch[name][at] for name in ("max", "total", "acc"))
        return running_max, total, acc

    def store_state(self, at: tuple[Any, ...], state: State) -> None:
        for name, value in zip(("max", "total", "acc"), state, strict=True):
            self.scratch[name][at] = value

    def begin_state(self) -> None:
        """Before the first block: nothing seen, or the sinks, as positions whose values are 0."""
        scratch = self.scratch
        scratch["acc"][...] = jnp.zeros_like(scratch["acc"])
        if "sinks" in self.inputs:
            self.begin_with_sinks()
            scratch["total"][...] = jnp.ones_like(scratch["total"])
        else:
            scratch["max"][...] = jnp.full_like(scratch["max"], MASKED)
            scratch["total"][...] = jnp.zeros_like(scratch["total"])

    def begin_with_sinks(self) -> None:
        """The running maximum of rows that lie as the sinks do."""
        self.scratch["max"][...] = self.inputs["sinks"][...] * LOG2_E

    def store_output(self, at: tuple[Any, ...], state: State) -> None:
        """Writes what has come of a state to the outputs' rows `at`."""
        out, lse = finish_rows(state)
        self.outputs["out"][at] = out.astype(self.outputs["out"].dtype)
        if "lse" in self.outputs:
            self.outputs["lse"][at] = lse
