"""Attention over a paged KV cache: arrays in, arrays out. Knows no model, mesh or flag."""

from jaxinfer_kernels.api import paged_attention
from jaxinfer_kernels.layout import AttentionMetadata, QueryTiles, kv_pages_shape, kv_tile_tokens

__all__ = [
    "AttentionMetadata",
    "QueryTiles",
    "kv_pages_shape",
    "kv_tile_tokens",
    "paged_attention",
]
