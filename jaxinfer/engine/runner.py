"""Owns the weights, the device state and the compiled steps. Meets the scheduler in StepPlan and StepResult."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxinfer_kernels import paged_attention

from jaxinfer.config import CacheConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.kv_cache import DeviceState, create_state
from jaxinfer.engine.step_batch import PREFILL_TILE, Bucket, StepBatch, StepBatcher
from jaxinfer.models.transformer import Transformer
from jaxinfer.ops.sampling import Sampled, sample, set_counts, token_logprobs, update_counts
from jaxinfer.types import SampledToken, ScheduledSeq, StepPlan, StepResult, TokenLogprobs

COMPILE_THREADS = 2

LogprobArrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # as token_logprobs returns them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step leaves for the host: M sampled rows, and the prompt's log-probabilities if asked."""

    sampled: Sampled
    prompt_logprobs: LogprobArrays | None


@dataclass(frozen=True)
class InFlight:
    """A launched step that the host has not read."""

    plan: StepPlan
    output: StepOutput


@dataclass(frozen=True)
class Programs:
    """The compiled steps, a bucket each, and what sets a slot's counts of tokens."""

    steps: Mapping[Bucket, Callable[..., tuple[DeviceState, StepOutput]]]
    set_counts: Callable[..., DeviceState]


def _sample_step(
    model: Transformer, hidden: jax.Array, state: DeviceState, batch: StepBatch
) -> tuple[Sampled, DeviceState]:
    """Samples the rows asked for and keeps the tokens in their slots."""
    logits = model.logits(hidden[batch.sample_rows])
    sampled = sample(logits, batch.sampling, state.prompt_mask, state.output_counts, batch.sample_slots)
    valid = batch.sample_slots < state.last_tokens.shape[0] - 1
    return sampled, DeviceState(
        kv_pages=state.kv_pages,
        last_tokens=state.last_tokens.at[batch.sample_slots].set(sampled.token_ids),
        prompt_mask=state.prompt_mask,
        output_counts=update_counts(state.output_counts, batch.sample_slots, sampled.token_ids, valid),
    )


def _prompt_logprobs(model: Transformer, hidden: jax.Array, batch: StepBatch) -> LogprobArrays:
    """Log-probabilities of the tokens after each prefill row, a tile at a time so that logits stay small."""
    tiles = hidden.reshape(-1, PREFILL_TILE, hidden.shape[-1])
    targets = batch.target_ids.reshape(-1, PREFILL_TILE)

    def compute(operands: tuple[jax.Array, jax.Array]) -> LogprobArrays:
        return jax.lax.map(lambda tile: token_logprobs(model.logits(tile[0]), tile[1]), operands)

    shapes = jax.eval_shape(compute, (tiles, targets))
    zeros = lambda _: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)  # noqa: E731
    out = jax.lax.cond(batch.wants_prompt_logprobs, compute, zeros, (tiles, targets))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)


def decode_step(model: Transformer, state: DeviceState, batch: StepBatch) -> tuple[DeviceState, StepOutput]:
    """One token of each decode row: T = S."""
    token_ids = state.last_tokens[batch.decode_slots]
    hidden, kv_pages = model(token_ids, batch.positions, state.kv_pages, batch.attention, paged_attention)
    sampled, state = _sample_step(model, hidden, _with_pages(state, kv_pages), batch)
    return state, StepOutput(sampled, None)


def prefill_step(model: Transformer, state: DeviceState, batch: StepBatch) -> tuple[DeviceState, StepOutput]:
    """Chunks of prompts, and the decodes that ride along: T = S + C."""
    num_decodes = batch.decode_slots.shape[0]
    token_ids = batch.token_ids.at[:num_decodes].set(state.last_tokens[batch.decode_slots])
    hidden, kv_pages = model(token_ids, batch.positions, state.kv_pages, batch.attention, paged_attention)
    sampled, state = _sample_step(model, hidden, _with_pages(state, kv_pages), batch)
    return state, StepOutput(sampled, _prompt_logprobs(model, hidden[num_decodes:], batch))


def _with_pages(state: DeviceState, kv_pages: tuple[jax.Array, ...]) -> DeviceState:
    return DeviceState(kv_pages, state.last_tokens, state.prompt_mask, state.output_counts)


def _set_slot_counts(
    state: DeviceState, slot: jax.Array, token_ids: jax.Array, num_prompt: jax.Array, num_total: jax.Array
) -> DeviceState:
    mask, counts = set_counts(state.prompt_mask, state.output_counts, slot, token_ids, num_prompt, num_total)
    return DeviceState(state.kv_pages, state.last_tokens, mask, counts)


