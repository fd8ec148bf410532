"""Bytes of device memory, by formula, before anything is allocated."""

from __future__ import annotations

import numpy as np

from jaxinfer.config import ConfigError, ModelConfig
from jaxinfer_kernels import kv_tile_tokens

GIB = 2**30


def kv_bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    """K and V of one token in all layers: 131,072 bytes for Llama-3.1-8B in bfloat16."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens of one sequence."""
    return -(-num_tokens // page_size)


def page_table_width(max_model_len: int, page_size: int) -> int:
    """Entries of a sequence's page table: whole tiles of the attention's reduction."""
    tile = kv_tile_tokens(page_size)
    return -(-max_model_len // tile) * (tile // page_size)


def choose_num_pages(
    model: ModelConfig,
    *,
    page_size: int,
    itemsize: int,
    max_model_len: int,
    max_num_seqs: int,
    num_pages: int | None,
    budget_bytes: int,
) -> int:
    """Pages to allocate, the null page included: as asked, else what all slots can use or the budget holds.

    Raises:
      ConfigError: one request at the length limit does not fit.
    """
    page_bytes = kv_bytes_per_token(model, itemsize) * page_size
    pages_a_seq = pages_for(max_model_len, page_size)
    if num_pages is None:
        num_pages = min(max_num_seqs * pages_a_seq + 1, budget_bytes // page_bytes)
    if num_pages - 1 < pages_a_seq:
        fitting = max(0, num_pages - 1) * page_size
        raise ConfigError(
            f"max_model_len={max_model_len} needs {pages_a_seq} pages of {page_size} tokens "
            f"({pages_a_seq * page_bytes / GIB:.2f} GiB of KV cache), but {max(0, num_pages - 1)} fit: "
            f"lower max_model_len to {fitting}, or raise kv_cache_bytes or num_pages"
        )
    return num_pages


def itemsize(dtype: str) -> int:
    """Bytes of an element, by a numpy or ml_dtypes name."""
    import ml_dtypes  # noqa: F401 (registers bfloat16 with numpy)

    return np.dtype(dtype).itemsize
