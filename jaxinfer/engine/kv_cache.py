"""What a step keeps on the device: the paged KV cache and the state of each slot. Donated to every step."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxinfer_kernels import kv_pages_shape

from jaxinfer.config import CacheConfig, ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """N is max_num_seqs + 1: the last slot is where padded rows write.

    Attributes:
      kv_pages: an array a layer, in the kernels' layout; page 0 is the null page.
      last_tokens: [N] int32, the token sampled last in each slot: the next decode's input, before the
        host has read it.
      prompt_mask: [N, V] bool, which tokens the prompt holds; kept for sequences with penalties.
      output_counts: [N, V] int32, how often the output holds each token; likewise.
    """

    kv_pages: tuple[jax.Array, ...]
    last_tokens: jax.Array
    prompt_mask: jax.Array
    output_counts: jax.Array


def create_state(model: ModelConfig, cache: CacheConfig, max_num_seqs: int) -> DeviceState:
    """All zeros. Under `jax.eval_shape`, the shapes alone."""
    shape = kv_pages_shape(cache.num_pages, cache.page_size, model.num_key_value_heads, model.head_dim)
    slots = max_num_seqs + 1
    return DeviceState(
        kv_pages=tuple(jnp.zeros(shape, cache.dtype) for _ in model.layers),
        last_tokens=jnp.zeros((slots,), jnp.int32),
        prompt_mask=jnp.zeros((slots, model.vocab_size), jnp.bool_),
        output_counts=jnp.zeros((slots, model.vocab_size), jnp.int32),
    )
