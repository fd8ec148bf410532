"""The GPU kernels as CUDA's compiler makes them for an H100 and a B200 that are not there.

Runs of scripts/bench_kernels_gpu.py, in processes of their own: what it compiles cannot be cached.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_kernels_gpu.py"
# Heads of 64, 128, 192 and 256; a window, a chunk, a cap, sinks; small and large pages.
SPECS = ("llama-3.1-8b", "gemma-2-9b-local", "gpt-oss-20b-local", "chunk-48", "large-pages")
LATENT = "deepseek-v2-lite"
RUNS = {
    "h100": (((*SPECS, LATENT), "bfloat16"), (SPECS[:2], "int8")),
    "b200": (((*SPECS, LATENT), "bfloat16"), (("llama-3.1-8b", "gpt-oss-20b-local"), "int8")),
}
MISSING = [name for name in ("jax_plugins", "nvidia") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: see scripts/bench_kernels_gpu.py"),
]


@pytest.fixture(scope="module", params=RUNS)
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output = tmp_path_factory.mktemp("gpu") / "rows.json"
    rows = []
    for specs, kv_dtype in RUNS[request.param]:
        options = (f"--specs={','.join(specs)}", f"--kv_dtypes={kv_dtype}", f"--json={output}")
        subprocess.run([sys.executable, SCRIPT, f"--chip={request.param}", *options], check=True)
        rows += json.loads(output.read_text())
    assert len(rows) == 2 * (len(SPECS) + 2) + 1
    return rows


def test_nothing_spills_and_the_tensor_core_and_copy_engine_work(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        # Blackwell's prefill loads its sums beside those that it keeps: a little spills, with 256 most.
        allowed = (256 if row["spec"] == "gemma-2-9b-local" else 32) if row["chip"] == "b200" else 0
        assert row["spill_bytes"] <= (allowed if row["kernel"] == "prefill" else 0), row
        assert row["mmas"] > 0, row
        assert row["tma_loads"] > 0, row
        assert row["kernels"] == 1, row


def test_blocks_fit_an_sm_as_planned(rows: list[dict[str, Any]]) -> None:
    """Two of Hopper's decode blocks share an SM, but where heads fill it or pages are widened."""
    for row in rows:
        wide = row["kv_dtype"] == "int8" or row["spec"] in ("gemma-2-9b-local", "large-pages")
        two = row["kernel"] == "decode" and not wide and row["chip"] == "h100"
        assert row["blocks_per_sm"] >= (2 if two else 1), row


def test_the_pool_is_written_in_place(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["aliased_bytes"] == row["pool_bytes"], row
        assert row["pool_copies"] == 0, row
        assert row["temporary_bytes"] < 200e6, row


def test_little_is_moved_or_multiplied_for_nothing(rows: list[dict[str, Any]]) -> None:
    excess = {(row["spec"], row["kernel"], row["kv_dtype"]): row["excess"] for row in rows}
    for kv_dtype in ("bfloat16", "int8"):
        assert excess["llama-3.1-8b", "decode", kv_dtype] <= 1.05
        assert excess["llama-3.1-8b", "prefill", kv_dtype] <= 1.15
    assert excess["gemma-2-9b-local", "prefill", "bfloat16"] <= 1.15
