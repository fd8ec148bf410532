"""Pipeline stages keep each other busy; and what cannot be staged is refused. Their tokens: test_mesh.py."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.config import ConfigError, parse_mesh
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.runner import InFlight
from jaxinfer.parallel.mesh import make_meshes
from jaxinfer.types import SamplingParams, StepPlan
from tests.integration.engines import make_engine, run

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


def test_stages_on_several_hosts_are_refused() -> None:
    hosts = [SimpleNamespace(process_index=i // 4, platform="tpu") for i in range(8)]
    with pytest.raises(ConfigError, match="mesh=2x1x4: pipeline stages need all devices on one host"):
        make_meshes(parse_mesh("2x1x4"), hosts)
