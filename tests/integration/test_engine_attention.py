"""The engine with another attention kernel, interpreted: the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.engine import resolve
from jaxinfer.types import SamplingParams
from tests.cpu_kernels import load_cpu_kernels
from tests.integration.engines import make_engine, run, tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SIZES: dict[str, Any] = dict(page_size=16, max_num_seqs=2, max_num_batched_tokens=128)


@pytest.fixture
def unoptimised() -> Iterator[None]:
    """An interpreted kernel takes longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def answers_of(tokenizer: Path, model: str, **kernels: str) -> dict[str, list[int]]:
    """Chunks, a prompt that hits another's pages, decodes beside prefill."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 150, 40).tolist()
    prompts = [
        shared,
        rng.integers(0, 150, 7).tolist(),
        [*shared, 1, 2, 3],
        rng.integers(0, 150, 100).tolist(),
    ]
    engine = make_engine(tokenizer, model, **kernels, **SIZES)
    answers = run(engine, {f"{i}": (prompt, GREEDY) for i, prompt in enumerate(prompts)})
    assert engine.stats().compilations_serving == 0
    return {key: tokens(out) for key, out in answers.items()}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3", pytest.param("qwen2", marks=pytest.mark.long)])
def test_the_cpus_kernels_give_xlas_tokens(model: str, tokenizer: Path) -> None:
    """gemma3 has windows, a soft gate and norms of queries and keys; qwen2 biases."""
    load_cpu_kernels()
    ours = answers_of(tokenizer, model, attention="cpu", matmul="cpu")
    assert ours == answers_of(tokenizer, model, attention="xla", matmul="xla")


@pytest.mark.usefixtures("unoptimised")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.slow),  # of two layers
        *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "gemma3")),
    ],
)
def test_same_tokens(model: str, tokenizer: Path) -> None:
    """gemma3 has windows."""
    ours, xlas = (answers_of(tokenizer, model, attention=attention) for attention in ("tpu", "xla"))
    assert ours == xlas


@pytest.mark.parametrize(
    ("changes", "message"), [(dict(page_size=8), "page_size=8"), (dict(dtype="float16"), "dtype='float16'")]
)
def test_what_the_kernel_does_not_have_is_refused(
    changes: dict[str, Any], message: str, tokenizer: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(tokenizer, attention="tpu", **{**SIZES, **changes})


@pytest.mark.parametrize(("capability", "told"), [("8.0", True), ("9.0", False), ("10.0", False)])
def test_auto_is_plain_xla_on_gpus(capability: str, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says so where there is no kernel: on Ampere."""
    lines: list[str] = []
    monkeypatch.setattr(resolve.logging, "info", lambda text, *args: lines.append(text % args))
    device: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    config = EngineConfig(model="m", attention="auto")
    assert resolve._backend(config, device, "bfloat16", "bfloat16") == "xla"
    assert [f"this one's is {capability}" in line for line in lines] == [True] * told


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0", "12.0"])
def test_gpu_is_for_hopper_and_the_b200(capability: str) -> None:
    device: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    config = EngineConfig(model="m", attention="gpu")
    if capability in ("9.0", "10.0"):
        assert resolve._backend(config, device, "bfloat16", "bfloat16") == "gpu"
        return
    with pytest.raises(ConfigError, match=rf"this one's is {capability}: use attention=xla"):
        resolve._backend(config, device, "bfloat16", "bfloat16")
