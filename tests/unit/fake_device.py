"""A fake device whose pages hold token ids, and the loop that runs a scheduler on it.

The device samples a pure function of the tokens that it reads back from the pages, so a page that is shared
wrongly, freed too early or written twice changes what is generated.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.types import (
    Request,
    SampledToken,
    SamplingParams,
    ScheduledSeq,
    Sequence,
    StepPlan,
    StepResult,
)

EOS = 0
STOP_TOKEN = 1


def sample(sequence: Sequence, prefix: list[int]) -> int:
    """The token after `prefix`: a pure function of it, the seed and min_tokens. Ids are under 10."""
    value = zlib.crc32(bytes([sequence.seed % 256, *prefix]))
    may_stop = len(prefix) - sequence.num_prompt_tokens >= sequence.request.params.min_tokens
    return value % 2 if may_stop and value % 25 == 0 else 2 + value % 8


def expected_tokens(sequence: Sequence) -> list[int]:
    """Prompt and output of a sequence computed alone, token by token."""
    token_ids = list(sequence.request.prompt_token_ids)
    while len(token_ids) < sequence.max_total_tokens:
        token_ids.append(sample(sequence, token_ids))
        if token_ids[-1] in sequence.stop_ids:
            break
    return token_ids


class FakeDevice:
    """Runs plans in order and at once; the host reads a result when it likes."""

    def __init__(self, config: SchedulerConfig, page_size: int, tile: int) -> None:
        self.config, self.page_size, self.tile = config, page_size, tile
        self.pages: dict[tuple[int, int, int], int] = {}  # (group, page, offset) -> token
        self.last_token: dict[tuple[int, int], int] = {}  # by group and slot
        self.last_of_wave: dict[int, dict[tuple[int, int], int]] = {}  # as of the wave's latest step
        self.owner: dict[tuple[int, int], int] = {}  # group and slot -> seq_id
        self.truth: dict[int, list[int]] = {}  # by seq_id

    def launch(self, plan: StepPlan) -> StepResult:
        items = plan.decodes + plan.prefills
        assert items, "an empty plan"
        slots = {(item.group, item.slot) for item in items}
        assert len(slots) == len({item.sequence.seq_id for item in items}) == len(items)
        assert all(0 <= item.slot < self.config.max_num_seqs for item in items)
        rows = dict.fromkeys(range(self.config.num_groups), 0)
        for item in plan.prefills:
            rows[item.group] += -(-item.num_tokens // self.tile) * self.tile
        assert max(rows.values()) <= self.config.max_num_batched_tokens
        seqs = Counter(item.group for item in items)
        assert max(seqs.values()) <= self.config.max_step_seqs
        written: set[tuple[int, int, int]] = set()
        for item in items:  # every write comes before any read, as in a layer
            sequence, end = item.sequence, item.start + item.num_tokens
            slot = (item.group, item.slot)
            if item.first:
                self.owner[slot] = sequence.seq_id
                self.last_token.pop(slot, None)
            assert self.owner[slot] == sequence.seq_id
            is_decode = item in plan.decodes
            token_ids = (self.last_of_wave[plan.wave][slot],) if is_decode else item.token_ids
            assert item.num_tokens == len(token_ids) > 0
            assert end < sequence.max_total_tokens, "the last token is never computed"
            if not is_decode:
                last = end == len(sequence.token_ids)
                assert item.samples == last
                assert last or end % self.tile == 0
                assert last or self.config.enable_chunked_prefill
            for position, token_id in enumerate(token_ids, item.start):
                where = self.locate(item, position)
                assert where not in written, "two sequences write to one place"
                written.add(where)
                self.pages[where] = token_id
        sampled: dict[int, SampledToken] = {}
        for item in items:
            sequence, end = item.sequence, item.start + item.num_tokens
            prefix = [self.pages[self.locate(item, position)] for position in range(end)]
            truth = self.truth.setdefault(sequence.seq_id, list(sequence.request.prompt_token_ids))
            while len(truth) < end:
                truth.append(sample(sequence, truth))
            assert prefix == truth[:end], (
                f"step {plan.step_id}: sequence {sequence.seq_id} reads other tokens"
            )
            if item.samples:
                token_id = self.last_token[item.group, item.slot] = sample(sequence, prefix)
                sampled[sequence.seq_id] = SampledToken(token_id, None)
        self.last_of_wave[plan.wave] = dict(self.last_token)
        return StepResult(plan.step_id, sampled, {})

    def locate(self, item: ScheduledSeq, position: int) -> tuple[int, int, int]:
        page_id = item.page_ids[position // self.page_size]
        assert page_id > 0, "the null page"
        return item.group, page_id, position % self.page_size


def make_sequence(
    seq_id: int,
    prompt: list[int],
    num_output_tokens: int,
    *,
    request_id: str | None = None,
    arrival_time_s: float | None = None,
    priority: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    **params: int,
) -> Sequence:
    arrival = float(seq_id) if arrival_time_s is None else arrival_time_s
    sampling = SamplingParams(max_tokens=num_output_tokens, stop_token_ids=(STOP_TOKEN,), **params)  # type: ignore[arg-type]
    request = Request(request_id or f"r{seq_id}", tuple(prompt), sampling, arrival, priority)
    limit = len(prompt) + num_output_tokens
    return Sequence(seq_id, request, 0, seq_id, stop_ids, limit, list(prompt), len(prompt))


@dataclass
class Loop:
    """The engine's loop: launches step n + 1 before it commits step n (depth 1)."""

    config: SchedulerConfig
    page_size: int = 4
    num_pages: int = 100
    tile: int = 1
    depth: int = 1
    in_flight: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        cache = CacheConfig(self.page_size, self.num_pages, "float32")
        self.scheduler = Scheduler(replace(self.config, prefill_tile=self.tile), cache)
        self.device = FakeDevice(self.config, self.page_size, self.tile)

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.launch(plan)))
        elif not self.in_flight:
            assert not self.scheduler.has_unfinished(), "nothing to do, and yet not done"
        return plan

    def step(self) -> list[Sequence]:
        plan = self.launch()
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            return self.commit()
        return []

    def commit(self) -> list[Sequence]:
        news = self.scheduler.commit(*self.in_flight.popleft())
        self.scheduler.check()
        return news

    def drain(self, max_steps: int = 2000) -> None:
        """Runs to the end: everything is finished, committed and given back."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        assert not self.scheduler.has_unfinished(), "no progress"
        while self.in_flight:
            assert self.commit() == []
        assert (self.scheduler.kv_cache_usage, self.scheduler.num_running, self.scheduler.num_waiting) == (
            0,
            0,
            0,
        )


def settings(max_num_seqs: int = 4, max_num_batched_tokens: int = 64, **changes) -> SchedulerConfig:
    changes.setdefault("prefill_tile", 1)
    return SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len=64, **changes)
