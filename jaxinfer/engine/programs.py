"""The compiled programs of serving, and the functions that they are compiled from.

A step is a forward pass of the model, then sampling. They are programs apart, so that the forward
pass is compiled for each bucket of rows and sampling only for each number of sampled rows.

Dims: S decode rows, C prefill rows, T = S + C, M sampled rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.config import CacheConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.kv_cache import SlotState, create_kv_pages, create_slots
from jaxinfer.engine.step_batch import PREFILL_TILE, Bucket, StepBatch, StepBatcher
from jaxinfer.models.transformer import Transformer
from jaxinfer.ops.sampling import Sampled, SamplingBatch, sample, set_counts, token_logprobs, update_counts
from jaxinfer.types import StepPlan
from jaxinfer_kernels import paged_attention

COMPILE_THREADS = 2

KVPages = tuple[jax.Array, ...]
LogprobArrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # as token_logprobs returns them
Program = Callable[..., Any]


@dataclass(frozen=True)
class Programs:
    """Every program that serving can need, compiled. The first argument is always the model's leaves.

    Attributes:
      forward: by bucket, `decode_step` or `prefill_step`.
      sample: by M, `sample_step`.
      prompt_logprobs: by C, `prompt_logprobs_step`.
      set_counts: `set_counts_step`, which has no model's leaves.
    """

    forward: Mapping[Bucket, Program]
    sample: Mapping[int, Program]
    prompt_logprobs: Mapping[int, Program]
    set_counts: Program


def decode_step(
    model: Transformer, kv_pages: KVPages, last_tokens: jax.Array, batch: StepBatch
) -> tuple[KVPages, jax.Array]:
    """One token of each decode row: the pages, and the hidden state of the sampled rows [M, D]."""
    token_ids = last_tokens[batch.decode_slots]
    hidden, kv_pages = model(token_ids, batch.positions, kv_pages, batch.attention, paged_attention)
    return kv_pages, hidden[batch.sample_rows]


def prefill_step(
    model: Transformer, kv_pages: KVPages, last_tokens: jax.Array, batch: StepBatch
) -> tuple[KVPages, jax.Array, jax.Array]:
    """Chunks of prompts, and the decodes that ride along. Gives the prefill rows' hidden state [C, D] too."""
    num_decodes = batch.decode_slots.shape[0]
    token_ids = batch.token_ids.at[:num_decodes].set(last_tokens[batch.decode_slots])
    hidden, kv_pages = model(token_ids, batch.positions, kv_pages, batch.attention, paged_attention)
    return kv_pages, hidden[batch.sample_rows], hidden[num_decodes:]


def sample_step(
    model: Transformer, slots: SlotState, hidden: jax.Array, sample_slots: jax.Array, sampling: SamplingBatch
) -> tuple[SlotState, Sampled]:
    """A token of each hidden state [M, D], which its slot keeps."""
    logits = model.logits(hidden)
    sampled = sample(logits, sampling, slots.prompt_mask, slots.output_counts, sample_slots)
    valid = sample_slots < slots.last_tokens.shape[0] - 1
    counts = update_counts(slots.output_counts, sample_slots, sampled.token_ids, valid)
    last_tokens = slots.last_tokens.at[sample_slots].set(sampled.token_ids)
    return SlotState(last_tokens, slots.prompt_mask, counts), sampled


def prompt_logprobs_step(model: Transformer, hidden: jax.Array, target_ids: jax.Array) -> LogprobArrays:
    """Log-probabilities of the token after each of C rows, a tile at a time so that logits stay small."""
    tiles = (hidden.reshape(-1, PREFILL_TILE, hidden.shape[-1]), target_ids.reshape(-1, PREFILL_TILE))
    out = jax.lax.map(lambda tile: token_logprobs(model.logits(tile[0]), tile[1]), tiles)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)


def set_counts_step(
    slots: SlotState, slot: jax.Array, token_ids: jax.Array, num_prompt: jax.Array, num_total: jax.Array
) -> SlotState:
    """Sets a slot's counts of tokens at the admission of a sequence with penalties."""
    mask, counts = set_counts(slots.prompt_mask, slots.output_counts, slot, token_ids, num_prompt, num_total)
    return SlotState(slots.last_tokens, mask, counts)


def compile_programs(
    model: Transformer, model_config: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig
) -> Programs:
    """Compiles all, several at once. `model` may be abstract: only its shapes are read."""
    leaves, treedef = jax.tree.flatten(model)
    params = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    kv_pages = jax.eval_shape(lambda: create_kv_pages(model_config, cache))
    slots = jax.eval_shape(lambda: create_slots(model_config, scheduler.max_num_seqs))
    batcher = StepBatcher(scheduler, cache)
    hidden_dtype = leaves[0].dtype

    def hidden(rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, model_config.hidden_size), hidden_dtype)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32)

    def compile_one(step: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Program:
        def run(params: list[jax.Array], *args: Any) -> Any:
            return step(jax.tree.unflatten(treedef, params), *args)

        run.__name__ = step.__name__
        return jax.jit(run, donate_argnums=donate).lower(params, *args).compile()

    def compile_forward(bucket: Bucket) -> Program:
        step = prefill_step if bucket.num_prefill_rows else decode_step
        batch = batcher.build(StepPlan(0, (), ()), bucket).batch
        return compile_one(step, kv_pages, slots.last_tokens, batch, donate=(1,))

    def compile_sample(size: int) -> Program:
        none = np.zeros(0, np.int32)
        sampling = batcher.sampling_rows.gather(none, none, none, size)
        return compile_one(sample_step, slots, hidden(size), integers(size), sampling, donate=(1,))

    def compile_prompt_logprobs(rows: int) -> Program:
        return compile_one(prompt_logprobs_step, hidden(rows), integers(rows))

    prefill_rows = sorted({bucket.num_prefill_rows for bucket in batcher.buckets} - {0})
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        forward = pool.map(compile_forward, batcher.buckets)
        sample = pool.map(compile_sample, batcher.sample_sizes)
        prompt_logprobs = pool.map(compile_prompt_logprobs, prefill_rows)
        lowered = jax.jit(set_counts_step, donate_argnums=0).lower(
            slots, integers(), integers(scheduler.max_model_len), integers(), integers()
        )
        return Programs(
            forward=dict(zip(batcher.buckets, forward, strict=True)),
            sample=dict(zip(batcher.sample_sizes, sample, strict=True)),
            prompt_logprobs=dict(zip(prefill_rows, prompt_logprobs, strict=True)),
            set_counts=lowered.compile(),
        )
