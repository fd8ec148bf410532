"""Serving compiles nothing, whatever is asked of it; and something that does is told by name."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.engine.compilation import CompilationCounter, CompiledWhileServingError
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.programs import MAX_COMPILE_THREADS
from jaxinfer.types import Request, SamplingParams, StepPlan
from jaxinfer_checkpoints import CheckpointError
from tests.integration.engines import make_engine, run

VOCAB_SIZE = 150  # of the ids that are drawn; the model has a few more
MAX_MODEL_LEN = 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def compile_at_each_launch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def stray_step(x: jax.Array) -> jax.Array:
        return 3 * x

    launch, stray = engine._runner.launch, jax.jit(stray_step)

    def launch_and_compile(plan: StepPlan) -> Any:
        stray(np.zeros(plan.step_id + 1))  # a shape that no step had before
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", launch_and_compile)


def test_a_compilation_while_serving_is_an_error_that_names_it(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tokenizer)
    run(engine, {"before": ([1, 2, 3], GREEDY)})
    compile_at_each_launch(engine, monkeypatch)
    with pytest.raises(CompiledWhileServingError, match=r"jit\(stray_step\)"):
        run(engine, {"after": ([1, 2, 3], GREEDY)})
    assert engine.stats().compilations_serving == 1


def test_without_strict_shapes_it_is_counted(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tokenizer, strict_shapes=False)
    expected = run(engine, {"r": ([1, 2, 3], GREEDY)})["r"]
    num_steps = engine.stats().num_steps
    compile_at_each_launch(engine, monkeypatch)
    outputs = run(engine, {"r": ([1, 2, 3], GREEDY)})["r"]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert engine.stats().compilations_serving == engine.stats().num_steps - num_steps


def test_what_another_engine_compiles_is_not_counted(tokenizer: Path) -> None:
    engine = make_engine(tokenizer)
    make_engine(tokenizer, share_programs=False)
    run(engine, {"r": ([1, 2, 3], GREEDY)})
    assert engine.stats().compilations_serving == 0


def random_params(rng: random.Random, num_prompt: int) -> SamplingParams:
    """Each parameter is given in about a third of the requests."""

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.3 else otherwise

    max_tokens = rng.randint(1, min(16, MAX_MODEL_LEN - num_prompt))
    return SamplingParams(
        n=maybe(rng.randint(2, 3), 1),
        temperature=maybe(rng.choice([0.3, 1.0, 2.0]), 0.0),
        top_k=maybe(rng.choice([1, 5, 130, 200]), 0),
        top_p=maybe(rng.uniform(0.1, 0.99), 1.0),
        min_p=maybe(rng.uniform(0.0, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 1.5), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(VOCAB_SIZE): rng.uniform(-100, 100) for _ in range(5)}, {}),
        min_tokens=maybe(rng.randint(0, max_tokens), 0),
        max_tokens=max_tokens,
        stop=maybe((chr(rng.randint(32, 126)),), ()),
        stop_token_ids=maybe((rng.randrange(VOCAB_SIZE),), ()),
        ignore_eos=rng.random() < 0.5,
        seed=maybe(rng.getrandbits(40), None),
        logprobs=maybe(rng.randint(0, 5), None),
        prompt_logprobs=maybe(rng.randint(0, 5), None),
    )


@pytest.mark.parametrize(
    ("num_requests", "mesh"),
    [
        (100, "1x1"),
        pytest.param(2000, "1x1", marks=pytest.mark.slow),
        pytest.param(300, "2x2x1", marks=pytest.mark.slow),
    ],
)
def test_random_requests_compile_nothing(tokenizer: Path, num_requests: int, mesh: str) -> None:
    """Of random lengths and parameters, arriving at random and aborted at random, in a pool that is short
    of pages. Every one that is not aborted ends."""
    rng = random.Random(num_requests)
    engine = make_engine(tokenizer, max_num_seqs=8, num_pages=17, mesh=mesh)
    running: set[str] = set()
    num_finished = num_aborted = 0
    while num_finished + num_aborted < num_requests:
        num_new = min(rng.choice([0, 0, 1, 4]), num_requests - num_finished - num_aborted - len(running))
        for _ in range(num_new):
            prompt = tuple(rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 7, 33, rng.randint(1, 112)])))
            request_id = f"{rng.getrandbits(64)}"
            params = random_params(rng, len(prompt))
            engine.add_request(Request(request_id, prompt, params, time.monotonic()))
            running.add(request_id)
        for output in engine.step():
            if output.request_finished:
                running.remove(output.request_id)
                num_finished += 1
        if running and rng.random() < 0.05:
            engine.abort(aborted := rng.choice(sorted(running)))
            running.remove(aborted)
            num_aborted += 1
    stats = engine.stats()
    assert stats.compilations_serving == 0
    assert stats.kv_cache_usage == 0.0
    assert stats.num_preemptions > 0
    assert num_aborted > num_requests // 50


def test_a_start_that_fails_compiles_no_more(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being compiled then is one program a thread at most."""

    def fail(*args: object) -> None:
        raise CheckpointError("truncated")

    monkeypatch.setattr("jaxinfer.engine.engine.load_stages", fail)
    counter = CompilationCounter()
    with pytest.raises(CheckpointError, match="truncated"):
        make_engine(tokenizer, max_num_seqs=32, share_programs=False)
    assert len(counter.total.names) <= MAX_COMPILE_THREADS
