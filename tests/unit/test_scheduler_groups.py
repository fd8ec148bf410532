"""Which data-parallel group and which wave a sequence goes to."""

from __future__ import annotations

from jaxinfer.types import (
    StepPlan,
)
from tests.unit.fake_device import (
    Loop,
    make_sequence,
    settings,
)


def groups_of(loop: Loop) -> list[list[tuple[int, int]]]:
    """Of each plan, (seq_id, group) of what it prefills."""
    return [[(item.sequence.seq_id, item.group) for item in plan.prefills] for plan in loop.plans]


def test_groups_fill_up_evenly():
    loop = Loop(settings(max_num_seqs=2, num_groups=2))
    for seq_id in range(5):
        loop.scheduler.add(make_sequence(seq_id, [seq_id + 2] * 3, 2))
    loop.launch()
    assert groups_of(loop) == [[(0, 0), (1, 1), (2, 0), (3, 1)]]
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (4, 1)
    loop.drain()


def test_each_group_has_the_whole_budget():
    loop = Loop(settings(max_num_batched_tokens=8, num_groups=2), tile=4)
    for seq_id in range(2):
        loop.scheduler.add(make_sequence(seq_id, [seq_id + 2] * 20, 1))
    loop.launch()
    assert [(item.group, item.num_tokens) for item in loop.plans[0].prefills] == [(0, 8), (1, 8)]
    loop.drain()


def test_goes_where_its_prefix_is_cached_until_many_run_there():
    loop = Loop(settings(max_num_seqs=8, num_groups=2))
    loop.scheduler.add(make_sequence(0, [3] * 4, 1))
    loop.scheduler.add(make_sequence(1, [5] * 14, 1))  # the second group has 3 pages of fives
    loop.drain()
    for seq_id in range(2, 8):
        loop.scheduler.add(make_sequence(seq_id, [5] * 14, 1))
    loop.launch()
    # Three pages are worth three sequences more. Then the group that lacks them computes them too.
    assert groups_of(loop)[1] == [(2, 1), (3, 1), (4, 1), (5, 0), (6, 1), (7, 0)]
    assert loop.scheduler.num_waiting == 0
    loop.drain()


def test_goes_elsewhere_where_its_prefix_has_no_room():
    loop = Loop(settings(num_groups=2), num_pages=9)
    loop.scheduler.add(make_sequence(0, [5] * 14, 1))
    loop.drain()
    loop.scheduler.add(make_sequence(1, [6] * 17, 4))
    loop.scheduler.add(make_sequence(2, [5] * 13 + [7] * 7, 4))  # 3 pages cached, 2 more and 1 to spare
    loop.launch()
    assert groups_of(loop)[-1] == [(1, 0), (2, 1)]
    loop.drain()


def running(plan: StepPlan) -> list[int]:
    return [item.sequence.seq_id for item in plan.decodes + plan.prefills]


def test_sequences_are_dealt_evenly_to_waves_which_take_turns():
    loop = Loop(settings(max_num_seqs=7, num_waves=3), depth=3)
    for seq_id in range(8):  # one more than there are slots
        loop.scheduler.add(make_sequence(seq_id, [5, 6], 9))
    plans = [loop.launch() for _ in range(6)]
    assert [plan and plan.wave for plan in plans] == [0, 1, 2, 0, 1, 2]
    assert [plan and running(plan) for plan in plans] == [[0, 1, 2], [3, 4, 5], [6]] * 2
    loop.drain()


def test_a_wave_without_work_is_passed_over():
    loop = Loop(settings(num_waves=2), depth=2)
    loop.scheduler.add(make_sequence(0, [5, 6], 6))
    assert [plan and plan.wave for plan in (loop.launch() for _ in range(3))] == [0, 0, 0]
    loop.scheduler.add(make_sequence(1, [5, 6], 3))
    plans = [loop.launch() for _ in range(4)]
    assert [plan and (plan.wave, running(plan)) for plan in plans] == [(1, [1]), (0, [0]), (1, [1]), (0, [0])]
    loop.drain()
