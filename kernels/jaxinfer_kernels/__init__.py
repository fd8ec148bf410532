"""Attention over a paged KV cache, matmuls and what stands between them: arrays in, arrays out.

Knows no model, mesh or flag.
"""

from jaxinfer_kernels.api import mla_paged_attention, paged_attention
from jaxinfer_kernels.elementwise import add_rms_norm, rms_norm, rotate, rotate_qkv
from jaxinfer_kernels.layout import (
    AttentionMetadata,
    Backend,
    KVPages,
    QueryTiles,
    create_kv_pages,
    create_mla_pages,
    decode_tile_tokens,
    kv_pages_shape,
    kv_scales_shape,
    kv_tile_tokens,
    mla_pages_shape,
    prefill_tile_tokens,
)
from jaxinfer_kernels.matmul import (
    ACTIVATIONS,
    Activation,
    gated_linear,
    grouped_matmul,
    linear,
    quantized_matmul,
)

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "AttentionMetadata",
    "Backend",
    "KVPages",
    "QueryTiles",
    "add_rms_norm",
    "create_kv_pages",
    "create_mla_pages",
    "decode_tile_tokens",
    "gated_linear",
    "grouped_matmul",
    "kv_pages_shape",
    "kv_scales_shape",
    "kv_tile_tokens",
    "linear",
    "mla_paged_attention",
    "mla_pages_shape",
    "paged_attention",
    "prefill_tile_tokens",
    "quantized_matmul",
    "rms_norm",
    "rotate",
    "rotate_qkv",
]
