"""The engine on meshes of simulated devices: the same tokens as on one device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import parse_mesh
from jaxinfer.llm import LLM
from jaxinfer.types import SamplingParams, TokenOutput
from tests.integration.engines import make_engine, run, tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=7, max_tokens=20, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5
)
RNG = np.random.default_rng(0)
PREFIX = RNG.integers(0, 150, 40).tolist()
PROMPTS = [RNG.integers(0, 150, n).tolist() for n in (5, 1, 33, 70, 90)]
PROMPTS += [PREFIX + RNG.integers(0, 150, n).tolist() for n in (3, 20)]
REQUESTS = {
    f"{i}/{kind}": (prompt, params)
    for i, prompt in enumerate(PROMPTS)
    for kind, params in (("greedy", GREEDY), ("seeded", SEEDED), ("penalised", PENALISED))
}


@pytest.fixture(scope="module")
def one_device(tokenizer: Path) -> dict[str, dict[str, list[TokenOutput]]]:
    """By model: the outputs on one device, a model at a time when asked for."""

    class ByModel(dict):
        def __missing__(self, model: str) -> dict[str, list[TokenOutput]]:
            self[model] = run(make_engine(tokenizer, model), REQUESTS)
            return self[model]

    return ByModel()


def assert_as_on_one_device(outputs: dict, want: dict) -> None:
    assert {key: tokens(parts) for key, parts in outputs.items()} == {
        key: tokens(parts) for key, parts in want.items()
    }


# What runs where tests are to end in minutes: each mesh once and each family once (2x2 below); the rest is
# `long`.
MESHES = {
    "llama": ("1x3", "2x4", "2x1x1"),
    "mistral": ("3x1x1",),
    "qwen2": ("1x2",),
    "qwen3": ("8x1",),
    "gemma3": ("2x1x2",),
    "mixtral": ("2x2x2",),
    "qwen3_moe": ("1x4",),
}
NUM_LAYERS = {"mixtral": 2, "qwen3_moe": 2}  # of the others 4 at least


def marks(model: str, mesh: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow if mesh in MESHES[model] else pytest.mark.long,)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param(model, mesh, marks=marks(model, mesh))
        for model in MESHES
        for mesh in (
            *("1x2", "1x3", "1x4", "2x2", "2x4", "8x1"),
            *("2x1x1", "2x1x2", "2x2x2", "3x1x1", "4x1x2"),
        )
        if parse_mesh(mesh).pipe <= NUM_LAYERS.get(model, 4)
    ],
)
def test_the_same_tokens_on_any_mesh(model: str, mesh: str, tokenizer: Path, one_device: dict) -> None:
    want = one_device[model]
    for caching in (True, False):
        engine = make_engine(tokenizer, model, mesh=mesh, enable_prefix_caching=caching)
        outputs = run(engine, REQUESTS)
        assert_as_on_one_device(outputs, want)
        stats = engine.stats()
        assert (stats.compilations_serving, stats.kv_cache_usage) == (0, 0.0)
        spread = mesh == "8x1"  # requests of one prefix go to groups that are idle
        assert (stats.prefix_cache_hits > 0) == (caching and not spread)


@pytest.mark.slow
def test_nan_in_unused_pages_changes_nothing(tokenizer: Path, one_device: dict) -> None:
    """Every page of both groups starts as NaN, and their null pages stay so."""
    want = one_device["llama"]
    engine = make_engine(tokenizer, mesh="2x2", enable_prefix_caching=False)
    runner, num_pages = engine._runner, engine.cache_config.num_pages

    @jax.jit
    def poison(pages: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.at[::num_pages].set(jnp.nan), pages)

    runner.kv_pages = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), runner.kv_pages)

    def poison_the_null_pages(step: int) -> None:
        runner.kv_pages = poison(runner.kv_pages)

    assert_as_on_one_device(run(engine, REQUESTS, poison_the_null_pages), want)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [pytest.param("2x2", marks=pytest.mark.long), "2x2x1"])
def test_log_probabilities_and_preemption_in_groups(mesh: str, tokenizer: Path) -> None:
    """Rows of several groups come back to the sequences that they belong to."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    requests = {f"{i}": (prompt, params) for i, prompt in enumerate(PROMPTS * 2)}
    alone = make_engine(tokenizer)
    want = {key: run(alone, {key: request})[key] for key, request in requests.items()}
    engine = make_engine(tokenizer, mesh=mesh, max_num_seqs=8, num_pages=17)
    outputs = run(engine, requests)
    assert engine.stats().num_preemptions > 0
    for key, parts in outputs.items():
        assert tokens(parts) == tokens(want[key])
        assert logprobs(parts) == pytest.approx(logprobs(want[key]), abs=1e-4)


def logprobs(outputs: Sequence[TokenOutput]) -> list[float]:
    """Of the prompt, then of the answer."""
    prompt = outputs[0].prompt_logprobs or ()
    entries = [entry for entry in prompt if entry is not None]
    return [entry.logprob for entry in (*entries, *(e for output in outputs for e in output.logprobs))]


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(m, marks=pytest.mark.slow if m == "2x1x2" else pytest.mark.long)
        for m in ("1x2", "1x4", "2x2", "2x4", "8x1", "2x1x2", "4x1x1")
    ],
)
def test_the_demo_on_any_mesh(mesh: str, demo_path: Path) -> None:
    """9 heads on 3 kv heads, which neither 2 nor 4 nor 8 divides."""
    texts = ["Once upon a time", "The capital of France is", "1, 2, 3, 4,", "In the beginning"]
    params = SamplingParams(temperature=0.0, max_tokens=32)

    def answers(mesh: str, max_num_seqs: int) -> list[tuple[int, ...]]:
        llm = LLM(
            str(demo_path),
            mesh=mesh,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=32,
            max_model_len=128,
            compilation_cache_dir=os.environ["JAX_COMPILATION_CACHE_DIR"],
        )
        return [out.outputs[0].token_ids for out in llm.generate(texts, params, use_tqdm=False)]

    # A slot a stage is the fewest; one device then has the programs of test_references.py.
    assert answers(mesh, parse_mesh(mesh).pipe) == answers("1x1", 1)
