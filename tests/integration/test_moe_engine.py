"""Mixtures of experts in the engine: the same tokens however they are computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxinfer.engine.engine import Engine
from jaxinfer.types import SamplingParams
from tests.integration.engines import make_engine, run, tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 150, length).tolist() for length in (5, 1, 31, 33, 70, 90, 16, 64)]
REQUESTS = {
    f"{i}/{name}": (prompt, params)
    for i, prompt in enumerate(PROMPTS)
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED))
}


@pytest.fixture(scope="module")
def engine(tokenizer: Path) -> Engine:
    return make_engine(tokenizer, "qwen3_moe")


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, list[int]]:
    """Each request by itself; the seeded ones after a prefix hit."""
    return {key: tokens(run(engine, {key: request})[key]) for key, request in REQUESTS.items()}


@pytest.mark.slow
def test_after_a_prefix_hit_and_in_a_batch(engine: Engine, alone: dict[str, list[int]]) -> None:
    before = engine.stats().prefix_cache_hits
    assert before > 0
    outputs = run(engine, REQUESTS)
    assert {key: tokens(parts) for key, parts in outputs.items()} == alone
    assert engine.stats().prefix_cache_hits > before
    assert engine.stats().compilations_serving == 0


@pytest.mark.slow
def test_in_a_larger_batch_and_smaller_chunks(tokenizer: Path, alone: dict[str, list[int]]) -> None:
    """Padded rows of both sizes, groups of both sizes, and preemption in a pool that is too small."""
    engine = make_engine(tokenizer, "qwen3_moe", max_num_seqs=8, max_num_batched_tokens=32, num_pages=17)
    outputs = run(engine, REQUESTS)
    assert {key: tokens(parts) for key, parts in outputs.items()} == alone
    assert engine.stats().num_preemptions > 0
