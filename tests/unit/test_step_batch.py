"""Plans as arrays: each group's rows, slots and pages in its own part of them, under random load."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.engine.step_batch import Bucket, BuiltStep, StepBatcher
from jaxinfer.types import ScheduledSeq, StepPlan
from tests.unit.test_scheduler import Loop, make_sequence

TILE = 32
PAGE_SIZE = 8


@pytest.mark.parametrize(("max_num_seqs", "num_groups"), [(4, 1), (1, 2), (4, 2), (2, 3)])
def test_every_row_lies_with_its_group(max_num_seqs: int, num_groups: int) -> None:
    config = SchedulerConfig(max_num_seqs, 2 * TILE, max_model_len=64, num_groups=num_groups)
    loop = Loop(config, PAGE_SIZE, num_pages=12, tile=TILE)
    batcher = StepBatcher(config, CacheConfig(PAGE_SIZE, 12, "float32"))
    rng = random.Random(max_num_seqs)
    for seq_id in range(60):
        prompt = [rng.randrange(2, 10) for _ in range(rng.randint(1, 50))]
        loop.scheduler.add(make_sequence(seq_id, prompt, rng.randint(1, 12)))
    buckets = set()
    while loop.scheduler.has_unfinished():
        num_plans = len(loop.plans)
        loop.step()
        for plan in loop.plans[num_plans:]:
            bucket = batcher.bucket(plan)
            buckets.add(bucket)
            check(plan, bucket, batcher.build(plan, bucket), batcher.num_samples(bucket), num_groups)
    assert any(b.num_decodes and b.num_prefill_rows for b in buckets) == (max_num_seqs * num_groups > 1)


def check(plan: StepPlan, bucket: Bucket, built: BuiltStep, num_samples: int, num_groups: int) -> None:
    batch = built.batch
    assert len(batch.token_ids) == num_groups * bucket.num_rows
    assert len(built.sample_slots) == num_groups * num_samples
    items = plan.decodes + plan.prefills
    assert {seq.sequence.seq_id for _, seq in built.sampled} == {
        s.sequence.seq_id for s in items if s.samples
    }
    for row, seq in built.sampled:
        assert (row // num_samples, built.sample_slots[row]) == (seq.group, seq.slot)
        sampled_row = seq.group * bucket.num_rows + batch.sample_rows[row]
        assert batch.positions[sampled_row] == seq.start + seq.num_tokens - 1
    for group in range(num_groups):
        rows = slice(group * bucket.num_rows, (group + 1) * bucket.num_rows)
        own = [seq for seq in items if seq.group == group]
        written = [index for seq in own for index in written_by(seq)]
        assert sorted(i for i in batch.attention.kv_write_index[rows] if i >= PAGE_SIZE) == sorted(written)
    for row, seq in built.prefills:
        group, first = divmod(row, bucket.num_prefill_rows)
        assert group == seq.group
        first += group * bucket.num_rows + bucket.num_decodes
        np.testing.assert_array_equal(batch.token_ids[first : first + seq.num_tokens], seq.token_ids)


def written_by(seq: ScheduledSeq) -> list[int]:
    positions = range(seq.start, seq.start + seq.num_tokens)
    return [seq.page_ids[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions]
