"""Paged attention of one query a sequence on TPU: one call writes the new K and V and attends.

Dims as in attention_layout.py; f and c as in attention_pipeline.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels.layout import KVPages, QueryTiles
from jaxinfer_kernels.tpu.attention_body import shared_scratch
from jaxinfer_kernels.tpu.attention_decode_body import DecodeBlocks, decode_kernel
from jaxinfer_kernels.tpu.attention_layout import (
    LANES,
    Lanes,
    pack_decode_queries,
    pack_scales,
    round_up,
    sublanes,
    unpack_decode_rows,
)
from jaxinfer_kernels.tpu.attention_pipeline import fused_call, pools_of
from jaxinfer_kernels.tpu.attention_softmax import AttentionOptions


def decode_attention(
    q: jax.Array,
    new_kv: jax.Array,
    new_scales: jax.Array | None,
    kv_pages: KVPages,
    tiles: QueryTiles,
    sinks: jax.Array | None,
    *,
    lanes: Lanes,
    options: AttentionOptions,
    blocks: DecodeBlocks,
    return_lse: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None, KVPages]:
    """Attends from one query a sequence.

    Args:
      q: [S, N, elements of a key].
      new_kv: [S, K, W] in the cache's dtype.
      new_scales: [S, 2K] or None.
      kv_pages: the cache.
      tiles: of S sequences.
      sinks: [N] or None.
      lanes: what W lanes hold.
      options: of the op.
      blocks: the kernel's block sizes.
      return_lse: whether to give log-sum-exps.
      interpret: as of pl.pallas_call.

    Returns:
      Outputs [S, N, elements of a value], log-sum-exps [S, N] or None, and the pages.
    """
    num_rows, num_heads, _ = q.shape
    num_kv_heads = new_kv.shape[1]
    sequences = min(blocks.sequences, num_rows)
    padded = round_up(num_rows, sequences)
    num_steps = padded // sequences

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, padded - num_rows), *[(0, 0)] * (x.ndim - 1)])

    inputs = {"q": pack_decode_queries(pad(q), num_kv_heads), "new_kv": pad(new_kv).astype(jnp.float32)}
    if new_scales is not None:  # as if all of the page's positions had the new token's
        new_scales = pad(new_scales)
        inputs["new_scales"] = pack_scales(
            jnp.broadcast_to(new_scales[..., None], (*new_scales.shape, kv_pages.page_size))
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
    outputs = {"out": jax.ShapeDtypeStruct((padded, num_kv_heads, group, lanes.num_values), q.dtype)}
    if return_lse:
        outputs["lse"] = jax.ShapeDtypeStruct((padded, num_kv_heads, group, LANES), jnp.float32)
    page_table = pad(tiles.page_table).reshape(num_steps, sequences, -1)
    table_block = (None, *page_table.shape[1:])
    last = num_steps - 1
    blocks = replace(blocks, sequences=sequences)
    results, pools = fused_call(
        partial(decode_kernel, options=options, blocks=blocks, lanes=lanes, num_rows=padded),
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
        pools=pools_of(kv_pages),
        outputs=outputs,
        output_specs={name: of_step(x.shape) for name, x in outputs.items()},
        scratch=_scratch(kv_pages, lanes, group, blocks),
        interpret=interpret,
    )
    out = lanes.output(unpack_decode_rows(results["out"], num_heads)[:num_rows])
    lse = unpack_decode_rows(results["lse"], num_heads)[:num_rows, :, 0] if return_lse else None
    return out, lse, KVPages(pools["kv"], pools.get("scales"))


def _scratch(kv_pages: KVPages, lanes: Lanes, group: int, blocks: DecodeBlocks) -> dict[str, Any]:
    """The body's memory, by the names that it uses; `group` query rows a kv head."""
    num_kv_heads, dtype = kv_pages.data.shape[1], kv_pages.data.dtype
    scratch = shared_scratch(kv_pages, lanes, group, blocks) | {
        "written_kv": pltpu.VMEM((blocks.sequences, num_kv_heads, sublanes(dtype), lanes.width), dtype),
        "write_sems": pltpu.SemaphoreType.DMA((blocks.sequences,)),
        "writing": pltpu.SMEM((blocks.sequences,), jnp.int32),
    }
    if kv_pages.scales is not None:
        page_scales = kv_pages.scales.shape[1:]
        scratch["written_scales"] = pltpu.VMEM((blocks.sequences, *page_scales), jnp.float32)
    return scratch
