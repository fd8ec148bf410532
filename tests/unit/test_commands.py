"""generate, batch and the flags of every command, with a fake engine in place of the real one."""

from __future__ import annotations

import io
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pytest

from jaxinfer import batch, generate, serve
from jaxinfer.config import EngineConfig, SchedulerConfig
from jaxinfer.flags import batch_options, generate_options, serve_options
from tests.fake_engine import FakeEngine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The engines that the commands made, in place of real ones."""
    made: list[FakeEngine] = []

    def make(config: EngineConfig) -> FakeEngine:
        limit = config.max_model_len or 512
        made.append(FakeEngine(config, SchedulerConfig(config.max_num_seqs, 512, limit)))
        return made[-1]

    module = ModuleType("jaxinfer.engine.engine")
    module.Engine = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


@pytest.fixture
def run(
    engines: list[FakeEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    def run(main: Callable[[list[str]], int], *argv: str, stdin: str | TextIO = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        status = main(list(argv))
        out, err = capsys.readouterr()
        return status, out, err

    return run


def assert_one_line(err: str, *parts: str) -> None:
    assert err.startswith("jaxinfer: error: ")
    assert err.count("\n") == 1
    assert all(part in err for part in parts), err


# --- Flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("main", [generate.main, batch.main, serve.main])
@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ("--model", "--model=demo")),
        (["--model=demo", "--modle=x"], ("modle", "model")),
        (["--model=demo", "--page_size=0"], ("--page_size=0",)),
        (["--model=demo", "--page_size=x"], ("--page_size=x",)),
        (["--model=demo", "--scheduling=x"], ("--scheduling=x", "fcfs|priority")),
        (["--model=demo", "--mesh=2"], ("--mesh=2", "DxT")),
        (["--model=demo", "--rope_scaling=[]"], ("--rope_scaling=[]", "JSON object")),
        (["--model=demo", "--quantize=int8"], ("quantize",)),
        (["--model=demo", "hello"], ("'hello'",)),
        (["--model"], ("--model",)),
    ],
)
def test_usage_errors(
    run: Run,
    engines: list[FakeEngine],
    main: Callable[[list[str]], int],
    argv: list[str],
    parts: tuple[str, ...],
) -> None:
    files = ["--input=a.jsonl", "--output=b.jsonl"] if main is batch.main else []
    status, out, err = run(main, *files, *argv)
    assert (status, out) == (2, "")
    assert_one_line(err, *parts)
    assert engines == []


@pytest.mark.parametrize(
    ("flag", "part"),
    [("--temperature=-1", "temperature=-1"), ("--top_p=0", "top_p=0"), ("--stop=", "stop=")],
)
def test_sampling_flags_out_of_range(run: Run, flag: str, part: str) -> None:
    status, _, err = run(generate.main, "--model=demo", "--prompt=x", flag)
    assert status == 2
    assert_one_line(err, part)


@pytest.mark.parametrize("main", [generate.main, batch.main, serve.main])
def test_help_lists_the_flags(run: Run, main: Callable[[list[str]], int]) -> None:
    status, out, err = run(main, "--help")
    assert (status, err) == (0, "")
    assert "--max_num_seqs  (default: 32)" in out
    assert ("--temperature" in out) == (main is not serve.main)
    assert ("--port" in out) == (main is serve.main)


def test_flags_default_to_the_engine_configs_own_values() -> None:
    config = generate_options(["--model=m"]).engine
    default = EngineConfig("m")
    assert config.replace(cache_dir=None, compilation_cache_dir=None, xla_flags="") == default


def test_cache_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAXINFER_CACHE_DIR", "/somewhere")
    assert generate_options(["--model=m"]).engine.cache_dir == "/somewhere"
    assert generate_options(["--model=m"]).engine.compilation_cache_dir == "/somewhere/compiled"
    assert generate_options(["--model=m", "--compilation_cache_dir="]).engine.compilation_cache_dir == ""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/jax")
    assert generate_options(["--model=m"]).engine.compilation_cache_dir == "/jax"


def test_a_request_has_a_seed_only_where_one_is_given() -> None:
    assert generate_options(["--model=m"]).sampling.params.seed is None
    options = generate_options(["--model=m", "--seed=3", "--stop=a,b", "--stop=c", "--stop_token_ids=7"])
    assert (options.sampling.params.seed, options.engine.seed) == (3, 3)
    assert options.sampling.params.stop == ("a,b", "c")
    assert options.sampling.given == {"seed": 3, "stop": ["a,b", "c"], "stop_token_ids": [7]}


def test_served_name_is_the_model_unless_told() -> None:
    assert serve_options(["--model=m"]).served_model_name == "m"
    assert serve_options(["--model=m", "--served_model_name=n"]).served_model_name == "n"


# --- generate -------------------------------------------------------------------------------------


def test_generate_prints_the_answer(run: Run) -> None:
    assert run(generate.main, "--model=demo", "--prompt=hé") == (0, "hé\n", "")
    assert run(generate.main, "--model=demo", stdin="from stdin") == (0, "from stdin\n", "")
    assert run(generate.main, "--model=demo", "--prompt=abcdef", "--stop=de") == (0, "abc\n", "")
    assert run(generate.main, "--model=demo", "--prompt=abcdef", "--max_tokens=2") == (0, "ab\n", "")


def test_generate_chat_keeps_the_history(run: Run) -> None:
    status, out, _ = run(generate.main, "--model=demo", "--chat", stdin="a\n\nb\n")
    assert status == 0
    assert out == "user:a;\nuser:a;assistant:user:a;;user:b;\n"


def test_generate_json_is_one_object(run: Run) -> None:
    status, out, err = run(generate.main, "--model=demo", "--prompt=hi", "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    answer = json.loads(out)
    assert (answer["text"], answer["finish_reason"], answer["model"]) == ("hi", "stop", "demo")
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 3}
    stages = ["load", "compile", "tokenise", "queue", "prefill", "decode", "detokenise"]
    assert list(answer["stages_s"]) == stages
    assert answer["ttft_s"] > 0


def test_generate_stats_go_to_stderr(run: Run) -> None:
    status, out, err = run(generate.main, "--model=demo", "--prompt=hi", "--stats")
    assert (status, out) == (0, "hi\n")
    names = [line.split()[0] for line in err.splitlines()]
    assert names == [
        *("load", "compile", "tokenise", "queue", "prefill", "decode", "detokenise"),
        *("prompt", "output", "TTFT", "ITL", "prefill", "decode"),
    ]


@pytest.mark.parametrize("argv", [["--prompt="], []])
def test_generate_refuses_an_empty_prompt(run: Run, engines: list[FakeEngine], argv: list[str]) -> None:
    status, _, err = run(generate.main, "--model=demo", *argv)
    assert status == 1
    assert_one_line(err, "empty")
    assert engines == []


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_generate_refuses_what_is_no_text(run: Run, chat: list[str]) -> None:
    latin_1 = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    status, out, err = run(generate.main, "--model=demo", *chat, stdin=latin_1)
    assert (status, out) == (1, "")
    assert_one_line(err, "standard input is no text in utf-8")


def test_generate_says_what_the_engine_refuses(run: Run) -> None:
    status, out, err = run(generate.main, "--model=demo", "--prompt=hello", "--max_model_len=4")
    assert (status, out) == (1, "")
    assert_one_line(err, "5 tokens", "4")


def test_a_bug_is_one_line_unless_the_traceback_is_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: FakeEngine) -> Any:
        raise KeyError("lost\nand found")

    monkeypatch.setattr(FakeEngine, "step", broken)
    status, _, err = run(generate.main, "--model=demo", "--prompt=hello")
    assert status == 1
    assert_one_line(err, "KeyError", "--verbosity=1")
    _, _, err = run(generate.main, "--model=demo", "--prompt=hello", "--verbosity=1")
    assert "Traceback" in err


# --- serve ----------------------------------------------------------------------------------------


def test_a_port_in_use_is_told_before_the_model_is_loaded(run: Run, engines: list[FakeEngine]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        status, _, err = run(serve.main, "--model=demo", f"--port={port}")
    assert status == 1
    assert_one_line(err, str(port), "in use", "--port")
    assert engines == []


# --- batch ----------------------------------------------------------------------------------------


def run_batch(run: Run, directory: Path, rows: list[Any], *argv: str) -> list[dict[str, Any]]:
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8"
    )
    status, out, _ = run(batch.main, "--model=demo", f"--input={source}", f"--output={target}", *argv)
    assert (status, out) == (0, "")
    assert {p.name for p in directory.iterdir()} == {"in.jsonl", "out.jsonl"}
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def texts(row: dict[str, Any]) -> list[str]:
    return [output["text"] for output in row["outputs"]]


def test_batch_keeps_order_and_columns(run: Run, tmp_path: Path) -> None:
    rows = [{"custom_id": i, "prompt": "x" * (1 + 7 * i % 40), "label": [i]} for i in range(50)]
    got = run_batch(run, tmp_path, rows, "--max_num_seqs=5")
    assert [{k: g[k] for k in r} for g, r in zip(got, rows, strict=True)] == rows
    assert [texts(g) for g in got] == [[r["prompt"]] for r in rows]
    assert got[0]["usage"]["total_tokens"] == 3


def test_batch_reads_a_bounded_number_of_rows_ahead(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "ROWS_IN_FLIGHT", 2)
    rows = [{"prompt": "x" * (30 - i)} for i in range(10)]
    assert [texts(g) for g in run_batch(run, tmp_path, rows)] == [[r["prompt"]] for r in rows]


def test_batch_rows_of_every_form(run: Run, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1},
        {"prompt_token_ids": [97, 98], "n": 2, "prompt_logprobs": 0},
        {"prompt": "abc", "max_tokens": 1, "stop": None},
        {
            "custom_id": "o",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "demo", "prompt": "abcd"},
        },
    ]
    chat, ids, short, openai_row = run_batch(run, tmp_path, rows, "--max_tokens=2")
    assert texts(chat) == ["us"]
    assert len(chat["outputs"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1
    assert texts(ids) == ["ab", "b"]
    assert ids["outputs"][0]["prompt_logprobs"][1].keys() == {"98"}
    assert texts(short) == ["a"]
    assert openai_row.keys() == {"id", "custom_id", "response", "error"}
    assert (openai_row["custom_id"], openai_row["error"]) == ("o", None)
    assert openai_row["response"]["status_code"] == 200
    assert openai_row["response"]["body"]["choices"][0]["text"] == "ab"
    assert openai_row["response"]["body"]["object"] == "text_completion"


def test_default_length_gives_way_to_the_limit_and_a_given_one_does_not(run: Run, tmp_path: Path) -> None:
    rows = [
        {"prompt": "x" * 90},
        {"prompt": "x" * 90, "max_tokens": None},
        {"prompt": "x" * 4, "max_tokens": 2},
    ]
    got = run_batch(run, tmp_path, rows, "--max_model_len=100")
    assert [g["usage"]["completion_tokens"] for g in got] == [10, 10, 2]
    (tmp_path / "out.jsonl").unlink()
    got = run_batch(run, tmp_path, rows, "--max_model_len=100", "--max_tokens=11")
    assert [g["usage"]["completion_tokens"] for g in got] == [11, 11, 2]


def test_batch_bad_rows_stop_nothing(run: Run, tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": "ok"}
    rows = [
        {"prompt": "ok"},
        "{not json",
        "[]",
        '{"prompt": "ok", "kept": 1e999}',
        {"custom_id": "none"},
        {"prompt": "a", "messages": []},
        {"prompt_token_ids": "97"},
        {"prompt_token_ids": [97, True]},
        {"prompt": "a", "temperature": "hot"},
        {"prompt": ["ok", "x" * 600]},
        {"custom_id": 7, "url": "/v1/embeddings", "body": body},
        {"custom_id": 8, "url": "/v1/completions", "body": body | {"stream": True}},
        {"custom_id": 9, "url": "/v1/completions", "body": body | {"model": "other"}},
        {"prompt": "ok too"},
    ]
    got = run_batch(run, tmp_path, rows)
    assert texts(got[0]) == ["ok"]
    assert texts(got[-1]) == ["ok too"]
    assert [(g["line"], g["error"]["code"]) for g in got[1:4]] == [(i, "invalid_json") for i in (2, 3, 4)]
    assert [g["outputs"] for g in got[4:10]] == [None] * 6
    params = [None, None, "prompt_token_ids", "prompt_token_ids", "temperature", "prompt"]
    assert [g["error"]["param"] for g in got[4:10]] == params
    assert got[4]["custom_id"] == "none"
    assert [(g["custom_id"], g["response"]["status_code"]) for g in got[10:13]] == [
        (7, 400),
        (8, 400),
        (9, 404),
    ]
    assert [g["response"]["body"]["error"]["param"] for g in got[10:13]] == ["url", "stream", "model"]


def test_batch_output_is_whole_or_not_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "hi"}\n', encoding="utf-8")
    argv = ["--model=demo", f"--input={source}", f"--output={target}"]
    with monkeypatch.context() as patched:
        patched.setattr(FakeEngine, "step", lambda self: 1 / 0)
        assert run(batch.main, *argv)[0] == 1
    assert list(tmp_path.iterdir()) == [source]
    target.write_text("precious", encoding="utf-8")
    status, _, err = run(batch.main, *argv)
    assert status == 1
    assert_one_line(err, "exists", "--overwrite")
    assert target.read_text(encoding="utf-8") == "precious"
    assert run(batch.main, *argv, "--overwrite")[0] == 0
    assert json.loads(target.read_text(encoding="utf-8"))["outputs"][0]["text"] == "hi"


def test_batch_files_are_checked_first(run: Run, engines: list[FakeEngine], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    for argv, status, part in (
        ([f"--input={tmp_path}/in.csv", "--output=o.jsonl"], 2, ".csv"),
        ([f"--input={source}", "--output=o.parquet"], 2, ".parquet"),
        ([f"--input={source}", f"--output={tmp_path}/o.jsonl"], 1, "no such file"),
        (["--output=o.jsonl"], 2, "--input"),
    ):
        got, _, err = run(batch.main, "--model=demo", *argv)
        assert got == status
        assert_one_line(err, part)
    source.touch()
    got, _, err = run(batch.main, "--model=demo", f"--input={source}", f"--output={tmp_path}/no/o.jsonl")
    assert got == 1
    assert_one_line(err, "directory")
    (tmp_path / "dir.jsonl").mkdir()
    argv = [f"--input={source}", f"--output={tmp_path}/dir.jsonl", "--overwrite"]
    got, _, err = run(batch.main, "--model=demo", *argv)
    assert got == 1
    assert_one_line(err, "is a directory")
    got, _, err = run(batch.main, "--model=demo", f"--input={source}", f"--output={source}", "--overwrite")
    assert got == 1
    assert_one_line(err, "is the input")
    assert engines == []


def test_batch_of_nothing_is_nothing(run: Run, tmp_path: Path) -> None:
    assert run_batch(run, tmp_path, ["", "  "]) == []


def test_flags_of_batch_name_what_was_given() -> None:
    argv = ["--model=m", "--input=a.jsonl", "--output=b.jsonl", "--top_k=3"]
    assert batch_options(argv).sampling.given == {"top_k": 3}
