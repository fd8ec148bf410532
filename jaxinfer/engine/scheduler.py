"""Continuous batching: which tokens of which sequences the next step computes. Pure Python.

Each step holds, in this order: one token of every running sequence whose prompt is computed;
further chunks of the prompts that are under way; the first chunks of waiting sequences, while
slots, pages and the budget of prefill tokens last. Sequences are ordered by arrival, or by
priority and then arrival.

**Overlap.** `schedule` for step n + 1 may be called before `commit` of step n, and no assumption
is made of how many steps are in flight, save that the device runs them in order. Hence

* `num_computed_tokens` and `num_inflight_samples` move when a step is scheduled, `token_ids` when
  it is committed; a decode whose token nobody has read yet is scheduled by position;
* the pages and the slot of a sequence that ends are free at once: a step in flight may still
  write to them, but it does so before any step that is scheduled later. Its result is dropped;
* a sequence preempted with a token in flight gets it at `commit` like any other, and isn't
  admitted again before: that admission computes the token too.

**Groups.** Each data-parallel group has its own pages, slots and budget, and a sequence stays in its
group while it runs. There is one queue: the first waiting sequence goes where it costs least (`_place`).
What is said below holds in each group; a sequence that was preempted may go to another.

**Waves.** Sequences are dealt evenly to waves at admission, and steps serve the waves in turn, so that a
step need not wait for the one before it: with pipeline stages, each computes another wave's.

**Pages.** A sequence gets the pages of all its tokens when it is admitted, so that only a decode
ever needs another one. When none is left, the last running sequence in the order is preempted:
its pages are released, and it waits to be computed again from its tokens so far. An admission
leaves one page to each running sequence, so that a newcomer is not preempted by the next step.

**Progress.** Every request is finished, so long as it fits in the pool alone (`add` refuses those
that don't) and, under the priority policy, so long as more urgent ones don't arrive for ever:

1. The first running sequence of a group is never preempted. The victim is always the last, and
   when that is the first itself, it owns every page in use, so `allocate` can't have failed.
2. It is part of every step of its wave, unless all that is left of it is in flight: decodes come first, and
   the budget goes to the chunks of earlier sequences before those of later ones. Each step
   computes one more of its tokens at least, up to `max_total_tokens`, so it ends.
3. Where nothing runs in a group, nothing owns a page of it, and the first waiting sequence is admitted
   (after the commit of its token in flight, if it has one).

Siblings (n > 1) are ordinary sequences of one order: they share the full pages of their prompt
through the prefix cache once its pages are committed, which is for all but the first two where
the prompt fills a step's budget. A short prompt may be computed by several siblings.
"""

from __future__ import annotations

import heapq
import itertools

from jaxinfer.config import CacheConfig, ConfigError, SchedulerConfig, padded_rows
from jaxinfer.engine.page_pool import pages_for
from jaxinfer.engine.seq_group import Entry, SeqGroup
from jaxinfer.types import (
    FinishReason,
    RequestError,
    ScheduledSeq,
    Sequence,
    SequenceStatus,
    StepPlan,
    StepResult,
)


