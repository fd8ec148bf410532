"""Owns the weights, the cache and the slots on the device. Meets the scheduler in StepPlan and StepResult."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.engine.handover import Handover, LogprobArrays, make_exchanges
from jaxinfer.engine.kv_cache import SlotState
from jaxinfer.engine.programs import Programs
from jaxinfer.engine.step_batch import Bucket, BuiltStep, StepBatcher
from jaxinfer.memory.measured import code_bytes, device_bytes, temporary_bytes
from jaxinfer.models.transformer import Transformer
from jaxinfer.ops.sampling import Sampled
from jaxinfer.types import SampledToken, ScheduledSeq, StepPlan, StepResult, TokenLogprobs


@dataclass
class InFlight:
    """A launched step that the host has not read: arrays that the device may still be computing.

    Attributes:
      plan, bucket, built: what to compute.
      counts: arguments of `set_counts_step`, of the sequences that need it before the step samples.
      carried: what the last stage that computed it gave, for the next one; None where that is elsewhere.
      sampled, prompt_logprobs: what came of it.
      delivered: whether the host can read them, and the first stage has the tokens.
    """

    plan: StepPlan
    bucket: Bucket
    built: BuiltStep
    counts: tuple[tuple[np.ndarray, ...], ...]
    carried: Any = None
    sampled: Sampled | None = None
    prompt_logprobs: LogprobArrays | None = None
    delivered: bool = False


class Runner:
    """Launches steps without waiting, and reads them when asked. Not thread safe.

    A step passes the pipeline stages in turn. Where these lie on several hosts, handing on waits until both
    ends have come to it: every stage computes the step that it has, and only then all hand on. So what a
    further stage does for a step is launched when the next step enters, or when the step is to be read; all
    stages compute at once, and all hosts come to the exchanges in one order, whatever stages they have.
    """

    def __init__(
        self,
        stages: Mapping[int, Transformer],
        programs: Programs,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        meshes: Sequence[Mesh | None],
    ) -> None:
        """`stages` are those of the model that this host has a part of; all are on `meshes`, one each."""
        self._last_stage = len(meshes) - 1
        self._params = {index: jax.tree.leaves(stage) for index, stage in stages.items()}
        self._head = stages[self._last_stage].head_weight if self._last_stage in stages else None
        self.programs = programs
        self._batcher = StepBatcher(scheduler, cache)
        self._config = scheduler
        states = {index: create_state() for index, create_state in programs.create_state.items()}
        self.kv_pages = {index: kv_pages for index, (kv_pages, _) in states.items()}  # by stage
        self.slots: SlotState | None = states[self._last_stage][1] if self._last_stage in states else None
        any_stage = next(iter(stages.values()))
        exchanges = make_exchanges(
            self._batcher, scheduler, any_stage.config.hidden_size, any_stage.dtype, meshes
        )
        self._handover = Handover(meshes, exchanges, programs.by_name)
        # The steps that have come to the second stage, to the third, and so on.
        self._between: list[InFlight | None] = [None] * self._last_stage
        # With stages: a wave's as of its latest step that sampled, on the first stage, which then waits for
        # no other wave's steps, and between chunks of a prompt for none.
        self._last_tokens: dict[int, Any] = {}
        self._sampling: dict[int, InFlight] = {}  # a wave's latest step that samples, on several hosts
        self.num_padding_rows = 0  # rows computed for nothing, so far

    def memory_bytes(self, stage: int) -> dict[str, int]:
        """What is allocated, measured: bytes of one of a stage's devices by the ledger's classes."""
        programs, is_last = self.programs, stage == self._last_stage
        forward = [stages[stage] for stages in programs.forward.values()]
        sampling = (*programs.sample.values(), *programs.prompt_logprobs.values(), programs.set_counts)
        return {
            "weights": device_bytes(self._params[stage]),
            "kv_cache": device_bytes(self.kv_pages[stage]),
            "slots": device_bytes(self.slots) if is_last else 0,
            "activations": temporary_bytes(forward) + self._handover.held_bytes(stage),
            "logits": temporary_bytes(sampling) if is_last else 0,
            "programs": code_bytes((*forward, *sampling) if is_last else forward),
        }

    def launch(self, plan: StepPlan) -> InFlight:
        """Starts a step. Returns before it is done."""
        bucket = self._batcher.bucket(plan)
        built = self._batcher.build(plan, bucket)
        self.num_padding_rows += bucket.num_rows * self._config.num_groups - plan.num_tokens
        counts = [
            self._counts(seq)
            for seq in plan.prefills
            if seq.first and seq.sequence.request.params.has_penalties
        ]
        step = InFlight(plan, bucket, built, tuple(counts))
        if before := self._sampling.pop(plan.wave, None):
            self._finish(before)  # its tokens go in
        self._advance(step)
        if not self._handover.waits:
            self._finish(step)
        elif built.sampled:
            self._sampling[plan.wave] = step
        return step

    def _finish(self, step: InFlight) -> None:
        """Launches what is left of a step."""
        while not step.delivered:
            self._advance(None)

    def _advance(self, entering: InFlight | None) -> None:
        """Every stage computes the step that has come to it, and hands it on."""
        steps = [entering, *self._between]
        for stage, step in enumerate(steps):
            if step is not None and stage in self._params:
                self._compute(step, stage)
        # Every other stage at once, so that no chain of stages waits one for another.
        for stage in (*range(0, self._last_stage, 2), *range(1, self._last_stage, 2)):
            if (step := steps[stage]) is not None:
                step.carried = self._handover.hand_on(step.carried, stage, step.bucket.num_rows)
        if (step := steps[-1]) is not None:
            self._deliver(step)
        self._between = steps[:-1]

    def _compute(self, step: InFlight, stage: int) -> None:
        """What a stage does for a step; the last one samples too."""
        if stage == 0:
            step.carried = self._tokens_of(step.plan.wave)
        program = self.programs.forward[step.bucket][stage]
        self.kv_pages[stage], step.carried, *prefill_hidden = program(
            self._params[stage], self.kv_pages[stage], step.carried, step.built.batch
        )
        if stage == self._last_stage:
            self._sample(step, *prefill_hidden)
        self._handover.settle((step.carried, step.sampled, step.prompt_logprobs))

    def _tokens_of(self, wave: int) -> Any:
        """The slots' last tokens, as far as the wave's sequences go."""
        if self.slots is not None and self._last_stage == 0:
            return self.slots.last_tokens
        num_slots = (self._config.max_num_seqs + 1) * self._config.num_groups
        return self._last_tokens.get(wave, np.zeros(num_slots, np.int32))

    def _sample(self, step: InFlight, prefill_hidden: jax.Array | None = None) -> None:
        programs, built = self.programs, step.built
        for counts in step.counts:
            assert programs.set_counts is not None
            self.slots = programs.set_counts(self.slots, *counts)
        self.slots, step.sampled = programs.sample[self._batcher.num_samples(step.bucket)](
            self._head, self.slots, step.carried, built.sample_slots, built.sampling
        )
        if built.target_ids is not None:
            program = programs.prompt_logprobs[step.bucket.num_prefill_rows]
            step.prompt_logprobs = program(self._head, prefill_hidden, built.target_ids)

    def _deliver(self, step: InFlight) -> None:
        """Of a step that has passed all stages."""
        if self._last_stage > 0:
            last_tokens = None if self.slots is None else self.slots.last_tokens
            size = self._batcher.num_samples(step.bucket)
            step.sampled, tokens = self._handover.deliver(step.sampled, last_tokens, size)
            if step.built.sampled:
                self._last_tokens[step.plan.wave] = tokens
            if step.built.target_ids is not None:
                rows = step.bucket.num_prefill_rows
                step.prompt_logprobs = self._handover.deliver_logprobs(step.prompt_logprobs, rows)
        step.carried, step.delivered = None, True

    def read(self, step: InFlight) -> StepResult:
        """Waits for a step and brings what it sampled to the host."""
        self._finish(step)
        assert step.sampled is not None
        s, arrays = step.sampled, None
        token_ids = np.asarray(s.token_ids).tolist()
        counts = [seq.sequence.request.params.logprobs for _, seq in step.built.sampled]
        if any(count is not None for count in counts):
            arrays = jax.device_get((s.logprobs, s.ranks, s.top_ids, s.top_logprobs))
        sampled = {}
        for (row, seq), count in zip(step.built.sampled, counts, strict=True):
            details = None if count is None else _logprobs(arrays, row, token_ids[row], count)
            sampled[seq.sequence.seq_id] = SampledToken(token_ids[row], details)
        return StepResult(step.plan.step_id, sampled, _read_prompt_logprobs(step))

    def _counts(self, seq: ScheduledSeq) -> tuple[np.ndarray, ...]:
        """What tells the slot's group of a sequence; the others set their last slot, which is padding's."""
        sequence, groups = seq.sequence, self._config.num_groups
        token_ids = np.zeros((groups, self._config.max_model_len), np.int32)
        token_ids[seq.group, : len(sequence.token_ids)] = sequence.token_ids
        slots = np.full(groups, self._config.max_num_seqs, np.int32)
        slots[seq.group] = seq.slot
        num_prompt = np.full(groups, sequence.num_prompt_tokens, np.int32)
        num_total = np.full(groups, len(sequence.token_ids), np.int32)
        return slots, token_ids, num_prompt, num_total


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
