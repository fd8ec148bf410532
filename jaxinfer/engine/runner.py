"""Owns the weights, the cache and the slots on the device. Meets the scheduler in StepPlan and StepResult."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.engine.kv_cache import SlotState
from jaxinfer.engine.programs import LogprobArrays, Programs
from jaxinfer.engine.step_batch import Bucket, BuiltStep, StepBatch, StepBatcher
from jaxinfer.memory.measured import code_bytes, device_bytes, temporary_bytes
from jaxinfer.models.transformer import Transformer
from jaxinfer.ops.sampling import Sampled
from jaxinfer.parallel.mesh import row_sharding
from jaxinfer.types import SampledToken, ScheduledSeq, StepPlan, StepResult, TokenLogprobs


@dataclass(frozen=True)
class InFlight:
    """A launched step that the host has not read: arrays that the device may still be computing."""

    plan: StepPlan
    built: BuiltStep
    sampled: Sampled
    prompt_logprobs: LogprobArrays | None


class Runner:
    """Launches steps without waiting, and reads them when asked. Not thread safe."""

    def __init__(
        self,
        stages: Sequence[Transformer],
        programs: Programs,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        meshes: Sequence[Mesh | None],
    ) -> None:
        """`stages` are the model's, each on its own of `meshes`."""
        self._params, self._head = [jax.tree.leaves(stage) for stage in stages], stages[-1].head_weight
        self.programs = programs
        self._batcher = StepBatcher(scheduler, cache)
        self._config = scheduler
        states = [create_state() for create_state in programs.create_state]
        self.kv_pages = [kv_pages for kv_pages, _ in states]  # of each stage
        self.slots: SlotState = states[-1][1]
        # Where what one stage hands to the next lies; nothing moves where there is one.
        self._places = [None if mesh is None or len(meshes) == 1 else row_sharding(mesh) for mesh in meshes]
        # With stages: a wave's as of its latest step that sampled, on the first stage, which then waits for
        # no other wave's steps, and between chunks of a prompt for none.
        self._last_tokens: dict[int, jax.Array] = {}
        self.num_padding_rows = 0  # rows computed for nothing, so far

    def memory_bytes(self, stage: int) -> dict[str, int]:
        """What is allocated, measured: bytes of one of a stage's devices by the ledger's classes."""
        programs, is_last = self.programs, stage == len(self._params) - 1
        forward = [stages[stage] for stages in programs.forward.values()]
        sampling = (*programs.sample.values(), *programs.prompt_logprobs.values(), programs.set_counts)
        return {
            "weights": device_bytes(self._params[stage]),
            "kv_cache": device_bytes(self.kv_pages[stage]),
            "slots": device_bytes(self.slots) if is_last else 0,
            "activations": temporary_bytes(forward),
            "logits": temporary_bytes(sampling) if is_last else 0,
            "programs": code_bytes((*forward, *sampling) if is_last else forward),
        }

    def launch(self, plan: StepPlan) -> InFlight:
        """Starts a step. Returns before it is done."""
        programs = self.programs
        for seq in plan.prefills:
            if seq.first and seq.sequence.request.params.has_penalties:
                self._set_counts(seq)
        bucket = self._batcher.bucket(plan)
        built = self._batcher.build(plan, bucket)
        self.num_padding_rows += bucket.num_rows * self._config.num_groups - plan.num_tokens
        hidden, *prefill_hidden = self._forward(bucket, built.batch, plan.wave)
        self.slots, sampled = programs.sample[self._batcher.num_samples(bucket)](
            self._head, self.slots, hidden, built.sample_slots, built.sampling
        )
        if len(self._params) > 1 and built.sampled:
            self._last_tokens[plan.wave] = self._moved(self.slots.last_tokens, 0)
        prompt_logprobs = None
        if built.target_ids is not None:
            program = programs.prompt_logprobs[bucket.num_prefill_rows]
            prompt_logprobs = program(self._head, prefill_hidden[0], built.target_ids)
        return InFlight(plan, built, sampled, prompt_logprobs)

    def _forward(self, bucket: Bucket, batch: StepBatch, wave: int) -> list[jax.Array]:
        """Runs the stages in turn, each on what the one before it hands over. What the last one gives."""
        results = [self._last_tokens.get(wave, self.slots.last_tokens)]
        for stage, program in enumerate(self.programs.forward[bucket]):
            carried = self._moved(results[0], stage)
            self.kv_pages[stage], *results = program(
                self._params[stage], self.kv_pages[stage], carried, batch
            )
        return results

    def _moved(self, array: jax.Array, stage: int) -> jax.Array:
        """Sent to a stage's devices, without waiting for it."""
        place = self._places[stage]
        return array if place is None else jax.device_put(array, place)

    def read(self, step: InFlight) -> StepResult:
        """Waits for a step and brings what it sampled to the host."""
        token_ids = np.asarray(step.sampled.token_ids).tolist()
        counts = [seq.sequence.request.params.logprobs for _, seq in step.built.sampled]
        s, arrays = step.sampled, None
        if any(count is not None for count in counts):
            arrays = jax.device_get((s.logprobs, s.ranks, s.top_ids, s.top_logprobs))
        sampled = {}
        for (row, seq), count in zip(step.built.sampled, counts, strict=True):
            details = None if count is None else _logprobs(arrays, row, token_ids[row], count)
            sampled[seq.sequence.seq_id] = SampledToken(token_ids[row], details)
        return StepResult(step.plan.step_id, sampled, _read_prompt_logprobs(step))

    def _set_counts(self, seq: ScheduledSeq) -> None:
        """Tells the slot's group; the others set their last slot, which is padding's."""
        sequence, groups = seq.sequence, self._config.num_groups
        token_ids = np.zeros((groups, self._config.max_model_len), np.int32)
        token_ids[seq.group, : len(sequence.token_ids)] = sequence.token_ids
        slots = np.full(groups, self._config.max_num_seqs, np.int32)
        slots[seq.group] = seq.slot
        num_prompt = np.full(groups, sequence.num_prompt_tokens, np.int32)
        num_total = np.full(groups, len(sequence.token_ids), np.int32)
        self.slots = self.programs.set_counts(self.slots, slots, token_ids, num_prompt, num_total)


def _read_prompt_logprobs(step: InFlight) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By seq_id, for the prompts that ask for them."""
    if step.prompt_logprobs is None:
        return {}
    arrays = jax.device_get(step.prompt_logprobs)
    results = {}
    for row, seq in step.built.prefills:
        count = seq.sequence.request.params.prompt_logprobs
        if count is not None:
            prompt = seq.sequence.token_ids[: seq.sequence.num_prompt_tokens]
            targets = prompt[seq.start + 1 : seq.start + 1 + seq.num_tokens]
            entries = (_logprobs(arrays, row + i, token_id, count) for i, token_id in enumerate(targets))
            results[seq.sequence.seq_id] = tuple(entries)
    return results


def _logprobs(arrays: Any, row: int, token_id: int, count: int) -> TokenLogprobs:
    """One row of `token_logprobs`' arrays, cut to the number of alternatives asked for."""
    logprobs, ranks, top_ids, top_logprobs = arrays
    top = tuple(zip(top_ids[row, :count].tolist(), top_logprobs[row, :count].tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[row]), int(ranks[row]), top)