class Scheduler:
    """Owns the sequences, the slots and the pages. Not thread safe."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        """Args:
          config: limits and policy. The runner lays chunks out in tiles: a chunk of n tokens takes
            ceil(n / prefill_tile) * prefill_tile rows of `max_num_batched_tokens`.
          cache: size of the paged KV cache.

        Raises:
          ConfigError: the budget can't hold a tile, or a whole prompt where chunks are off.
        """
        self._config = config
        self._page_size = cache.page_size
        self._tile = config.prefill_tile
        # A preempted sequence's prompt is all its tokens, so any length up to the limit must fit.
        chunked = config.enable_chunked_prefill
        min_rows = padded_rows(1 if chunked else config.max_model_len, self._tile)
        if config.max_num_batched_tokens < min_rows:
            what = "a tile" if chunked else "max_model_len, or enable_chunked_prefill must be on"
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} must be at least {min_rows} "
                f"to hold {what}"
            )
        self._groups = [SeqGroup(index, config, cache) for index in range(config.num_groups)]
        self._waiting: list[Entry] = []  # a heap; entries that ended are dropped when they come first
        self._num_waiting = 0
        self._entries: dict[int, Entry] = {}  # by seq_id, the unfinished
        self._requests: dict[str, list[Sequence]] = {}  # by request_id, the unfinished
        self._next_step_id = 0
        self._waves = itertools.cycle(range(config.num_waves))

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no slot."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return sum(len(group.running) for group in self._groups)

    @property
    def kv_cache_usage(self) -> float:
        """Pages with an owner, as a fraction of all: 0 to 1."""
        pools = [group.pool for group in self._groups]
        return sum(pool.num_used for pool in pools) / sum(pool.num_pages - 1 for pool in pools)

    @property
    def num_used_pages(self) -> int:
        """Pages that sequences hold."""
        return sum(group.pool.num_used for group in self._groups)

    @property
    def num_cached_pages(self) -> int:
        """Pages that nobody holds, kept for prompts that begin alike."""
        return sum(group.pool.num_cached for group in self._groups)

    @property
    def max_tokens_that_fit(self) -> int:
        """The most tokens, prompt and output, that a sequence alone can have."""
        return (self._groups[0].pool.num_pages - 1) * self._page_size + 1  # the last is never computed

    def has_unfinished(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self._entries)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence.

        Raises:
          RequestError: it can never be computed: no token, no room for one more, or too few pages.
        """
        num_tokens, limit = len(sequence.token_ids), sequence.max_total_tokens
        if not 0 < num_tokens < limit:
            raise RequestError(
                f"a prompt of {num_tokens} tokens must have from 1 to {limit - 1}, "
                f"to leave room for a token in max_total_tokens={limit}",
                param="prompt",
            )
        if limit > self.max_tokens_that_fit:
            raise RequestError(
                f"max_total_tokens={limit} must be at most {self.max_tokens_that_fit}, the tokens that the "
                "KV cache holds: lower max_tokens or raise num_pages",
                param="max_tokens",
            )
        request = sequence.request
        priority = request.priority if self._config.scheduling == "priority" else 0
        entry = Entry(sequence, (priority, request.arrival_time_s, sequence.seq_id))
        self._entries[sequence.seq_id] = entry
        self._requests.setdefault(request.request_id, []).append(sequence)
        self._wait(entry)

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends the request's unfinished sequences, in flight or not, and returns them; [] if none are."""
        sequences = list(self._requests.get(request_id, ()))
        for sequence in sequences:
            self.finish(sequence, FinishReason.ABORT)
        return sequences

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence: its pages and slot are free at once. One that has ended gets the new reason."""
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        entry = self._entries.pop(sequence.seq_id, None)
        if entry is None:
            return
        if entry.group is not None:
            entry.group.release(entry)
        else:
            self._num_waiting -= 1
        sequence.status = SequenceStatus.FINISHED
        request_id = sequence.request.request_id
        self._requests[request_id].remove(sequence)
        if not self._requests[request_id]:
            del self._requests[request_id]

    def schedule(self) -> StepPlan | None:
        """Plans the next step, which the caller then launches.

        Returns None where there is nothing to compute before a step in flight is committed. With
        no step in flight it is None only if `has_unfinished()` is False.
        """
        for wave in itertools.islice(self._waves, self._config.num_waves):
            if plan := self._schedule(wave):
                return plan
        return None

    def _schedule(self, wave: int) -> StepPlan | None:
        decodes = [item for group in self._groups for item in self._decode(group, wave)]
        prefills: list[ScheduledSeq] = []
        budgets: list[int] = []  # rows of prefill that are left to each group
        for group in self._groups:
            chunks, num_rows = self._continue_prefills(group, wave, self._config.max_num_batched_tokens)
            prefills += chunks
            budgets.append(num_rows)
        prefills += self._admit(wave, budgets)
        if not decodes and not prefills:
            return None
        self._next_step_id += 1
        return StepPlan(self._next_step_id - 1, tuple(decodes), tuple(prefills), wave)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Takes in what a step computed. Steps are committed in the order in which they were scheduled.

        Returns the sequences that got a token, those among them that it ended included. What the
        step computed for sequences that have ended since it was scheduled is dropped.
        """
        if result.step_id != plan.step_id:
            raise ValueError(f"step_id={result.step_id} of the result must be the plan's, {plan.step_id}")
        news: list[Sequence] = []
        for item in plan.decodes + plan.prefills:
            sequence = item.sequence
            entry = self._entries.get(sequence.seq_id)
            if entry is None:
                continue
            # Not where it was preempted since: those pages are another's by now.
            if entry.group is not None and plan.step_id >= entry.first_step_id:
                entry.group.register_pages(entry, item.start + item.num_tokens)
            if item.samples:
                sequence.num_inflight_samples -= 1
                self._append(sequence, result.sampled[sequence.seq_id].token_id)
                news.append(sequence)
        return news

    def check(self) -> None:
        """Raises AssertionError unless pages, slots and queues agree, as they do between any two calls."""
        faults = [fault for group in self._groups for fault in group.faults()]
        waiting = [e.sequence for e in self._waiting if e.sequence.status is SequenceStatus.WAITING]
        if len(waiting) != self._num_waiting:
            faults.append("number of the waiting")
        if len(waiting) + self.num_running != len(self._entries):
            faults.append("number of the unfinished")
        if any(s.page_ids or s.slot is not None for s in waiting):
            faults.append("what the waiting hold")
        if faults:
            raise AssertionError(f"the scheduler's books don't agree: {', '.join(faults)}")

    def _decode(self, group: SeqGroup, wave: int) -> list[ScheduledSeq]:
        """The next token of each sequence whose prompt is computed, preempting where pages run out."""
        items: list[ScheduledSeq] = []
        # Those preempted are the last of the list, so never one that was passed.
        for entry in group.running:
            sequence = entry.sequence
            num_tokens = len(sequence.token_ids) + sequence.num_inflight_samples
            if entry.wave != wave or entry.in_prefill or num_tokens >= sequence.max_total_tokens:
                continue
            if not self._grow(group, entry, pages_for(num_tokens, self._page_size)):
                break  # preempted itself, the last
            items.append(self._scheduled(entry, num_tokens - 1, num_tokens, ()))
        return items

    def _grow(self, group: SeqGroup, entry: Entry, num_pages: int) -> bool:
        """Gives a running sequence its pages; False where it was itself preempted for want of one."""
        num_missing = num_pages - len(entry.sequence.page_ids)
        if num_missing <= 0:
            return True
        while not group.grow(entry, num_missing):
            victim = group.running[-1]
            self._preempt(victim)
            if victim is entry:
                return False
        return True

    def _preempt(self, entry: Entry) -> None:
        """Sends a running sequence back to wait, to be computed again. Tokens in flight are still read."""
        assert entry.group is not None
        entry.group.release(entry)
        entry.sequence.num_computed_tokens = 0
        entry.sequence.num_preemptions += 1
        self._wait(entry)

    def _continue_prefills(self, group: SeqGroup, wave: int, num_rows: int) -> tuple[list[ScheduledSeq], int]:
        """Further chunks of prompts under way, and what is left of the budget `num_rows`."""
        items: list[ScheduledSeq] = []
        for entry in group.running:
            if num_rows < self._tile:
                break
            if entry.wave == wave and entry.in_prefill:
                items.append(self._chunk(entry, num_rows))
                num_rows -= padded_rows(items[-1].num_tokens, self._tile)
        return items, num_rows

    def _admit(self, wave: int, budgets: list[int]) -> list[ScheduledSeq]:
        """First chunks of waiting sequences, in order: none overtakes one that can't be admitted yet."""
        items: list[ScheduledSeq] = []
        while self._waiting:
            entry = self._waiting[0]
            if entry.sequence.status is SequenceStatus.FINISHED:
                heapq.heappop(self._waiting)
                continue
            group = None if entry.sequence.num_inflight_samples else self._place(entry, wave, budgets)
            if group is None:
                break
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            entry.wave = wave
            group.start(entry)
            items.append(self._chunk(entry, budgets[group.index], first=True))
            budgets[group.index] -= padded_rows(items[-1].num_tokens, self._tile)
        return items

    def _place(self, entry: Entry, wave: int, budgets: list[int]) -> SeqGroup | None:
        """Gives a waiting sequence pages in the group where it costs least; None where it can't start yet.

        The cost is the pages that it has to compute and the sequences that it would run with: a long
        cached prefix outweighs a fuller group, a short one doesn't.
        """
        num_pages = pages_for(len(entry.sequence.token_ids), self._page_size)
        chunked = self._config.enable_chunked_prefill
        costs: list[tuple[int, int, list[int]]] = []
        for group in self._groups:
            if group.has_free_slot and budgets[group.index] >= self._tile and self._may_grow(group, wave):
                cached = group.cached_pages(entry.sequence)
                costs.append((num_pages - len(cached) + len(group.running), group.index, cached))
        for _, index, cached in sorted(costs):
            num_missing = len(entry.sequence.token_ids) - len(cached) * self._page_size
            whole = padded_rows(num_missing, self._tile) <= budgets[index]
            if (chunked or whole) and self._groups[index].take_pages(entry, cached):
                entry.first_step_id = self._next_step_id
                return self._groups[index]
        return None

    def _may_grow(self, group: SeqGroup, wave: int) -> bool:
        """Whether a wave has less than its part of the sequences that run and wait."""
        num_waiting = -(-self._num_waiting // len(self._groups))
        num_seqs = min(len(group.running) + num_waiting, self._config.max_num_seqs)
        return sum(entry.wave == wave for entry in group.running) < -(-num_seqs // self._config.num_waves)

    def _chunk(self, entry: Entry, num_rows: int, first: bool = False) -> ScheduledSeq:
        """The next chunk of a prefill, within a budget of one tile of rows or more.

        A chunk that doesn't end the prefill ends at a multiple of the tile, so that its rows, and
        those of the chunks after it, hold no padding.
        """
        start, end = entry.sequence.num_computed_tokens, entry.prefill_end
        if padded_rows(end - start, self._tile) > num_rows:
            end = (start + num_rows // self._tile * self._tile) // self._tile * self._tile
        return self._scheduled(entry, start, end, tuple(entry.sequence.token_ids[start:end]), first)

    def _scheduled(
        self, entry: Entry, start: int, end: int, token_ids: tuple[int, ...], first: bool = False
    ) -> ScheduledSeq:
        """Puts tokens [start, end) of a running sequence in the step, and counts them as computed."""
        sequence = entry.sequence
        assert sequence.slot is not None
        assert entry.group is not None
        samples = end >= entry.prefill_end
        sequence.num_computed_tokens = end
        sequence.num_inflight_samples += samples
        group, slot = entry.group.index, sequence.slot
        return ScheduledSeq(
            sequence, group, slot, start, end - start, token_ids, entry.page_ids, samples, first
        )

    def _append(self, sequence: Sequence, token_id: int) -> None:
        """Adds a sampled token, and ends the sequence where it is its last."""
        sequence.token_ids.append(token_id)
        # The device masks stop ids before min_tokens, so one that arrives counts.
        if token_id in sequence.stop_ids:
            is_stop_token = token_id in sequence.request.params.stop_token_ids
            self.finish(sequence, FinishReason.STOP, token_id if is_stop_token else None)
        elif len(sequence.token_ids) >= sequence.max_total_tokens:
            self.finish(sequence, FinishReason.LENGTH)

    def _wait(self, entry: Entry) -> None:
        entry.sequence.status = SequenceStatus.WAITING
        heapq.heappush(self._waiting, entry)
        self._num_waiting += 1
