"""`jaxinfer.plan`: what it says fits, what it advises, and its speed, by hand arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGUFWriter
from jax.experimental import topologies

from jaxinfer import plan
from jaxinfer.memory.chips import CHIPS, GIB
from tests.integration.processes import environment

GOLDEN = Path(__file__).parents[1] / "golden"
ROOT = Path(__file__).parents[2]
LIMIT_S = 3.0


def config(name: str) -> str:
    return str(GOLDEN / "configs" / f"{name}.json")


def run(capsys: pytest.CaptureFixture[str], name: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the report and what stands on stderr."""
    status = plan.main([f"--model={config(name)}", *flags, "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else {}, err


def test_a_plan_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3.1-8B on 8 v5e, 2 groups of 4: 16 GiB of HBM, of which 0.9 may be used."""
    flags = ("--chip=v5e", "--mesh=2x4", "--max_model_len=8192", "--max_num_seqs=256", "--mean_len=1000")
    status, report, err = run(capsys, "Llama-3.1-8B", *flags)
    assert (status, err, report["fits"]) == (0, "", True)
    assert report["budget_bytes"] == int(0.9 * 16 * GIB)
    cache, requests, sizes = report["kv_cache"], report["requests"], report["bytes_a_device"]
    assert report["device_bytes"] == sum(sizes.values()) - sizes["host_staging"]
    pages = cache["num_pages_a_group"]
    assert sizes["kv_cache"] == pages * 16 * 131_072 // 4  # a device has 2 of the 8 KV heads
    assert 0 <= report["budget_bytes"] - report["device_bytes"] < cache["page_bytes_a_device"]
    assert cache["num_tokens"] == 2 * (pages - 1) * 16
    assert requests["at_max_model_len"] == 2 * ((pages - 1) // 512)
    assert requests["at_mean_len"] == 2 * min(256, (pages - 1) // 63)  # 63 pages hold 1000 tokens
    assert requests["limited_by"] == "max_num_seqs=256"
    assert requests["largest_context"] == 131_072


def test_few_slots_take_no_more_pages_than_they_can_use(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--chip=h100", "--max_model_len=4096", "--max_num_seqs=8")
    report = run(capsys, "Llama-3.1-8B", *flags)[1]
    assert report["kv_cache"]["num_pages_a_group"] == 8 * 4096 // 16 + 1
    assert report["requests"]["largest_context"] == 131_072  # the budget holds more than the engine takes


def test_pages_that_are_asked_for_bound_the_largest_context(capsys: pytest.CaptureFixture[str]) -> None:
    """128 of 16 tokens beside the null page; and where they are too many, as many as fit are advised."""
    status, report, _ = run(capsys, "Llama-3.1-8B", "--chip=h100", "--num_pages=129")
    assert (status, report["requests"]["largest_context"]) == (0, 2048)
    status, report, err = run(capsys, "Llama-3.1-8B", "--chip=h100", "--num_pages=1000000")
    assert (status, report["fits"], "num_pages=1000000 make" in err) == (1, False, True)
    advised = report["changes"][0]["change"]
    assert advised.startswith("--num_pages=")
    assert run(capsys, "Llama-3.1-8B", "--chip=h100", advised)[0] == 0


def test_70b_in_bfloat16_is_refused_on_8_v5e_and_planned_in_int8(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--chip=v5e", "--mesh=1x8", "--max_model_len=8192")
    status, report, err = run(capsys, "Llama-3.3-70B", *flags)
    assert (status, report["fits"]) == (1, False)
    assert err.count("\n") == 1
    # 70,553,706,496 parameters of 2 bytes over 8 devices are 16.43 GiB.
    assert "16.43 GiB of weights" in err
    assert "14.40 may be used" in err
    assert "jaxinfer.plan says" not in err  # as it has
    changes = {change["change"]: change["outcome"] for change in report["changes"]}
    assert list(changes) == ["--quantize=int8", "--quantize=int4", "--mesh=1x16", "offload"]
    status, report, _ = run(capsys, "Llama-3.3-70B", *flags, "--quantize=int8")
    assert (status, report["fits"]) == (0, True)
    assert report["what_if"][0] == "the engine does not quantise weights yet"
    assert report["requests"]["at_max_model_len"] > 8


def test_stages_hold_what_outgrows_a_slice(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3.3-70B in bfloat16 on two v5e 2x4, 40 of its 80 layers on each, by hand."""
    flags = ("--chip=v5e", "--mesh=2x1x8", "--max_model_len=8192", "--max_num_seqs=64", "--mean_len=2048")
    status, report, err = run(capsys, "Llama-3.3-70B", *flags, "--batch=8")
    assert (status, err, report["num_chips"]) == (0, "", 16)
    assert report["what_if"] == []
    # A device: 8 of 64 query heads, 1 of 8 KV heads, 3584 of 28,672, 16,032 of 128,256 tokens.
    layer = 2 * ((8 + 2) * 128 * 8192 + 8192 * 8 * 128 + 3 * 3584 * 8192) + 4 * 2 * 8192
    table = 2 * 16_032 * 8192
    sizes, cache = report["bytes_a_device"], report["kv_cache"]
    assert sizes["weights"] == 40 * layer + table + 4 * 8192  # of the last stage: the head and the norm
    assert sizes["slots"] == 65 * (4 + 128_256 * 5)
    assert cache["page_bytes_a_device"] == 40 * 16 * 2 * 128 * 2
    assert sizes["kv_cache"] == cache["num_pages_a_group"] * cache["page_bytes_a_device"]
    assert cache["bytes_a_token"] == 80 * 8 * 2 * 128 * 2
    assert 0 <= report["budget_bytes"] - report["device_bytes"] < cache["page_bytes_a_device"]
    # 8 requests are 2 steps of 4 in flight: what a device of each stage reads is added up, and one hands 4
    # rows to the other.
    step = report["roofline"]["decode"]
    assert step["num_tokens"] == 4
    assert step["weight_bytes"] == 80 * layer + table + 4 * 8192
    assert step["kv_bytes"] == 4 * 2048 * 80 * 2 * 128 * 2
    assert step["link_bytes"] == 2 * 7 / 8 * 2 * 80 * 4 * 8192 * 2 + 4 * 8192 * 2
    assert step["tokens_per_s_a_chip"] == pytest.approx(2 * 4 / step["step_s"] / 16)


def test_stages_are_advised_where_tensor_parallelism_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """Mixtral-8x7B's 87.0 GiB are 2.7 on each of 32 devices, where 2 may be used; it has no more heads."""
    flags = ("--chip=v5e", "--mesh=1x32", "--max_model_len=1024", "--memory_utilization=0.125")
    status, report, _ = run(capsys, "Mixtral-8x7B", *flags, "--max_num_seqs=1")
    changes = [change["change"] for change in report["changes"]]
    assert (status, "--mesh=2x1x32" in changes) == (1, True)


def test_the_table_names_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([f"--model={config('Llama-3.1-8B')}", "--chip=v5e", "--mesh=2x1x4"]) == 0
    assert "v5e, mesh 2x1x4: 2 stages of 1 group of 4 devices;" in capsys.readouterr().out


def test_advice_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Each change that it gives as flags is a plan that fits."""
    flags = ["--chip=v5e", "--mesh=2x4", "--max_model_len=131072"]
    _, report, _ = run(capsys, "Llama-3.3-70B", *flags)
    changes = [change["change"] for change in report["changes"]]
    assert changes[0] == "--quantize=int8 --mesh=1x8"
    for change in changes[:-1]:
        assert run(capsys, "Llama-3.3-70B", *flags, *change.split())[0] == 0, change
    assert changes[-1] == "offload"


def test_a_request_too_long_is_told_how_long_it_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--chip=v5e", "--max_model_len=131072", "--memory_utilization=1", "--max_num_batched_tokens=128"]
    status, report, err = run(capsys, "Llama-3.1-8B", "--mesh=1x2", *flags, "--kv_cache_bytes=1073741824")
    assert status == 1
    # 1 GiB is 1024 pages of 16 tokens with 4 KV heads; one is the null page.
    assert "needs 8192 pages of 16 tokens (8.00 GiB of KV cache), but 1023 fit" in err
    assert report["changes"][0]["change"] == "--max_model_len=16368"


def test_decode_cannot_be_faster_than_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3.1-8B on one H100: 3.35 TB/s, 989.4 TFLOP/s; 16 sequences of 2048 tokens."""
    flags = ("--chip=h100", "--mean_len=2048", "--batch=16")
    step = run(capsys, "Llama-3.1-8B", *flags)[1]["roofline"]["decode"]
    # All weights but the embedding, [128256, 4096]; the 65 norms are float32.
    read = 2 * (8_030_261_248 - 128_256 * 4096) + 2 * 65 * 4096
    assert step["weight_bytes"] == read
    assert step["kv_bytes"] == 16 * 2048 * 131_072
    assert step["memory_s"] == pytest.approx((read + 16 * 2048 * 131_072) / 3.35e12)
    products = 2 * 16 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    attention = 16 * 2048 * 4 * 32 * 128 * 32  # q.k and p.v, in 32 layers of 32 heads
    assert step["compute_s"] == pytest.approx((products + attention) / 989.4e12)
    assert (step["bound"], step["link_s"]) == ("memory", 0)
    assert step["tokens_per_s_a_chip"] == pytest.approx(16 / step["memory_s"])


def test_prefill_is_bound_by_arithmetic_and_all_reduces(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3.1-8B on 4 v5e, 197 TFLOP/s and 200 GB/s out of each: 2048 rows."""
    flags = ("--chip=v5e", "--mesh=1x4", "--max_num_batched_tokens=2048")
    step = run(capsys, "Llama-3.1-8B", *flags)[1]["roofline"]["prefill"]
    # A ring of 4 sends 2 * 3/4 of [2048, 4096] in bfloat16, twice in each of 32 layers.
    assert step["link_bytes"] == 1.5 * 2048 * 4096 * 2 * 2 * 32
    assert step["link_s"] == pytest.approx(step["link_bytes"] / 200e9)
    assert step["bound"] == "compute"
    assert step["step_s"] == step["compute_s"] + step["link_s"]
    assert step["tokens_per_s_a_chip"] == pytest.approx(2048 / step["step_s"] / 4)


def test_sliding_layers_read_their_window(capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma-3-27B: of 62 layers 10 see everything and 52 the last 1024 tokens; 16 KV heads of 128."""
    flags = ("--chip=v6e", "--mesh=1x4", "--mean_len=8192", "--batch=1")
    step = run(capsys, "Gemma-3-27B", *flags)[1]["roofline"]["decode"]
    assert step["kv_bytes"] == (10 * 8192 + 52 * 1024) * 2 * 16 * 128 * 2 // 4


def test_a_chip_of_two_devices_shares_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "Llama-3.1-8B", "--chip=tpu7x", "--mesh=1x2")[1]
    assert report["num_chips"] == 1
    assert report["budget_bytes"] == int(0.9 * 96 * GIB)
    step = report["roofline"]["decode"]
    assert step["memory_s"] == pytest.approx((step["weight_bytes"] + step["kv_bytes"]) / (7380e9 / 2))


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_plans(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, report, _ = run(capsys, "Llama-3.1-8B", f"--chip={name}", "--mesh=1x4")
    assert (status, report["chip"]["name"]) == (0, name)
    assert report["chip"]["source"]
    assert report["roofline"]["decode"]["tokens_per_s_a_chip"] > 0


def test_the_table_has_what_the_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--chip=v6e", "--mesh=1x4", "--quantize=int8")
    report = run(capsys, "Llama-3.1-8B", *flags)[1]
    assert plan.main([f"--model={config('Llama-3.1-8B')}", *flags]) == 0
    table = capsys.readouterr().out
    numbers = [*report["bytes_a_device"].values(), report["device_bytes"], report["kv_cache"]["num_tokens"]]
    assert [f"{number:,}" for number in numbers if f"{number:,}" not in table] == []
    assert "what if: the engine does not quantise weights yet" in table
    assert "assuming that every byte moves at the published bandwidth" in table


def test_a_gguf_header_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3.1-8B's sizes in a file of some hundred bytes, without a weight."""
    path = tmp_path / "header.gguf"
    writer = GGUFWriter(path, "llama")
    sizes = {"embedding_length": 4096, "feed_forward_length": 14336, "block_count": 32}
    heads = {"attention.head_count": 32, "attention.head_count_kv": 8, "context_length": 131_072}
    for key, value in (sizes | heads).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name in ("token_embd.weight", "output.weight"):
        shape = (128_256, 4096)
        writer.add_tensor_info(name, shape, np.dtype(np.float16), 2 * shape[0] * shape[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    assert path.stat().st_size < 1000
    assert plan.main([f"--model={path}", "--chip=h100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["num_parameters"] == 8_030_261_248


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--chip=v5e", "--mesh=1x64"], "64-way tensor parallelism needs as many query heads"),
        (["--chip=v5e", "--max_model_len=200000"], "must be at most 131072"),
        # 32 slots in each of 2 groups.
        (
            ["--chip=v5e", "--mesh=2x4", "--batch=65"],
            "batch=65 must be at most 64, the requests of 1024 tokens that run together, limited by max_",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report, err = run(capsys, "Llama-3.1-8B", *flags)
    assert (status, report) == (1, {})
    assert text in err
    assert err.count("\n") == 1


def test_an_unknown_chip_is_a_wrong_flag(capsys: pytest.CaptureFixture[str]) -> None:
    status, report, err = run(capsys, "Llama-3.1-8B", "--chip=v3")
    assert (status, report, err.count("\n")) == (2, {}, 1)
    assert "flag --chip=v3: value should be one of <cpu|v4|v5e|" in err


def test_nothing_is_advised_where_nothing_helps(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"--model={config('Llama-3.1-8B')}", "--chip=v5e", "--mesh=1x4", "--kv_cache_bytes=100"]
    assert plan.main(argv) == 1
    out, err = capsys.readouterr()
    assert out.endswith("\nit does not fit\n")
    assert "but 0 fit: raise kv_cache_bytes or num_pages" in err


def test_a_bundle_of_nothing_compiled_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, report, err = run(capsys, "Llama-3.1-8B", "--chip=v5e", "--bundle=bundles")
    assert (status, report) == (2, {})
    assert "flag --bundle: plan writes what it compiles, so it needs --compile" in err


def test_a_chip_that_is_not_compiled_for_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """libtpu describes a v4 chip as two devices, where a program has both cores as one."""
    described = SimpleNamespace(devices=[object()] * 16)
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: described)
    cached = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        status, report, err = run(capsys, "Llama-3.1-8B", "--chip=v4", "--mesh=2x4", "--compile")
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
    assert (status, report) == (1, {})
    assert "chip=v4 is not compiled for: of v4:2x2x2 the compiler shows 16 devices, not 8" in err


def test_a_missing_cuda_plugin_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def describe(*_: Any, **__: Any) -> None:
        raise NotImplementedError("topology not implemented for cuda")  # what jax says without it

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    cached = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        status, report, err = run(capsys, "Llama-3.1-8B", "--chip=h100", "--compile")
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
    assert (status, report) == (1, {})
    assert "needs jax's CUDA plugin: pip install --no-deps jax-cuda13-plugin" in err
    assert err.count("\n") == 1


def test_405b_is_planned_in_under_3_seconds_of_processor_time() -> None:
    """Of processor time, since the machine may be busy; flax and XLA's backends stay out."""
    code = (
        "import resource, sys; from jaxinfer import plan; "
        f"status = plan.main(['--model={config('Llama-3.1-405B')}', '--chip=tpu7x', '--mesh=1x16']); "
        "assert status == 0 and 'flax' not in sys.modules; "
        "usage = resource.getrusage(resource.RUSAGE_SELF); print(usage.ru_utime + usage.ru_stime)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    assert float(done.stdout.splitlines()[-1]) < LIMIT_S
