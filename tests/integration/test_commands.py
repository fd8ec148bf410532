"""generate and batch as processes: with the demo model, with a tiny one, and what they say of bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.processes import ENGINE_FLAGS, TIMEOUT_S, assert_one_line, command, environment, run

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"


def test_generate(demo_path: Path) -> None:
    result = run(
        "generate", f"--model={demo_path}", f"--prompt={PROMPT}", "--max_tokens=8", "--stats", *ENGINE_FLAGS
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" Paris")
    stages = {line.split()[0] for line in result.stderr.splitlines() if line}  # XLA may say that it is slow
    assert {"load", "compile", "tokenise", "prefill", "decode", "detokenise", "TTFT", "ITL"} <= stages


def test_generate_json_of_stdin_is_the_same_text(tiny: tuple[str, ...]) -> None:
    argv = (*tiny, "--max_tokens=8")
    plain = run("generate", "--prompt=Hello", *argv)
    result = run("generate", "--json", *argv, stdin="Hello")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["text"] + "\n" == plain.stdout


def test_chat_sends_the_history(demo_path: Path) -> None:
    turns = "My name is Ada. Say hello.\nWhat is my name?\n"
    result = run(
        "generate", f"--model={demo_path}", "--chat", "--max_tokens=24", "--json", *ENGINE_FLAGS, stdin=turns
    )
    assert result.returncode == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert (
        second["usage"]["prompt_tokens"]
        > first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    )
    assert second["usage"]["cached_tokens"] > 0


def test_batch_is_generate(tiny: tuple[str, ...], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"custom_id": i, "prompt": f"Hello{i}"} for i in range(12)]
    rows[5]["temperature"] = -1
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = (*tiny, "--max_tokens=6")
    result = run("batch", f"--input={source}", f"--output={target}", *argv)
    assert result.returncode == 0, result.stderr
    assert "12 rows, 1 with an error" in result.stderr
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [a["custom_id"] for a in answers] == list(range(12))
    assert answers[5]["error"]["param"] == "temperature"
    alone = run("generate", f"--prompt={rows[11]['prompt']}", *argv)
    assert answers[11]["outputs"][0]["text"] + "\n" == alone.stdout


def test_a_reader_that_leaves_early_is_no_error(demo_path: Path) -> None:
    process = subprocess.Popen(
        command("generate", f"--model={demo_path}", "--prompt=Tell me", "--ignore_eos", *ENGINE_FLAGS),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(TIMEOUT_S) == 0


def test_bad_models_are_one_line(demo_path: Path, tmp_path: Path) -> None:
    assert_one_line(run("generate", "--model=/no/such/model", "--prompt=x"), 1, "/no/such/model")
    truncated = tmp_path / "truncated.gguf"
    shutil.copy(demo_path, truncated)
    with open(truncated, "r+b") as file:
        file.truncate(demo_path.stat().st_size - 4096)
    assert_one_line(run("generate", f"--model={truncated}", "--prompt=x"), 1, "truncated.gguf")
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"architectures": ["Nonesuch"], "model_type": "nonesuch"}', "utf-8")
    assert_one_line(run("generate", f"--model={unknown}", "--prompt=x"), 1)


def test_bad_requests_are_one_line(tiny: tuple[str, ...]) -> None:
    assert_one_line(run("generate", *tiny, stdin="word" * 100), 1, "400 tokens", "128")
    assert_one_line(run("generate", *tiny, "--mesh=4x4", "--prompt=x"), 1, "device_count=16")
    assert_one_line(run("generate", *tiny, "--temperature=-1", "--prompt=x"), 2, "temperature")
