"""The real steps, compiled by the GPU's own compiler for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.processes import command, environment

LLAMA_8B = Path(__file__).parents[1] / "golden" / "configs" / "Llama-3.1-8B.json"
TIMEOUT_S = 1800
MISSING = [name for name in ("jax_plugins", "nvidia") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{MISSING} not here: jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc"
    ),
]


@pytest.mark.parametrize(
    ("chip", "mesh", "attention"),
    [("h100", "1x8", "gpu"), ("h100", "1x1", "xla"), ("h200", "1x1", "gpu"), ("b200", "1x8", "gpu")],
)
def test_steps(chip: str, mesh: str, attention: str, tmp_path: Path) -> None:
    """Two layers of Llama-3.1-8B: the cache in place, few temporaries, two all-reduces a layer."""
    config = json.loads(LLAMA_8B.read_text(encoding="utf-8")) | {"num_hidden_layers": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    flags = (f"--chip={chip}", f"--mesh={mesh}", f"--attention={attention}", "--max_model_len=8192")
    argv = command("plan", f"--model={path}", *flags, "--compile", "--json")
    result = subprocess.run(
        argv, capture_output=True, text=True, env=environment(), timeout=TIMEOUT_S, check=False
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    decode, prefill, _, _ = report["compiled"]
    for step in (decode, prefill):
        assert step["alias_bytes"] == pytest.approx(report["bytes_a_device"]["kv_cache"], rel=1e-3)
        assert step["temp_bytes"] < 200e6
        assert step["collectives"] == ({"all-reduce": 2 * 2 + 1} if mesh == "1x8" else {})
    assert report["device_bytes"] <= report["budget_bytes"]
