"""The gpu backend of paged attention: writes the step's keys and values, then runs the kernels.

Pages are [num_pages, K, page_size, 2, H] with H up to a multiple of 64, the width of the products' swizzled
tiles: a token's key and value lie side by side, so that one TMA copy brings a page of one head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer_kernels.gpu.common import MMA_ROWS, Logits, Visibility
from jaxinfer_kernels.gpu.decode import decode_attention
from jaxinfer_kernels.gpu.prefill import prefill_attention
from jaxinfer_kernels.gpu.targets import Target, current_target
from jaxinfer_kernels.layout import AttentionMetadata, KVPages
from jaxinfer_kernels.xla import write_rows

SMEM_BYTES = 227 * 1024  # that one block may have; an SM has one KiB more, and a block costs one
MAX_STAGES = 4


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    sinks: jax.Array | None,
    *,
    scale: float,
    sliding_window: int | None,
    attention_chunk: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """See `api.paged_attention`: outputs [T, N, H], log-sum-exps [T, N] and the pages.

    Raises:
      ValueError: what the kernels do not support, by the argument's name.
    """
    target = current_target()
    _check(q, k, kv_pages, metadata, target)
    padding = kv_pages.data.shape[-1] - k.shape[-1]
    kv = jnp.pad(jnp.stack([k, v], axis=2), ((0, 0), (0, 0), (0, 0), (0, padding)))
    kv_pages = write_rows(kv_pages, kv, metadata.kv_write_index)
    num_pages, num_kv_heads, page_size, _, head_dim = kv_pages.data.shape
    pages = kv_pages.data.reshape(num_pages, num_kv_heads, page_size, 2 * head_dim)
    visibility = Visibility(sliding_window, attention_chunk)
    shared: dict[str, Any] = dict(
        target=target,
        logits=Logits(scale, soft_cap),
        visibility=visibility,
        sinks=sinks,
        interpret=interpret,
    )
    itemsize = pages.dtype.itemsize
    outputs: list[tuple[jax.Array, jax.Array]] = []
    row = 0
    if metadata.decode is not None:
        row = metadata.decode.start.shape[0]
        num_blocks, num_stages = decode_launch(target, head_dim, q.shape[1] // num_kv_heads, itemsize)
        num_blocks = 2 if interpret else num_blocks  # interpreted blocks run one after the other
        decode = partial(decode_attention, num_blocks=num_blocks, num_stages=num_stages, **shared)
        outputs.append(decode(q[:row], pages, kv_pages.scales, metadata.decode))
    if metadata.prefill is not None:
        kv_tile, num_stages = prefill_launch(target, head_dim, page_size, visibility, itemsize)
        prefill = partial(prefill_attention, kv_tile_tokens=kv_tile, num_stages=num_stages, **shared)
        outputs.append(prefill(q[row:], pages, kv_pages.scales, metadata.prefill))
    out, lse = outputs[0]
    if len(outputs) > 1:
        out, lse = jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
    return out, lse, kv_pages


def decode_launch(target: Target, head_dim: int, group: int, itemsize: int = 2) -> tuple[int, int]:
    """Blocks and stages of the decode kernel: two blocks an SM where each has three stages, or one.

    itemsize is the pages': quantised tiles are half the size, and widening them takes the registers
    of a second block.
    """
    columns = -(-group // target.columns) * target.columns
    value_dim = sum(part.stop - part.start for part in target.value_rows((head_dim, 2 * head_dim)))
    stage = 2 * target.rows * (head_dim * itemsize + (4 if itemsize == 1 else 0))
    rest = columns * (2 * head_dim * 2 + target.rows * 2 + value_dim * 4) + 4096
    if itemsize == 1:
        rest += 2 * target.rows * head_dim * 2
    stages = {blocks: (SMEM_BYTES // blocks - 1024 - rest) // stage for blocks in (1, 2)}
    blocks = 2 if itemsize > 1 and stages[2] >= 3 else 1
    return blocks * target.num_sms, min(stages[blocks], MAX_STAGES)


def prefill_launch(
    target: Target, head_dim: int, page_size: int, visibility: Visibility, itemsize: int = 2
) -> tuple[int, int]:
    """Positions a tile of KV and stages of the prefill kernel. See `decode_launch`.

    Large tiles wait less often; small ones compute less beyond the edge of a window, and leave room
    for stages where heads are wide or pages quantised.
    """
    window = visibility.limit(1024) < 1024
    pages = 128 % page_size and page_size % 128
    small = head_dim > 128 or itemsize == 1 or window or pages or not target.weights_in_registers
    kv_tile = 64 if small else 128
    rest = 2 * MMA_ROWS * (head_dim * 2 + 4) + 1024
    if not target.weights_in_registers:
        rest += 2 * MMA_ROWS * kv_tile * 2
    stage = 2 * kv_tile * (head_dim * 2)
    if itemsize == 1:
        rest += 2 * 2 * kv_tile * (head_dim + 4)
        stage += 2 * kv_tile * 4
    return kv_tile, min((SMEM_BYTES - rest) // stage, MAX_STAGES)


def _check(
    q: jax.Array, k: jax.Array, kv_pages: KVPages, metadata: AttentionMetadata, target: Target
) -> None:
    """Raises ValueError for what the kernels do not have."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"q ({q.dtype}) must be bfloat16 or float16 for backend='gpu': its products have no float32"
        )
    if kv_pages.scales is None and kv_pages.data.dtype != q.dtype:
        raise ValueError(f"kv_pages.data ({kv_pages.data.dtype}) must be q's {q.dtype} for backend='gpu'")
    least = 8 if kv_pages.scales is None else 32  # scales come by TMA, 128 bytes at a time or more
    if kv_pages.page_size % least:
        raise ValueError(
            f"page_size={kv_pages.page_size} must be a multiple of {least} for {kv_pages.dtype} pages with "
            "backend='gpu'"
        )
    if kv_pages.data.shape[-1] > 256:
        raise ValueError(f"k{k.shape} must have a head_dim of 256 at most for backend='gpu'")
    if metadata.decode is not None:
        _, stages = decode_launch(
            target, kv_pages.data.shape[-1], q.shape[1] // k.shape[1], kv_pages.data.dtype.itemsize
        )
        if stages < 1:
            raise ValueError(
                f"kv_pages.data{kv_pages.data.shape} ({kv_pages.dtype}) does not fit the shared memory of "
                f"{target.name}'s kernel: use backend='xla'"
            )
    num_rows = q.shape[0]
    if metadata.prefill is not None:
        if metadata.decode is not None:
            num_rows -= metadata.decode.start.shape[0]
        tile = num_rows // metadata.prefill.start.shape[0]
        if tile not in (MMA_ROWS, 2 * MMA_ROWS):
            raise ValueError(f"metadata.prefill has tiles of {tile} rows; backend='gpu' takes 64 or 128")
