"""How the TPU's attention kernels bring pages: fetched ahead, with their scales; and the call itself.

Dims as in attention_layout.py; f positions of a fetched block, c positions of a computed block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels.layout import KVPages
from jaxinfer_kernels.tpu.attention_layout import LANES
from jaxinfer_kernels.tpu.attention_softmax import Ref, Scalar

HBM = pl.BlockSpec(memory_space=pl.ANY)

# Words of the cursor, which lives in SMEM over all steps of the grid.
_FETCHED, _USED, _ITEM, _BLOCK = range(4)
CURSOR_WORDS = 4

_SPILL_BYTES = 8 << 20


@dataclass(frozen=True)
class FetchPipeline:
    """Fetches the blocks of all items, in order, up to `num_buffers` ahead of their use.

    An item is what shares its blocks: a tile of queries, or sequences that are decoded together. The
    pipeline runs on over the borders between items and between steps of the grid.

    Attributes:
      cursor: [CURSOR_WORDS] i32 in SMEM.
      num_buffers: blocks that may be on their way or in use.
      num_items: of the whole grid.
      span: gives an item's first block and the one after its last.
      start: starts the copies of (item, block) into a buffer.
    """

    cursor: Ref
    num_buffers: int
    num_items: int
    span: Callable[[Scalar], tuple[Scalar, Scalar]]
    start: Callable[[Scalar, Scalar, Scalar], None]

    def reset(self) -> None:
        """Before the first item."""
        self.cursor[_FETCHED] = 0
        self.cursor[_USED] = 0
        self.cursor[_ITEM] = 0
        self.cursor[_BLOCK] = self.span(jnp.int32(0))[0]

    @property
    def buffer(self) -> Scalar:
        """The buffer of the block that is used next."""
        return lax.rem(self.cursor[_USED], self.num_buffers)

    def fill(self, end_item: Scalar) -> None:
        """Starts fetches until all buffers are taken or the items before `end_item` are through."""
        most = self.cursor[_USED] + self.num_buffers

        def wanted(state: tuple[Scalar, Scalar, Scalar]) -> Scalar:
            fetched, item, _ = state
            return (fetched < most) & (item < end_item)

        def fetch_or_move_on(state: tuple[Scalar, Scalar, Scalar]) -> tuple[Scalar, Scalar, Scalar]:
            fetched, item, block = state
            more = block < self.span(item)[1]

            @pl.when(more)
            def _() -> None:
                self.start(item, block, lax.rem(fetched, self.num_buffers))

            following = jnp.minimum(item + 1, self.num_items - 1)
            return (
                fetched + more.astype(jnp.int32),
                jnp.where(more, item, item + 1),
                jnp.where(more, block + 1, self.span(following)[0]),
            )

        state = self.cursor[_FETCHED], self.cursor[_ITEM], self.cursor[_BLOCK]
        fetched, item, block = lax.while_loop(wanted, fetch_or_move_on, state)
        self.cursor[_FETCHED] = fetched
        self.cursor[_ITEM] = item
        self.cursor[_BLOCK] = block

    def release(self) -> None:
        """The block in `buffer` has been used."""
        self.cursor[_USED] = self.cursor[_USED] + 1


def part_of_page(pool: Ref, page_id: Scalar, row: Scalar, group: int) -> Ref:
    """A page's group of positions with `row`: [K, group, W] of numbers; [K, L], all, of scales."""
    if len(pool.shape) == 3 or group == pool.shape[2]:
        return pool.at[page_id]
    return pool.at[page_id, :, pl.ds(pl.multiple_of(row - lax.rem(row, group), group), group)]


def _place_of_page(name: str, buffer: Ref, page: Scalar, page_size: int) -> Ref:
    """Where a fetched block has its page: numbers are [K, f, W], scales [f // page_size, K, L]."""
    if name == "scales":
        return buffer.at[page]
    return buffer.at[:, pl.ds(pl.multiple_of(page * page_size, page_size), page_size)]


def copy_pages(
    pools: Mapping[str, Ref],
    buffers: Mapping[str, Ref],
    sem: Ref,
    page_id: Callable[[Scalar], Scalar],
    pages: tuple[Scalar, Scalar, Scalar],
) -> None:
    """Starts a copy of each page of a sequence, first to end, into the block that begins at page `at`."""
    first, end, at = pages
    page_size = pools["kv"].shape[2]

    def start(page: Scalar, _: None) -> None:
        for name, pool in pools.items():
            place = _place_of_page(name, buffers[name], page - at, page_size)
            pltpu.make_async_copy(pool.at[page_id(page)], place, sem).start()

    lax.fori_loop(first, end, start, None)


