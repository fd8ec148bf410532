"""The real steps, compiled by the TPU's own compiler for a slice that is not there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.memory.aot import compile_step, described_meshes, largest_programs
from jaxinfer.memory.chips import GIB, find_chip
from jaxinfer.memory.planning import make_plan
from jaxinfer.models.families import model_config_from
from tests.integration.engines import MODELS
from tests.integration.processes import assert_one_line, command, environment, run

LLAMA_8B = str(Path(__file__).parents[1] / "golden" / "configs" / "Llama-3.1-8B.json")
TIMEOUT_S = 1800

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed (the extra `plan`; it goes with jax 0.12, so with Python 3.12)",
    ),
]


def test_a_bundle_for_a_slice_that_is_not_there(tmp_path: Path) -> None:
    flags = ("--max_model_len=128", "--max_num_seqs=4", "--max_num_batched_tokens=128", "--num_pages=64")
    report = compiled(str(MODELS / "llama"), "--chip=v5e", "--mesh=1x4", f"--bundle={tmp_path}", *flags)
    (path,) = tmp_path.iterdir()
    assert report["bundle"] == {"path": str(path), "num_pages": 64, "max_model_len": 128}
    size = int.from_bytes(path.read_bytes()[50:58], "little")
    header = json.loads(path.read_bytes()[58 : 58 + size])
    assert (header["key"]["platform"], header["key"]["device_kind"]) == ("tpu", "TPU v5 lite")
    names = [program["name"] for program in header["programs"]]
    assert {"decode_step 1", "decode_step 4", "sample_step 4", "create_state"} <= set(names)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Llama-3.1-8B on v5e 2x4, in two groups of four chips."""
    return compiled(LLAMA_8B, "--chip=v5e", "--mesh=2x4", "--max_model_len=8192")


