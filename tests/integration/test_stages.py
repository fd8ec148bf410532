"""Pipeline stages keep each other busy; and what cannot be staged is refused. Their tokens: test_mesh.py."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config import ConfigError, parse_mesh
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.runner import InFlight
from jaxinfer.types import SamplingParams, StepPlan
from tests.integration.engines import make_engine, run, tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def waves_in_flight(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """At each launch, the waves of the steps that the devices then have and the host has not read."""
    launch, read = engine._runner.launch, engine._runner.read
    in_flight: list[int] = []
    seen: list[list[int]] = []

    def noted_launch(plan: StepPlan) -> Any:
        in_flight.append(plan.wave)
        seen.append(list(in_flight))
        return launch(plan)

    def noted_read(step: InFlight) -> Any:
        in_flight.remove(step.plan.wave)
        return read(step)

    monkeypatch.setattr(engine._runner, "launch", noted_launch)
    monkeypatch.setattr(engine._runner, "read", noted_read)
    return seen


@pytest.mark.parametrize(
    "mesh", [pytest.param("2x1x1", marks=pytest.mark.slow), pytest.param("4x1x1", marks=pytest.mark.long)]
)
def test_each_stage_has_a_step_of_its_own(
    mesh: str, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many requests as stages: one of each wave is computed while the next one's is launched."""
    num_stages = parse_mesh(mesh).pipe
    engine = make_engine(tokenizer, mesh=mesh)
    seen = waves_in_flight(engine, monkeypatch)
    run(engine, {f"{i}": ([1, 2, 3], GREEDY) for i in range(num_stages)})
    assert len(seen) == 12 * num_stages
    for step, waves in enumerate(seen):
        first = max(0, step - num_stages)
        assert waves == [n % num_stages for n in range(first, step + 1)]


@pytest.mark.slow
def test_a_request_alone_is_read_as_soon_as_on_one_device(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tokenizer, mesh="2x1x1")
    seen = waves_in_flight(engine, monkeypatch)
    run(engine, {"alone": ([1, 2, 3], GREEDY)})
    assert seen == [[0]] + [[0, 0]] * 11


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("5x1x1", "5 pipeline stages need as many layers, and LlamaForCausalLM has num_hidden_layers=4"),
        (
            "3x1x4",
            "mesh=3x1x4 needs 12 devices, and 8 (cpu) are here: use one of no more, or",
        ),
        ("1x1x99", "mesh=1x99 needs 99 devices, and 8 (cpu) are here: use one of no more"),
    ],
)
def test_stages_that_cannot_be_are_refused(mesh: str, words: str, tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_engine(tokenizer, mesh=mesh)


@pytest.mark.parametrize(
    "mesh", [pytest.param("3x1x1", marks=pytest.mark.slow), pytest.param("4x1x1", marks=pytest.mark.long)]
)
def test_all_stages_compute_before_they_hand_on(
    mesh: str, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on several hosts, where a stage that hands on waits for the next one: that one is not behind it."""
    num_stages = parse_mesh(mesh).pipe
    engine = make_engine(tokenizer, mesh=mesh)
    requests = {f"{i}": ([1, 2, 3], GREEDY) for i in range(num_stages)}
    want = {key: tokens(outputs) for key, outputs in run(engine, requests).items()}
    runner = engine._runner
    runner._handover.waits = True
    events: list[tuple[str, int, int]] = []
    compute, hand_on, deliver = runner._compute, runner._handover.hand_on, runner._deliver
    first_id = engine._scheduler._next_step_id

    def noted_compute(step: InFlight, stage: int) -> None:
        events.append(("compute", stage, step.plan.step_id - first_id))
        compute(step, stage)

    def noted_hand_on(hidden: Any, stage: int, rows: int) -> Any:
        events.append(("hand on", stage, -1))
        return hand_on(hidden, stage, rows)

    def noted_deliver(step: InFlight) -> None:
        events.append(("deliver", num_stages - 1, step.plan.step_id - first_id))
        deliver(step)

    monkeypatch.setattr(runner, "_compute", noted_compute)
    monkeypatch.setattr(runner._handover, "hand_on", noted_hand_on)
    monkeypatch.setattr(runner, "_deliver", noted_deliver)
    assert {key: tokens(outputs) for key, outputs in run(engine, requests).items()} == want
    num_steps = 12 * num_stages
    computed = [[e[2] for e in events if e[:2] == ("compute", stage)] for stage in range(num_stages)]
    assert computed == [list(range(num_steps))] * num_stages
    # Turns: what is computed, then what is handed on. With all waves at work each stage has a step in each,
    # so a step of each wave takes as many turns as there are stages, and as one stage at a time takes steps.
    turns = [list(turn) for _, turn in groupby(events, key=lambda event: event[0] == "compute")]
    assert len(turns) == 2 * (num_steps + num_stages - 1)
    for turn in turns[2 * (num_stages - 1) : -2 * (num_stages - 1) : 2]:
        assert [stage for _, stage, _ in turn] == list(range(num_stages))
        newest = turn[0][2]
        assert [step for _, _, step in turn] == list(range(newest, newest - num_stages, -1))