def wait_pages(
    pools: Mapping[str, Ref], buffers: Mapping[str, Ref], sem: Ref, pages: tuple[Scalar, Scalar, Scalar]
) -> None:
    """Waits for the copies of `copy_pages`."""
    first, end, _ = pages
    page_size = pools["kv"].shape[2]

    def wait(_: Scalar, __: None) -> None:
        for name, pool in pools.items():
            place = _place_of_page(name, buffers[name], jnp.int32(0), page_size)
            pltpu.make_async_copy(pool.at[0], place, sem).wait()

    lax.fori_loop(first, end, wait, None)


def join_scales(fetched: Ref, joined: Ref, page_size: int) -> None:
    """The scales of a block's pages, [f // page_size, K, L], as [2, f // 128, K, 128], keys' first."""
    pages, units = max(1, LANES // page_size), max(1, page_size // LANES)  # pages a unit, units a page

    def join(index: Scalar, _: None) -> None:
        for which in range(2):
            first = which * page_size
            if units > 1:
                for unit in range(units):
                    lanes = slice(first + unit * LANES, first + (unit + 1) * LANES)
                    joined[which, index * units + unit] = fetched[index, :, lanes]
            else:
                lanes = slice(first, first + page_size)
                parts = [fetched[index * pages + i, :, lanes] for i in range(pages)]
                joined[which, index] = parts[0] if pages == 1 else jnp.concatenate(parts, axis=1)

    lax.fori_loop(0, joined.shape[1] // units, join, None)


def head_scales(
    scratch: Mapping[str, Ref], head: Scalar | int, rows: pl.Slice, part: slice
) -> tuple[jax.Array | None, jax.Array | None]:
    """The scales of a head's keys and values in a `part` of `rows`, each [1, positions], if there are any."""
    if "joined_scales" not in scratch:
        return None, None
    joined = scratch["joined_scales"]
    first = lax.div(rows.start, LANES)
    keys, values = (
        jnp.concatenate(
            [joined[which, first + i, pl.ds(head, 1), :] for i in range(rows.size // LANES)], axis=1
        )
        for which in range(2)
    )
    return keys[:, part], values[:, part]


def pools_of(kv_pages: KVPages) -> dict[str, jax.Array]:
    """The arrays of a cache by name."""
    pools = {"kv": kv_pages.data}
    return pools if kv_pages.scales is None else {**pools, "scales": kv_pages.scales}


def fused_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    scalars: Sequence[jax.Array],
    tables: Sequence[jax.Array],
    table_specs: Sequence[pl.BlockSpec],
    inputs: Mapping[str, jax.Array],
    input_specs: Mapping[str, pl.BlockSpec],
    pools: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    output_specs: Mapping[str, pl.BlockSpec],
    scratch: Mapping[str, Any],
    interpret: Any,
) -> tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]]:
    """A pallas_call that reads and writes the pools in place.

    The kernel gets references to scalars, tables, inputs, pools, outputs, the pools as outputs (the ones
    to use) and scratch. Returns the outputs and the pools.
    """
    in_hbm = dict.fromkeys(pools, HBM)
    args = (*scalars, *tables, inputs, pools)
    first_pool = len(jax.tree.leaves(args[:-1]))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[*table_specs, input_specs, in_hbm],
            out_specs=(output_specs, in_hbm),
            scratch_shapes=[scratch],
        ),
        out_shape=(outputs, {pool: jax.ShapeDtypeStruct(x.shape, x.dtype) for pool, x in pools.items()}),
        input_output_aliases={first_pool + i: len(outputs) + i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(grid),
            vmem_limit_bytes=_vmem_bytes(inputs, input_specs, outputs, output_specs, scratch),
        ),
        interpret=interpret,
        name=name,
    )(*args)


def _vmem_bytes(
    inputs: Mapping[str, Any],
    input_specs: Mapping[str, pl.BlockSpec],
    outputs: Mapping[str, Any],
    output_specs: Mapping[str, pl.BlockSpec],
    scratch: Mapping[str, Any],
) -> int:
    """What a kernel may take of VMEM: its scratch, two of each block, and what the compiler spills."""
    size = sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in scratch.values()
        if x.memory_space == pltpu.VMEM
    )
    for arrays, specs in ((inputs, input_specs), (outputs, output_specs)):
        for key, array in arrays.items():
            block: Any = specs[key].block_shape or ()  # none of what stays in HBM
            size += 2 * math.prod(n or 1 for n in block) * jnp.dtype(array.dtype).itemsize
    return size + size // 4 + _SPILL_BYTES
