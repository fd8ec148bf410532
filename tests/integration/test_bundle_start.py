"""Starting from a bundle: no compilation, and the same tokens."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest
from absl import logging

from jaxinfer.engine.engine import Engine
from jaxinfer.types import SamplingParams
from tests.integration.engines import make_engine, run, tokens, write_byte_tokenizer
from tests.integration.processes import ENGINE_FLAGS
from tests.integration.processes import run as run_command

PARAMS = SamplingParams(
    temperature=0.8, seed=1, repetition_penalty=1.2, max_tokens=12, ignore_eos=True, prompt_logprobs=1
)
REQUESTS = {f"{n}": (list(range(n)), PARAMS) for n in (3, 70, 20, 64, 100)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: found.append(text % args))
    return found


def answers(engine: Engine) -> dict[str, list[int]]:
    return {key: tokens(parts) for key, parts in run(engine, REQUESTS).items()}


@pytest.mark.parametrize("mesh", ["1x1", "1x2"])
def test_a_start_from_a_bundle_compiles_nothing(
    mesh: str, tokenizer: Path, tmp_path: Path, warnings: list[str]
) -> None:
    written = make_engine(tokenizer, mesh=mesh, bundle=str(tmp_path))
    assert warnings == [f"compiling: there is no bundle in {tmp_path}"]
    assert written._counter.total.num_requests > 0
    loaded = make_engine(tokenizer, mesh=mesh, bundle=str(tmp_path))
    assert answers(loaded) == answers(written)
    assert loaded._counter.total.names == []  # not even a conversion
    assert loaded.stats().compilations_warmup == 0
    assert loaded.memory().measured == written.memory().measured
    assert len(warnings) == 1


def test_a_damaged_bundle_is_compiled_anew_and_replaced(
    tokenizer: Path, tmp_path: Path, warnings: list[str]
) -> None:
    make_engine(tokenizer, bundle=str(tmp_path))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    make_engine(tokenizer, bundle=str(tmp_path))
    assert warnings[1:] == [f"compiling: the bundle {path} is damaged"]
    third = make_engine(tokenizer, bundle=str(tmp_path))
    assert third._counter.total.names == []
    assert len(warnings) == 2


def test_programs_that_jax_cannot_load_are_compiled_anew(
    tokenizer: Path, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine(tokenizer, bundle=str(tmp_path))

    def refuse(*args: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: unknown executable format")

    monkeypatch.setattr("jax.experimental.serialize_executable.deserialize_and_load", refuse)
    engine = make_engine(tokenizer, bundle=str(tmp_path))
    assert re.fullmatch(r"compiling: jax cannot load .*: INTERNAL: unknown executable format", warnings[1])
    assert answers(engine)


def test_a_directory_that_cannot_be_written_is_no_failure(
    tokenizer: Path, tmp_path: Path, warnings: list[str]
) -> None:
    (tmp_path / "file").touch()
    engine = make_engine(tokenizer, bundle=str(tmp_path / "file"))
    assert re.match("the bundle could not be written", warnings[1])
    assert answers(engine)


@pytest.mark.slow
def test_the_command_starts_from_its_bundle(demo_path: Path, tmp_path: Path) -> None:
    argv = (f"--model={demo_path}", "--prompt=The capital of France is", "--max_tokens=4", "--verbosity=0")
    first = run_command("generate", *argv, f"--bundle={tmp_path}", *ENGINE_FLAGS)
    assert "compiling: there is no bundle" in first.stderr
    second = run_command("generate", *argv, f"--bundle={tmp_path}", *ENGINE_FLAGS)
    assert "0 programs compiled, 0 cached" in second.stderr
    assert second.stdout == first.stdout
