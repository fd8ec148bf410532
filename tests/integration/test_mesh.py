"""The engine on meshes of simulated devices: the same tokens as on one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxinfer.types import SamplingParams, TokenOutput
from tests.integration.engines import make_engine, run, tokens, write_byte_tokenizer

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
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def one_device(tokenizer: Path) -> dict[str, dict[str, list[TokenOutput]]]:
    """By model: the outputs on one device, a model at a time when asked for."""

    class ByModel(dict):
        def __missing__(self, model: str) -> dict[str, list[TokenOutput]]:
            self[model] = run(make_engine(tokenizer, model), REQUESTS)
            return self[model]

    return ByModel()


CASES = [
    ("llama", "1x2"),
    ("gemma3", "1x4"),
    *(
        (model, mesh)
        for model in ("llama", "mistral", "qwen2", "qwen3", "gemma3")
        for mesh in ("1x2", "1x3", "1x4")
    ),
]
FAST = {("llama", "1x2"), ("gemma3", "1x4")}


@pytest.mark.parametrize(
    ("model", "mesh"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in dict.fromkeys(CASES)],
)
def test_the_same_tokens_on_any_mesh(model: str, mesh: str, tokenizer: Path, one_device: dict) -> None:
    engine = make_engine(tokenizer, model, mesh=mesh)
    outputs = run(engine, REQUESTS)
    stats = engine.stats()
    assert (stats.compilations_serving, stats.kv_cache_usage) == (0, 0.0)
    for key, want in one_device[model].items():
        assert tokens(outputs[key]) == tokens(want), key
