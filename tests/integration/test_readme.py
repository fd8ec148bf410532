"""README's examples do what they say: each runs as it stands there, on an engine with fewer shapes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import flags, plan
from jaxinfer.bench import MEASUREMENTS
from jaxinfer.memory.chips import GIB
from tests.fake_engine import FakeEngine
from tests.fake_server import Server, serving
from tests.integration.processes import ENGINE_FLAGS, TIMEOUT_S, environment, run

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SERVER = "localhost:8000"
PARSERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "generate": flags.generate_options,
    "batch": flags.batch_options,
    "serve": flags.serve_options,
    "plan": flags.plan_options,
    "bench": lambda argv: flags.bench_options(argv, MEASUREMENTS),
}


def blocks(language: str, mark: str = "") -> list[str]:
    """The fenced blocks of a language that hold `mark`."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [block for block in found if mark in block]


def shell_lines() -> list[list[str]]:
    """The words of each line of the shell examples; lines that end in a backslash are joined."""
    text = "".join(blocks("sh")).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def commands() -> list[tuple[str, list[str]]]:
    """Our commands among them: name and arguments."""
    ours = [words for words in shell_lines() if words[:2] == ["python", "-m"]]
    return [(words[2].removeprefix("jaxinfer."), words[3:]) for words in ours]


def test_the_two_commands_stand_at_the_top() -> None:
    assert [words[0] for words in shell_lines()[:2]] == ["scripts/demo", "scripts/test"]


def test_every_command_is_shown_and_its_flags_are_known() -> None:
    for name, argv in commands():
        PARSERS[name](argv)
    assert {name for name, _ in commands()} == set(PARSERS)


def test_the_table_of_flags_has_their_defaults() -> None:
    with pytest.raises(flags.HelpRequestedError) as text:
        flags.serve_options(["--help"])
    rows = re.findall(r"^\| `--(\w+)` \| `(\S+)` \|", README, re.MULTILINE)
    assert len(rows) > 10
    assert dict(rows).items() <= dict(re.findall(r"--(\w+)  \(default: (\S+)\)", str(text.value))).items()


PLANNED = {
    "v5e 2x4": ("v5e", "1x8"),
    "v6e 2x4": ("v6e", "1x8"),
    "v5p 2x2x1": ("v5p", "1x4"),
    "H100": ("h100", "1x1"),
}
PLAN_FLAGS = ("--max_model_len=8192", "--max_num_seqs=256", "--mean_len=2048", "--json")


def planned(row: str, chip: str, mesh: str, capsys: pytest.CaptureFixture[str]) -> str:
    """A cell of the table of plans."""
    name, _, quantize = row.partition(", ")
    path = Path(__file__).parents[1] / "golden" / "configs" / f"{name}.json"
    flags = (f"--chip={chip}", f"--mesh={mesh}", f"--quantize={quantize or 'none'}")
    plan.main([f"--model={path}", *flags, *PLAN_FLAGS])
    report = json.loads(capsys.readouterr().out)
    weights = f"{report['bytes_a_device']['weights'] / GIB:.1f} GiB"
    if not report["fits"]:
        return f"no: {weights}"
    speed = report["roofline"]["decode"]["tokens_per_s_a_chip"]
    requests = report["requests"]["at_max_model_len"]
    return f"{weights}; {report['kv_cache']['num_tokens']:,}; {requests}; {speed:,.0f}"


def test_the_table_of_plans_is_what_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    table = README[README.index("\n| model | v5e") :].split("\n\n")[0]
    head, _, *rows = table.strip().splitlines()
    columns = [PLANNED[name.split(",")[0]] for name in head.strip("| ").split(" | ")[1:]]
    assert len(columns) == 4
    assert len(rows) == 12
    for row in rows:
        model, *cells = row.strip("| ").split(" | ")
        assert cells == [planned(model, *column, capsys) for column in columns], model


def test_the_plan_with_stages_is_what_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    figures = re.search(r"Llama-3.3-70B as two .*`--mesh=2x1x8` .* are\s(.*)\.\n", README)
    assert figures is not None
    assert figures[1] == planned("Llama-3.3-70B", "v5e", "2x1x8", capsys)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(FakeEngine(), model="demo") as live:
        yield live


def test_bodies_of_the_curl_examples_are_accepted(server: Server) -> None:
    calls = [words for words in shell_lines() if words[0] == "curl"]
    assert len(calls) == 3
    for words in calls:
        path = next(word for word in words if word.startswith(SERVER)).removeprefix(SERVER)
        body = words[words.index("-d") + 1] if "-d" in words else None
        headers = dict([words[words.index("-H") + 1].split(": ")]) if "-H" in words else {}
        response = server.http.request("GET" if body is None else "POST", path, content=body, headers=headers)
        assert response.status_code == 200, response.text


def test_the_client_example_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python", "import OpenAI")
    exec(example.replace(SERVER, f"127.0.0.1:{server.port}"), names := {})
    names["client"].close()
    assert capsys.readouterr().out == "The sea is\n"  # the fake engine says the prompt back


@pytest.mark.slow
def test_the_python_example_runs(demo_path: Path, cache_dir: Path) -> None:
    (example,) = blocks("python", "import LLM")
    compiled = os.environ["JAX_COMPILATION_CACHE_DIR"]
    directories = (f"cache_dir={str(cache_dir)!r}", f"compilation_cache_dir={compiled!r}")
    arguments = ", ".join((*(flag.removeprefix("--") for flag in ENGINE_FLAGS if "=" in flag), *directories))
    code = example.replace('model="demo"', f'model="demo", {arguments}').replace(
        "max_tokens=32", "max_tokens=4"
    )
    assert arguments in code
    assert "max_tokens=4" in code
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" length 4\n") == 2


@pytest.mark.slow
def test_the_generate_example_runs(demo_path: Path) -> None:
    argv = next(argv for name, argv in commands() if name == "generate")
    result = run("generate", *argv, "--max_tokens=4", *ENGINE_FLAGS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" Paris")


@pytest.mark.slow
def test_the_batch_example_runs(demo_path: Path, tmp_path: Path) -> None:
    (rows,) = blocks("jsonl")
    (tmp_path / "in.jsonl").write_text(rows, encoding="utf-8")
    (argv,) = (argv for name, argv in commands() if name == "batch")
    result = run("batch", *argv, "--max_tokens=4", *ENGINE_FLAGS, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [a["error"] for a in answers] == [None] * 3
    assert [a.get("id") for a in answers[:2]] == [1, 2]
    assert all(a["outputs"][0]["text"] for a in answers[:2])
    assert answers[2]["custom_id"] == "a"
    assert answers[2]["response"]["body"]["choices"][0]["text"]
