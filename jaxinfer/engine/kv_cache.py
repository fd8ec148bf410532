"""What stays on the device from step to step: the paged KV cache and the state of each slot. Both donated."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import CacheConfig, ModelConfig
from jaxinfer.parallel.mesh import num_groups, page_sharding, row_sharding
from jaxinfer_kernels import KVPages
from jaxinfer_kernels import create_kv_pages as create_layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """What each slot keeps between steps. N is max_num_seqs + 1: padded rows write into the last slot.

    On a mesh N is that for each data-parallel group, one group after another.

    Attributes:
      last_tokens: [N] int32, the token sampled last: the next decode's input, before the host has
        read it.
      prompt_mask: [N, V] bool, which tokens the prompt holds; kept for sequences with penalties.
      output_counts: [N, V] int32, how often the output holds each token; likewise.
    """

    last_tokens: jax.Array
    prompt_mask: jax.Array
    output_counts: jax.Array


def create_kv_pages(model: ModelConfig, cache: CacheConfig, mesh: Mesh | None = None) -> tuple[KVPages, ...]:
    """Unused pages, an entry a layer, in the kernels' layout; page 0 of each group's is its null page."""
    num_pages = cache.num_pages * num_groups(mesh)
    shape = (num_pages, cache.page_size, model.num_key_value_heads, model.head_dim)
    place = None if mesh is None else page_sharding(mesh)
    return tuple(create_layer(*shape, cache.dtype, cache.backend, device=place) for _ in model.layers)


def create_slots(model: ModelConfig, max_num_seqs: int, mesh: Mesh | None = None) -> SlotState:
    """Zeros."""
    num_slots = (max_num_seqs + 1) * num_groups(mesh)
    place = None if mesh is None else row_sharding(mesh)
    return SlotState(
        last_tokens=jnp.zeros((num_slots,), jnp.int32, device=place),
        prompt_mask=jnp.zeros((num_slots, model.vocab_size), jnp.bool_, device=place),
        output_counts=jnp.zeros((num_slots, model.vocab_size), jnp.int32, device=place),
    )
