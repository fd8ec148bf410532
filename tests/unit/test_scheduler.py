"""The scheduler on a fake device, under random load and step by step."""

from __future__ import annotations

import random
import time

import pytest

from jaxinfer.config import CacheConfig, ConfigError, SchedulerConfig
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.types import (
    FinishReason,
    RequestError,
    SampledToken,
    SamplingParams,
    Sequence,
    SequenceStatus,
    StepResult,
)
from tests.unit.fake_device import (
    EOS,
    STOP_TOKEN,
    Loop,
    expected_tokens,
    make_sequence,
    settings,
)


@pytest.mark.parametrize(
    ("num_steps", "num_pages", "page_size", "tile", "depth", "config"),
    [
        (10_000, 14, 4, 1, 1, settings(4, 9)),
        (2_000, 14, 4, 8, 1, settings(6, 24)),
        (2_000, 12, 4, 4, 1, settings(8, 64, enable_prefix_caching=False, scheduling="priority")),
        (2_000, 30, 4, 4, 1, settings(8, 64, enable_chunked_prefill=False)),
        (2_000, 50, 1, 1, 1, settings(3, 5, scheduling="priority")),
        (2_000, 12, 4, 2, 0, settings(4, 16)),
        (2_000, 24, 2, 3, 2, settings(4, 7)),
        (2_000, 200, 4, 4, 3, settings(8, 16)),
        (2_000, 14, 4, 4, 1, settings(4, 16, num_groups=2)),
        (2_000, 12, 4, 8, 2, settings(3, 64, num_groups=3, scheduling="priority")),
        (2_000, 14, 4, 4, 2, settings(5, 16, num_waves=2)),
        (2_000, 14, 4, 4, 3, settings(4, 16, num_groups=2, num_waves=3, scheduling="priority")),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_load_keeps_the_invariants_and_finishes_every_request(
    num_steps, num_pages, page_size, tile, depth, config, seed
):
    rng = random.Random(seed)
    loop = Loop(config, page_size, num_pages, tile, depth)
    longest = min(60, loop.scheduler.max_tokens_that_fit)  # alone, some leave not a page over
    stems = [[rng.randrange(2, 10) for _ in range(longest)] for _ in range(3)]
    sequences: list[Sequence] = []
    cut_short: set[int] = set()  # by abort or by a stop string
    order = (
        (lambda s: (s.request.priority, s.seq_id))
        if config.scheduling == "priority"
        else (lambda s: s.seq_id)
    )

    for step in range(num_steps):
        if loop.scheduler.num_waiting < 6 and rng.random() < 0.4:
            num_prompt_tokens = rng.randint(1, rng.choice([8, 20, longest - 1]))
            stem = rng.choice(stems)[: rng.randrange(num_prompt_tokens + 1)]
            prompt = stem + [rng.randrange(2, 10) for _ in range(num_prompt_tokens - len(stem))]
            num_output_tokens = rng.randint(1, rng.choice([6, longest - num_prompt_tokens]))
            num_output_tokens = min(num_output_tokens, longest - num_prompt_tokens)
            for _ in range(rng.choice([1, 1, 1, 3])):
                sequence = make_sequence(
                    len(sequences),
                    prompt,
                    num_output_tokens,
                    request_id=f"r{step}",
                    arrival_time_s=float(step),
                    priority=rng.randrange(3),
                    stop_ids=frozenset([EOS, STOP_TOKEN]),
                    min_tokens=rng.randint(0, num_output_tokens),
                )
                sequences.append(sequence)
                loop.scheduler.add(sequence)
        if rng.random() < 0.03:
            request_id = rng.choice(sequences[-10:] or [make_sequence(0, [2], 1)]).request.request_id
            ended = loop.scheduler.abort(request_id)
            cut_short |= {s.seq_id for s in ended}
            assert all(s.finish_reason is FinishReason.ABORT and not s.page_ids for s in ended)
            assert loop.scheduler.abort(request_id) == []
            loop.scheduler.check()
        first = min(
            (s for s in sequences[-60:] if s.status is SequenceStatus.RUNNING), key=order, default=None
        )
        plan = loop.launch()
        assert first is None or first.status is SequenceStatus.RUNNING, "the first was preempted"
        while loop.in_flight and (plan is None or len(loop.in_flight) > depth or rng.random() < 0.1):
            plan = loop.plans[-1]
            for sequence in loop.commit():
                if rng.random() < 0.01:
                    cut_short.add(sequence.seq_id)
                    loop.scheduler.finish(sequence, FinishReason.STOP, "a stop string")
    loop.drain()

    assert len(sequences) > num_steps / 20
    for sequence in sequences:
        assert sequence.status is SequenceStatus.FINISHED
        assert sequence.num_cached_tokens < sequence.num_prompt_tokens
        expected = expected_tokens(sequence)
        if sequence.seq_id in cut_short:
            assert sequence.token_ids == expected[: len(sequence.token_ids)]
            continue
        assert sequence.token_ids == expected
        last = expected[-1]
        reason = FinishReason.STOP if last in (EOS, STOP_TOKEN) else FinishReason.LENGTH
        assert (sequence.finish_reason, sequence.stop_reason) == (
            reason,
            last if last == STOP_TOKEN else None,
        )
    if num_pages < 100:
        assert sum(s.num_preemptions for s in sequences) > 20, "the pool was never short"
    assert any(s.num_cached_tokens for s in sequences) == config.enable_prefix_caching


def test_decodes_a_token_that_the_host_has_not_read():
    loop = Loop(settings())
    sequence = make_sequence(0, [5, 6, 7], 4)
    loop.scheduler.add(sequence)
    loop.launch()
    loop.launch()
    prefill, decode = loop.plans[0].prefills[0], loop.plans[1].decodes[0]
    assert (prefill.start, prefill.num_tokens, prefill.token_ids, prefill.samples, prefill.first) == (
        (0, 3, (5, 6, 7), True, True)
    )
    assert (decode.start, decode.num_tokens, decode.token_ids, decode.samples, decode.first) == (
        3,
        1,
        (),
        True,
        False,
    )
    assert (len(sequence.token_ids), sequence.num_inflight_samples) == (3, 2)
    assert loop.commit() == [sequence]
    assert (len(sequence.token_ids), sequence.num_inflight_samples) == (4, 1)


def test_schedules_no_token_past_the_limit():
    loop = Loop(settings())
    sequence = make_sequence(0, [5, 6, 7], 2)
    loop.scheduler.add(sequence)
    assert loop.launch() is not None
    assert loop.launch() is not None
    assert loop.launch() is None
    loop.drain()
    assert sequence.finish_reason is FinishReason.LENGTH
    assert [plan.num_tokens for plan in loop.plans] == [3, 1]


def test_a_stop_found_late_drops_the_step_in_flight():
    loop = Loop(settings())
    sequence = make_sequence(0, [5, 6, 7], 9, stop_ids=frozenset(range(10)))
    loop.scheduler.add(sequence)
    loop.launch()
    loop.launch()
    assert loop.commit() == [sequence]
    assert (sequence.finish_reason, sequence.num_output_tokens, sequence.page_ids) == (
        FinishReason.STOP,
        1,
        [],
    )
    assert loop.commit() == []
    assert sequence.num_output_tokens == 1
    loop.scheduler.finish(sequence, FinishReason.STOP, "word")
    assert (sequence.stop_reason, loop.scheduler.num_running) == ("word", 0)


def test_an_abort_in_flight_frees_pages_and_slot_at_once():
    loop = Loop(settings(max_num_seqs=1), num_pages=5)
    loop.scheduler.add(make_sequence(0, [5] * 9, 4, request_id="a"))
    loop.scheduler.add(make_sequence(1, [6] * 9, 4, request_id="b"))
    loop.launch()
    (aborted,) = loop.scheduler.abort("a")
    assert (aborted.finish_reason, loop.scheduler.kv_cache_usage) == (FinishReason.ABORT, 0)
    assert loop.scheduler.abort("a") == loop.scheduler.abort("never seen") == []
    plan = loop.launch()
    assert plan is not None
    assert [(item.sequence.seq_id, item.slot) for item in plan.prefills] == [(1, 0)]
    loop.drain()
    assert aborted.num_output_tokens == 0


def test_preempts_the_latest_and_keeps_its_token_in_flight():
    loop = Loop(settings(enable_prefix_caching=False), num_pages=6)
    old, new = make_sequence(0, [5] * 7, 9), make_sequence(1, [6] * 5, 9)
    loop.scheduler.add(old)
    loop.scheduler.add(new)
    while not new.num_preemptions:
        loop.launch()
        if not new.num_preemptions and len(loop.in_flight) > 1:
            loop.commit()
    assert (old.num_preemptions, new.status, new.num_computed_tokens) == (0, SequenceStatus.WAITING, 0)
    assert (new.num_inflight_samples, loop.scheduler.num_waiting) == (1, 1)
    num_output_tokens = new.num_output_tokens
    assert new in loop.commit()
    assert (new.num_output_tokens, new.num_inflight_samples) == (num_output_tokens + 1, 0)
    loop.drain()
    assert new.token_ids == expected_tokens(new)


def test_a_chunk_from_before_a_preemption_registers_no_page():
    loop = Loop(settings(max_num_batched_tokens=8), page_size=1, num_pages=25)
    loop.scheduler.add(make_sequence(0, [5] * 2, 20, request_id="old"))
    loop.launch()
    new = make_sequence(1, [6] * 20, 2, request_id="new")
    loop.scheduler.add(new)
    for _ in range(3):  # two chunks of new, and then old needs one of its pages
        loop.launch()
    assert (new.num_preemptions, new.num_inflight_samples) == (1, 0)
    loop.scheduler.abort("old")
    loop.scheduler.add(make_sequence(2, [7] * 3, 2, arrival_time_s=-1.0))
    plan = loop.launch()
    assert plan is not None
    assert [item.num_tokens for item in plan.prefills] == [3, 5], "new starts again, with a shorter chunk"
    for _ in range(4):
        loop.commit()  # chunks of 8 that went to pages which new has lost
    for request_id in ("new", "r2"):
        loop.scheduler.abort(request_id)
    again = make_sequence(3, [6] * 20, 2)
    loop.scheduler.add(again)
    loop.launch()
    assert (again.status, again.num_cached_tokens) == (SequenceStatus.RUNNING, 0)
    loop.drain()


def test_orders_by_priority_then_arrival():
    loop = Loop(settings(max_num_seqs=1, scheduling="priority"))
    for seq_id, priority in enumerate([2, 1, 1, 0]):
        loop.scheduler.add(make_sequence(seq_id, [5], 1, priority=priority))
    loop.drain()
    assert [item.sequence.seq_id for plan in loop.plans for item in plan.prefills] == [3, 1, 2, 0]


def test_chunks_end_at_multiples_of_the_tile_and_fit_in_rows():
    loop = Loop(settings(max_num_batched_tokens=20), tile=8)
    loop.scheduler.add(make_sequence(0, list(range(2, 10)), 1))
    loop.drain()
    # Two of its pages match, of 4 tokens each, but for the last token's.
    loop.scheduler.add(make_sequence(1, list(range(2, 10)) * 5, 1))
    loop.scheduler.add(make_sequence(2, [9] * 4 + [3] * 7, 1))
    loop.drain()
    chunks = [[(i.sequence.seq_id, i.start, i.num_tokens) for i in plan.prefills] for plan in loop.plans]
    # 20 rows are 2 tiles of 8. Sequence 2 gets a tile where sequence 1 leaves one.
    assert chunks == [[(0, 0, 8)], [(1, 8, 16)], [(1, 24, 16)], [(2, 0, 11)]]


def test_takes_matched_pages_but_not_the_whole_prompt():
    loop = Loop(settings())
    prompt = [2, 3, 4, 5, 6, 7, 8, 9]
    first, again, asks = (make_sequence(i, prompt, 2) for i in range(3))
    object.__setattr__(asks.request, "params", SamplingParams(max_tokens=2, prompt_logprobs=0))
    for sequence in (first, again, asks):
        loop.scheduler.add(sequence)
        loop.drain()
    starts = [item.start for plan in loop.plans for item in plan.prefills]
    assert starts == [0, 4, 0]
    assert [s.num_cached_tokens for s in (first, again, asks)] == [0, 4, 0]


def test_siblings_share_the_pages_that_an_earlier_one_computed():
    loop = Loop(settings(max_num_batched_tokens=12))
    siblings = [make_sequence(i, [3] * 12, 3, request_id="r", arrival_time_s=0.0) for i in range(4)]
    for sibling in siblings:
        loop.scheduler.add(sibling)
    loop.drain()
    assert [s.num_cached_tokens for s in siblings] == [0, 0, 8, 8], (
        "one step of overlap computes the second too"
    )


def test_admission_leaves_each_running_sequence_a_page():
    loop = Loop(settings(), num_pages=6)  # 5 pages
    loop.scheduler.add(make_sequence(0, [5] * 8, 9))  # 2 now, 4 in the end
    loop.scheduler.add(make_sequence(1, [6] * 12, 2))  # 3, which would leave none
    loop.launch()
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 1)
    loop.drain()


def test_refuses_what_can_never_run():
    scheduler = Scheduler(settings(), CacheConfig(4, 5, "float32"))
    assert scheduler.max_tokens_that_fit == 17
    with pytest.raises(RequestError, match="max_total_tokens=18 must be at most 17"):
        scheduler.add(make_sequence(0, [5] * 8, 10))
    with pytest.raises(RequestError, match="a prompt of 0 tokens"):
        scheduler.add(make_sequence(0, [], 10))
    with pytest.raises(ConfigError, match="max_num_batched_tokens=7 must be at least 8 to hold a tile"):
        Scheduler(settings(max_num_batched_tokens=7, prefill_tile=8), CacheConfig(4, 5, "float32"))
    with pytest.raises(
        ConfigError, match="max_num_batched_tokens=64 must be at least 66 to hold max_model_len"
    ):
        Scheduler(settings(enable_chunked_prefill=False, prefill_tile=3), CacheConfig(4, 50, "float32"))
    assert not scheduler.has_unfinished()


def test_commit_wants_the_result_of_its_plan():
    loop = Loop(settings())
    loop.scheduler.add(make_sequence(0, [5], 1))
    loop.launch()
    plan, result = loop.in_flight[0]
    with pytest.raises(ValueError, match="step_id=9"):
        loop.scheduler.commit(plan, StepResult(9, result.sampled, {}))


def test_schedules_32_decodes_in_under_200_microseconds():
    scheduler = Scheduler(SchedulerConfig(32, 32 * 1024, 2048), CacheConfig(16, 32 * 80, "float32"))
    for seq_id in range(32):
        scheduler.add(make_sequence(seq_id, [seq_id] * 1024, 200))
    previous = scheduler.schedule()
    durations_s = []
    for _ in range(150):
        start = time.perf_counter()
        plan = scheduler.schedule()
        durations_s.append(time.perf_counter() - start)
        assert previous is not None
        assert plan is not None
        assert len(plan.decodes) == 32
        items = previous.decodes + previous.prefills
        sampled = {item.sequence.seq_id: SampledToken(5, None) for item in items}
        scheduler.commit(previous, StepResult(previous.step_id, sampled, {}))
        previous = plan
    assert sorted(durations_s)[15] < 200e-6  # the machine may be busy: a tenth of them tells