def compile_programs(
    model: Transformer,
    model_config: ModelConfig,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
) -> Programs:
    """Compiles every step that serving can need. `model` may be abstract: only its shapes are read."""
    leaves, treedef = jax.tree.flatten(model)
    params = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    max_num_seqs = scheduler_config.max_num_seqs
    state = jax.eval_shape(lambda: create_state(model_config, cache_config, max_num_seqs))
    batcher = StepBatcher(scheduler_config, cache_config)

    def compile_step(bucket: Bucket) -> Callable[..., tuple[DeviceState, StepOutput]]:
        step = prefill_step if bucket.num_prefill_rows else decode_step

        def run(params: list[jax.Array], state: DeviceState, batch: StepBatch) -> tuple[DeviceState, StepOutput]:
            return step(jax.tree.unflatten(treedef, params), state, batch)

        run.__name__ = step.__name__
        batch = batcher.build(StepPlan(0, (), ()), bucket)
        return jax.jit(run, donate_argnums=1).lower(params, state, batch).compile()

    scalar = jax.ShapeDtypeStruct((), np.int32)
    tokens = jax.ShapeDtypeStruct((scheduler_config.max_model_len,), np.int32)
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        steps = dict(zip(batcher.buckets, pool.map(compile_step, batcher.buckets), strict=True))
        set_slot = jax.jit(_set_slot_counts, donate_argnums=0).lower(state, scalar, tokens, scalar, scalar)
        return Programs(steps, set_slot.compile())


class Runner:
    """Launches steps without waiting, and reads them when asked. Not thread safe."""

    def __init__(
        self,
        model: Transformer,
        programs: Programs,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
    ) -> None:
        self._params = jax.tree.leaves(model)
        self._programs = programs
        self._batcher = StepBatcher(scheduler_config, cache_config)
        self._max_model_len = scheduler_config.max_model_len
        self.state = create_state(model_config, cache_config, scheduler_config.max_num_seqs)
        self.num_padding_rows = 0  # rows computed for nothing, so far
        self.wait_s = 0.0  # spent waiting for the device, so far

    def launch(self, plan: StepPlan) -> InFlight:
        """Starts a step. Returns before it is done."""
        for seq in plan.prefills:
            if seq.first and seq.sequence.request.params.has_penalties:
                self._set_counts(seq)
        bucket = self._batcher.bucket(plan)
        batch = self._batcher.build(plan, bucket)
        self.num_padding_rows += bucket.num_rows - plan.num_tokens
        self.state, output = self._programs.steps[bucket](self._params, self.state, batch)
        return InFlight(plan, output)

    def read(self, step: InFlight) -> StepResult:
        """Waits for a step and brings what it sampled to the host."""
        before_s = time.monotonic()
        token_ids = np.asarray(step.output.sampled.token_ids)
        self.wait_s += time.monotonic() - before_s
        sampling = [seq for seq in step.plan.decodes + step.plan.prefills if seq.samples]
        wants = any(seq.sequence.request.params.logprobs is not None for seq in sampling)
        s = step.output.sampled
        logprobs = jax.device_get((s.logprobs, s.ranks, s.top_ids, s.top_logprobs)) if wants else None
        sampled = {}
        for row, (seq, token_id) in enumerate(zip(sampling, token_ids.tolist(), strict=False)):
            count = seq.sequence.request.params.logprobs
            details = None if count is None or logprobs is None else _logprobs(logprobs, row, token_id, count)
            sampled[seq.sequence.seq_id] = SampledToken(token_id, details)
        return StepResult(step.plan.step_id, sampled, self._read_prompt_logprobs(step))

    def _read_prompt_logprobs(self, step: InFlight) -> dict[int, tuple[TokenLogprobs, ...]]:
        wanted = [s for s in step.plan.prefills if s.sequence.request.params.prompt_logprobs is not None]
        if not wanted:
            return {}
        arrays = jax.device_get(step.output.prompt_logprobs)
        results = {}
        row = 0
        for seq in step.plan.prefills:
            count = seq.sequence.request.params.prompt_logprobs
            if count is not None:
                targets = seq.sequence.token_ids[seq.start + 1 : seq.sequence.num_prompt_tokens][: seq.num_tokens]
                results[seq.sequence.seq_id] = tuple(
                    _logprobs(arrays, row + i, token_id, count) for i, token_id in enumerate(targets)
                )
            row += -(-seq.num_tokens // PREFILL_TILE) * PREFILL_TILE
        return results

    def _set_counts(self, seq: ScheduledSeq) -> None:
        sequence = seq.sequence
        token_ids = np.zeros(self._max_model_len, np.int32)
        token_ids[: len(sequence.token_ids)] = sequence.token_ids
        numbers = (np.int32(sequence.num_prompt_tokens), np.int32(len(sequence.token_ids)))
        self.state = self._programs.set_counts(self.state, np.int32(seq.slot), token_ids, *numbers)


def _logprobs(arrays: Any, row: int, token_id: int, count: int) -> TokenLogprobs:
    """One row of `token_logprobs`' arrays, cut to the number of alternatives asked for."""
    logprobs, ranks, top_ids, top_logprobs = arrays
    top = tuple(zip(top_ids[row, :count].tolist(), top_logprobs[row, :count].tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[row]), int(ranks[row]), top)