def compiled(model: str, *flags: str) -> dict[str, Any]:
    """What `plan --compile` says."""
    argv = command("plan", f"--model={model}", *flags, "--compile", "--json")
    result = subprocess.run(
        argv, capture_output=True, text=True, env=environment(), timeout=TIMEOUT_S, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_compiled_steps_fit_the_chip(report: dict[str, Any]) -> None:
    for step in report["compiled"]:
        held = step["argument_bytes"] + step["temp_bytes"] + step["code_bytes"]
        assert 0 < held < 16 * GIB, step["name"]
    assert report["device_bytes"] <= report["budget_bytes"]


def test_arguments_are_what_the_ledger_counts(report: dict[str, Any]) -> None:
    """Weights and cache, and some tables of a few MB."""
    decode, _, _, _ = report["compiled"]
    sizes = report["bytes_a_device"]
    head = 2 * 128_256 // 4 * 4096  # which the forward step does not take
    counted = sizes["weights"] - head + decode["alias_bytes"]
    assert decode["argument_bytes"] == pytest.approx(counted, rel=0.01)


def test_the_cache_is_written_in_place_and_never_copied(report: dict[str, Any]) -> None:
    decode, prefill, _, _ = report["compiled"]
    pages = decode["alias_bytes"] / report["kv_cache"]["page_bytes_a_device"]
    assert pages == int(pages) > 10_000  # all pages, in all layers
    for step in (decode, prefill):
        assert step["alias_bytes"] == decode["alias_bytes"]
        assert step["temp_bytes"] < decode["alias_bytes"] / 32, "a copy of one layer's pages"


def test_devices_share_the_rows_that_are_sampled(report: dict[str, Any]) -> None:
    """8 of 32 each: their logits come by one all-to-all, and few arrays of them are held at once."""
    sampling = report["compiled"][2]
    assert (sampling["name"], sampling["collectives"]["all-to-all"]) == ("sample_step 32", 1)
    assert sampling["temp_bytes"] < 10 * 8 * 128_256 * 4


def test_a_layer_has_two_all_reduces(report: dict[str, Any]) -> None:
    """And the embedding one, whose rows lie on different devices."""
    for step in report["compiled"][:2]:
        assert step["collectives"] == {"all-reduce": 2 * 32 + 1}, step["name"]


def test_a_layer_calls_a_kernel_for_each_kind_of_row(report: dict[str, Any]) -> None:
    """The prefill step has decode rows too."""
    assert [step["kernels"] for step in report["compiled"]] == [32, 2 * 32, 0, 0]


@pytest.fixture
def described_tpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the command sets things: no search for a TPU, and nothing compiled for one kept."""
    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")):
        monkeypatch.setenv(name, value)
    cached = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    yield
    jax.config.update("jax_enable_compilation_cache", cached)


@pytest.mark.parametrize("num_layers", [2, pytest.param(32, marks=pytest.mark.long, id="all layers")])
@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
@pytest.mark.usefixtures("described_tpus")
def test_other_chips(chip: str, num_layers: int) -> None:
    """Its decode and its prefill step, of as many devices, on two layers: the others are like them."""
    config = json.loads(Path(LLAMA_8B).read_text()) | {"num_hidden_layers": num_layers}
    model = model_config_from(config, "safetensors")
    engine = EngineConfig(LLAMA_8B, mesh="2x4", max_model_len=8192)
    plan = make_plan(engine, model, find_chip(chip), "none", mean_len=1)
    (programs,) = largest_programs(plan, described_meshes(plan))
    decode, prefill = (compile_step(program) for program in programs[:2])
    pages = decode.alias_bytes / plan.resolved.memory.stages[0].page_bytes
    assert pages == int(pages) > 10_000  # all pages, in all layers
    for step, kernels in ((decode, 1), (prefill, 2)):
        assert step.alias_bytes == decode.alias_bytes
        assert step.temp_bytes < min(200e6, decode.alias_bytes / num_layers), "a copy of one layer's pages"
        assert step.kernels == kernels * num_layers
        assert step.collectives == {"all-reduce": 2 * num_layers + 1}


def test_a_slice_that_is_not_offered_is_refused() -> None:
    result = run("plan", f"--model={LLAMA_8B}", "--chip=v5e", "--mesh=1x2", "--compile")
    assert_one_line(result, 1, "mesh=1x2 has 2 devices, and v5e slices have 1, 4, 8")


def test_a_bundle_of_stages_on_several_hosts_is_refused(tmp_path: Path) -> None:
    """A v5e 4x4 is four hosts; what its stages exchange would need both."""
    flags = ("--chip=v5e", "--mesh=2x1x16", "--compile", f"--bundle={tmp_path}")
    assert_one_line(run("plan", f"--model={LLAMA_8B}", *flags), 1, "mesh=2x1x16: where stages lie on several")


def test_each_stage_is_compiled_for_a_slice_of_its_own(tmp_path: Path) -> None:
    """Llama-3.1-8B with 5 of its layers, on two v5e 2x2: 3 on the first, 2 on the second."""
    config = json.loads(Path(LLAMA_8B).read_text(encoding="utf-8")) | {"num_hidden_layers": 5}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    report = compiled(str(path), "--chip=v5e", "--mesh=2x1x4", "--max_model_len=2048")
    steps = {step["name"].split()[0] + step["name"][-1]: step for step in report["compiled"]}
    assert list(steps) == [
        *("decode_step0", "prefill_step0", "decode_step1", "prefill_step1"),
        *("sample_step1", "prompt_logprobs_step1"),
    ]
    layer = report["kv_cache"]["page_bytes_a_device"] * report["kv_cache"]["num_pages_a_group"] // 3
    for name, num_layers, num_all_reduces in (
        ("decode_step0", 3, 2 * 3 + 1),
        ("prefill_step0", 3, 2 * 3 + 1),
        ("decode_step1", 2, 2 * 2),
        ("prefill_step1", 2, 2 * 2),
    ):
        assert steps[name]["alias_bytes"] == pytest.approx(num_layers * layer, rel=0.01), name
        assert steps[name]["temp_bytes"] < layer, name
        assert steps[name]["collectives"] == {"all-reduce": num_all_reduces}, name
