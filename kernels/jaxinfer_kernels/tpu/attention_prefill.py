"""Paged attention of tiles of queries on TPU: one call writes the new K and V and attends.

Dims as in attention_layout.py; f and c as in attention_pipeline.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels.layout import KVPages, QueryTiles
from jaxinfer_kernels.tpu.attention_body import shared_scratch
from jaxinfer_kernels.tpu.attention_layout import (
    LANES,
    Lanes,
    group_rows,
    pack_prefill_queries,
    pack_scales,
    sublanes,
    unpack_prefill_rows,
)
from jaxinfer_kernels.tpu.attention_pipeline import HBM, fused_call, pools_of
from jaxinfer_kernels.tpu.attention_prefill_body import PrefillBlocks, prefill_kernel
from jaxinfer_kernels.tpu.attention_softmax import AttentionOptions


def prefill_attention(
    q: jax.Array,
    new_kv: jax.Array,
    new_scales: jax.Array | None,
    kv_pages: KVPages,
    tiles: QueryTiles,
    sinks: jax.Array | None,
    *,
    lanes: Lanes,
    options: AttentionOptions,
    blocks: PrefillBlocks,
    return_lse: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None, KVPages]:
    """Attends from R tiles of B queries.

    Args:
      q: [R * B, N, elements of a key].
      new_kv: [R * B, K, W] in the cache's dtype.
      new_scales: [R * B, 2K] or None.
      kv_pages: the cache.
      tiles: of R tiles.
      sinks: [N] or None.
      lanes: what W lanes hold.
      options: of the op.
      blocks: the kernel's block sizes.
      return_lse: whether to give log-sum-exps.
      interpret: as of pl.pallas_call.

    Returns:
      Outputs [R * B, N, elements of a value], log-sum-exps [R * B, N] or None, and the pages.
    """
    num_rows, num_heads, _ = q.shape
    num_tiles, num_kv_heads = tiles.start.shape[0], new_kv.shape[1]
    group = min(sublanes(kv_pages.data.dtype), kv_pages.page_size)
    inputs = {
        "q": pack_prefill_queries(q, num_tiles, num_kv_heads, blocks.part_rows),
        "new_kv": group_rows(new_kv, tiles.start, group),
    }
    if new_scales is not None:
        inputs["new_scales"] = pack_scales(group_rows(new_scales, tiles.start, kv_pages.page_size))

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
    outputs = {"out": jax.ShapeDtypeStruct((num_tiles, num_kv_heads, rows, lanes.num_values), q.dtype)}
    if return_lse:
        outputs["lse"] = jax.ShapeDtypeStruct((num_tiles, num_kv_heads, rows, LANES), jnp.float32)
    page_table = tiles.page_table[:, None]
    table_block = (None, *page_table.shape[1:])
    last = num_tiles - 1
    results, pools = fused_call(
        partial(
            prefill_kernel,
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
        pools=pools_of(kv_pages),
        outputs=outputs,
        output_specs={name: of_tile(x.shape) for name, x in outputs.items()},
        scratch=_scratch(kv_pages, lanes, rows, group, blocks),
        interpret=interpret,
    )
    unpack = partial(unpack_prefill_rows, num_heads=num_heads, rows=blocks.part_rows)
    out = lanes.output(unpack(results["out"]))
    lse = unpack(results["lse"][..., :1])[..., 0] if return_lse else None
    return out, lse, KVPages(pools["kv"], pools.get("scales"))


def _scratch(kv_pages: KVPages, lanes: Lanes, rows: int, group: int, blocks: PrefillBlocks) -> dict[str, Any]:
    """The body's memory, by the names that it uses; `rows` of a kv head's queries, `group` of a page."""
    num_kv_heads, dtype = kv_pages.data.shape[1], kv_pages.data.dtype
    scratch = shared_scratch(kv_pages, lanes, rows, blocks) | {
        "old_kv": pltpu.VMEM((num_kv_heads, group, lanes.width), dtype),
        "merged_kv": pltpu.VMEM((num_kv_heads, group, lanes.width), dtype),
        "merge_sems": pltpu.SemaphoreType.DMA((2,)),
        "write_sem": pltpu.SemaphoreType.DMA((1,)),
        "writing_kv": pltpu.SMEM((1,), jnp.int32),
    }
    if kv_pages.scales is not None:
        page_scales = kv_pages.scales.shape[1:]
        scratch["old_scales"] = pltpu.VMEM(page_scales, jnp.float32)
        scratch["merged_scales"] = pltpu.VMEM(page_scales, jnp.float32)
        scratch["writing_scales"] = pltpu.SMEM((1,), jnp.int32)
    return scratch
