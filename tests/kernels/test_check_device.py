"""scripts/check_device.py on this machine's CPU, and what it makes of checks that go wrong."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import pytest

from tests.cpu_kernels import load_cpu_kernels
from tests.integration.processes import environment

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_device.py"
TIMEOUT_S = 300

# In the place of device_checks.py: each way for a check to end.
CHECKS = """
import dataclasses, os
from types import SimpleNamespace

@dataclasses.dataclass
class Outcome:
    error: float = 0.5
    bound: float = 1.0
    ms: float = 2.0
    num_bytes: int = 4_000_000
    flops: int = 6_000_000_000
    rate: str = "bf16"

def device_checks(platform, kernel, *, small):
    ways = [
        lambda: Outcome(),
        lambda: Outcome(error=1.5),
        lambda: Outcome(error=float("nan")),
        lambda: 1 / 0,
        lambda: os._exit(3),
        lambda: Outcome(),
    ]
    return [
        SimpleNamespace(op=str(i), shape=platform, dtype=kernel, backend="xla", run=run)
        for i, run in enumerate(ways)
    ]
"""


def check_device(
    script: Path, output: Path, *flags: str, **variables: str
) -> tuple[int, str, dict[str, Any]]:
    """The exit status, what it printed, and the JSON; `variables` are of the environment."""
    result = subprocess.run(
        [sys.executable, script, f"--json_out={output}", *flags],
        capture_output=True,
        text=True,
        # The checks are of the script here, so that a quick compilation does.
        env=environment()
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        | variables,
        timeout=TIMEOUT_S,
        check=False,
    )
    return result.returncode, result.stdout, json.loads(output.read_text())


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_device", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kind", "gigabytes_a_second"),
    [
        ("TPU v5 lite", 819),
        ("TPU v5e", 819),
        ("TPU v5", 2765),
        ("TPU v5p", 2765),
        ("TPU v6 lite", 1638),
        ("TPU v6e", 1638),
        ("NVIDIA H100 80GB HBM3", 3350),
    ],
)
def test_a_chip_has_its_published_figures(
    kind: str, gigabytes_a_second: int, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    device = SimpleNamespace(platform=platform, device_kind=kind, compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    about, kernel = script.describe_device()
    assert (about["published"]["GB/s"], kernel) == (gigabytes_a_second, platform)


def test_a_process_that_starts_anew_gets_what_is_left_of_the_time(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 s: it starts at once, hangs in the first of two checks, and never starts again."""
    names = [dict(op="op", shape=str(i), dtype="f32", backend="xla") for i in range(2)]
    device = dict(kind="chip", platform="tpu", jax="1", published=None)
    answers: list[dict[str, Any] | None] = [dict(device=device, checks=names), None, None]
    waited: list[float] = []
    monkeypatch.setattr(script.time, "monotonic", lambda: sum(waited[1:]))

    def answer(timeout_s: float) -> dict[str, Any]:
        waited.append(timeout_s)
        message = answers.pop(0)
        if message is None:
            raise RuntimeError("no answer")
        return message

    worker = SimpleNamespace(stop=lambda: None, next=answer)
    monkeypatch.setattr(script, "Worker", lambda first, small: worker)
    report = script.Report(None)
    script.run(report, small=True, budget_s=100)
    assert waited == [script.START_S, script.CHECK_S, 100 - script.CHECK_S]
    assert (len(report.rows), len(report.not_run)) == (1, 1)


@pytest.mark.slow
def test_every_op_is_right_and_timed_on_the_cpu(tmp_path: Path) -> None:
    load_cpu_kernels()
    status, printed, report = check_device(SCRIPT, tmp_path / "out.json", "--small")
    assert [row for row in report["rows"] if not row["ok"]] == []
    assert (status, report["not_run"]) == (0, [])
    assert {(row["op"], row["backend"]) for row in report["rows"]} == {
        *product(("decode", "prefill", "attention", "linear", "gated_linear"), ("cpu", "xla")),
        ("mla", "xla"),
        *product(("quantized_matmul", "grouped_matmul"), ("auto",)),
    }
    names = [(row["op"], row["shape"], row["dtype"], row["backend"]) for row in report["rows"]]
    assert len(set(names)) == len(names)
    for row in report["rows"]:
        assert 0 <= row["error"] <= row["bound"], row
        assert row["GB/s"] == pytest.approx(row["num_bytes"] / row["ms"] / 1e6)
        assert f"{row['op']:17}{row['shape']}" in printed
    assert report["device"]["platform"] == "cpu"


@pytest.mark.slow
def test_what_goes_wrong_costs_its_own_row(tmp_path: Path) -> None:
    """A wrong result, no number, an exception, the end of the process: the others are still run."""
    script = Path(shutil.copy(SCRIPT, tmp_path))
    (tmp_path / "device_checks.py").write_text(CHECKS)
    status, printed, report = check_device(script, tmp_path / "out.json")
    rows = report["rows"]
    assert [row["ok"] for row in rows] == [True, False, False, False, False, True]
    assert "ZeroDivisionError" in rows[3]["message"]
    assert "status 3" in rows[4]["message"]
    assert (rows[0]["GB/s"], rows[0]["TFLOP/s"]) == (2.0, 3.0)
    assert (status, printed.count("WRONG")) == (1, 4)


def test_kernels_that_cannot_be_compiled_are_wrong(tmp_path: Path) -> None:
    script = Path(shutil.copy(SCRIPT, tmp_path))
    (tmp_path / "device_checks.py").write_text(CHECKS.replace('backend="xla"', 'backend="cpu"'))
    variables = {"PATH": str(tmp_path), "JAXINFER_CACHE_DIR": str(tmp_path)}
    status, _, report = check_device(script, tmp_path / "out.json", **variables)
    said = {row["message"] for row in report["rows"]}
    assert said == {"CompilerError: no C++ compiler is on the PATH (c++, g++, clang++)"}
    assert (status, len(report["rows"])) == (1, 6)


def test_no_time_is_said(tmp_path: Path) -> None:
    script = Path(shutil.copy(SCRIPT, tmp_path))
    (tmp_path / "device_checks.py").write_text(CHECKS)
    status, printed, report = check_device(script, tmp_path / "out.json", "--budget_s=0")
    assert (status, report["rows"]) == (1, [])
    assert len(report["not_run"]) == printed.count("not run: ") == 6
