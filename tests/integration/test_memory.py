"""The ledger of a running engine: what was planned is what is there, to within 1%."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer import plan
from jaxinfer.config import ConfigError
from jaxinfer.engine.engine import Engine
from jaxinfer.types import SamplingParams
from tests.integration.engines import MODELS, make_engine, run


@pytest.fixture(scope="module")
def engine(tokenizer: Path) -> Engine:
    return make_engine(tokenizer)


def test_planned_bytes_are_measured(engine: Engine) -> None:
    memory = engine.memory()
    planned = memory.planned.by_class()
    for name in ("weights", "kv_cache", "slots"):
        assert planned[name] == pytest.approx(memory.measured[name], rel=0.01), name
    # By hand: 4 layers of K and V, 2 heads of 16 in float32; 4 slots of 128 tokens and the null page.
    assert memory.measured["kv_cache"] == 4 * 2 * 2 * 16 * 4 * (4 * 128 + 8)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), [("mistral", "3x1x1"), ("gemma3", "2x1x2"), ("mixtral", "2x2x2")])
def test_planned_bytes_are_measured_on_every_stage(model: str, mesh: str, tokenizer: Path) -> None:
    """Each stage's devices hold what the ledger says of that stage, and the ledger is the fullest one's."""
    engine = make_engine(tokenizer, model, mesh=mesh)
    resolved, planned = engine._resolved, []
    for index, stage in enumerate(resolved.memory.stages):
        planned.append(stage.ledger(resolved.cache.num_pages))
        measured = engine._runner.memory_bytes(index)
        for name in ("weights", "kv_cache", "slots"):
            assert planned[-1].by_class()[name] == pytest.approx(measured[name], rel=0.01), (index, name)
    memory = engine.memory()
    assert memory.planned.device_bytes == max(ledger.device_bytes for ledger in planned)
    assert memory.measured == engine._runner.memory_bytes(resolved.fullest_stage(range(len(planned))))
    assert memory.planned.weights == memory.measured["weights"]


def test_the_plan_of_this_machine_is_the_engines(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--max_num_seqs=4", "--max_num_batched_tokens=64", "--max_model_len=128", "--page_size=8")
    assert plan.main([f"--model={MODELS / 'llama'}", *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_a_device"] == engine.memory().planned.by_class()
    assert report["kv_cache"]["num_pages_a_group"] == engine.cache_config.num_pages
    assert report["roofline"]["decode"] is None  # a CPU's rates are not published


def test_compiled_bytes_are_the_engines(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """What `plan --compile` says of this machine's programs, the engine's own programs have."""
    (decode, *_) = assert_compiled_bytes(engine, capsys)
    assert (decode["name"], decode["collectives"]) == ("decode_step 4", {})
    assert decode["alias_bytes"] == engine.memory().measured["kv_cache"]


@pytest.mark.slow
def test_each_stage_is_compiled(tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last one has the sampler; a step of 4 slots decodes 2."""
    compiled = assert_compiled_bytes(make_engine(tokenizer, mesh="2x1x2"), capsys, "--mesh=2x1x2")
    names = ["decode_step 2", "prefill_step 2+64", "sample_step 2", "prompt_logprobs_step 64"]
    want = [f"{name} stage 0" for name in names[:2]] + [f"{name} stage 1" for name in names]
    assert [step["name"] for step in compiled] == want
    # Two layers each, two all-reduces a layer, and one for the embedding's rows.
    assert [step["collectives"] for step in compiled[:4:2]] == [{"all-reduce": 5}, {"all-reduce": 4}]


def assert_compiled_bytes(
    engine: Engine, capsys: pytest.CaptureFixture[str], *mesh: str
) -> list[dict[str, Any]]:
    """Those of `plan --compile` are the engine's. What it says of each program."""
    flags = ("--max_num_seqs=4", "--max_num_batched_tokens=64", "--max_model_len=128", "--page_size=8")
    assert plan.main([f"--model={MODELS / 'llama'}", *flags, *mesh, "--compile", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    measured = engine.memory().measured
    for name in ("weights", "kv_cache", "slots", "activations", "logits", "programs"):
        assert report["bytes_a_device"][name] == pytest.approx(measured[name], rel=0.01), name
    return report["compiled"]


def test_pages_in_use_are_live(engine: Engine) -> None:
    seen: list[Mapping[str, Any]] = []
    prompts = {"a": (range(1, 25), SamplingParams(max_tokens=4, temperature=0.0))}
    run(engine, {k: (list(p), s) for k, (p, s) in prompts.items()}, lambda _: seen.append(cache(engine)))
    assert (seen[1]["num_used_pages"], seen[1]["num_cached_pages"]) == (3, 0)  # 24 tokens, 8 a page
    after = cache(engine)
    assert (after["num_used_pages"], after["num_cached_pages"]) == (0, 3)
    assert after["num_tokens"] == 4 * 128


def cache(engine: Engine) -> Mapping[str, Any]:
    return engine.memory().to_json()["kv_cache"]


def test_metrics_carry_the_measured_bytes(engine: Engine) -> None:
    families = text_string_to_metric_families(engine.metrics.render().decode())
    values = {
        s.labels["class"]: s.value for f in families if f.name == "jaxinfer:memory_bytes" for s in f.samples
    }
    assert values == engine.memory().measured


def test_a_model_larger_than_the_memory_is_refused_with_the_sizes(tokenizer: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"does not fit: 0\.00 GiB of weights .* may be used \(1e-09 of"
    ) as e:
        make_engine(tokenizer, memory_utilization=1e-9)
    assert str(e.value).endswith("; jaxinfer.plan says what to change")
