"""Starting from a bundle: no compilation, and the same tokens."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import pytest
from absl import logging

from jaxinfer import plan
from jaxinfer.engine.compilation import CompilationCounter
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.prepare import prepare_programs
from jaxinfer.engine.programs import Programs
from jaxinfer.parallel.hosts import Hosts
from jaxinfer.types import SamplingParams
from tests.integration.engines import MODELS, make_engine, run, tokens
from tests.integration.processes import run as run_command

PARAMS = SamplingParams(
    temperature=0.8, seed=1, repetition_penalty=1.2, max_tokens=12, ignore_eos=True, prompt_logprobs=1
)
REQUESTS = {f"{n}": (list(range(n)), PARAMS) for n in (3, 70, 20, 64, 100)}


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: found.append(text % args))
    return found


def answers(engine: Engine) -> dict[str, list[int]]:
    return {key: tokens(parts) for key, parts in run(engine, REQUESTS).items()}


@pytest.fixture(scope="module")
def compiled(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine that has compiled and written its bundle."""
    return make_engine(tokenizer, bundle=str(tmp_path_factory.mktemp("bundles")))


@pytest.fixture
def path(compiled: Engine, tmp_path: Path) -> Path:
    """A copy of its bundle."""
    (original,) = Path(str(compiled.config.bundle)).iterdir()
    return Path(shutil.copy(original, tmp_path))


@pytest.fixture
def count_compiling(compiled: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that programs are compiled, which are those of `compiled`."""
    counts: list[int] = []

    def compile_again(*args: object) -> Programs:
        counts.append(1)
        return compiled._runner.programs

    monkeypatch.setattr("jaxinfer.engine.prepare.compile_engine", compile_again)
    return counts


def test_a_start_from_a_bundle_compiles_nothing(
    compiled: Engine, path: Path, tokenizer: Path, warnings: list[str]
) -> None:
    loaded = make_engine(tokenizer, bundle=str(path.parent))
    assert answers(loaded) == answers(compiled)
    assert compiled._counter.total.num_compilations > 0
    assert loaded._counter.total.names == []  # not even a conversion
    assert loaded.memory().measured == compiled.memory().measured
    assert warnings == []


def test_a_bundle_after_an_engine_from_the_persistent_cache(tokenizer: Path, tmp_path: Path) -> None:
    """In one process: what was read from the cache cannot be serialised, and must not be taken again."""
    make_engine(tokenizer, share_programs=False)
    jax.clear_caches()
    cached = make_engine(tokenizer, share_programs=False)
    assert cached._counter.total.num_compilations == 0
    make_engine(tokenizer, bundle=str(tmp_path))
    assert answers(make_engine(tokenizer, bundle=str(tmp_path))) == answers(cached)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x1", pytest.param("2x1x2", marks=pytest.mark.long)])
def test_a_start_from_the_bundle_of_a_plan_compiles_nothing(
    mesh: str, tokenizer: Path, tmp_path: Path, warnings: list[str]
) -> None:
    flags = ("--max_num_seqs=4", "--max_num_batched_tokens=64", "--max_model_len=128", "--page_size=8")
    argv = (f"--model={MODELS / 'llama'}", f"--mesh={mesh}", f"--bundle={tmp_path}", *flags)
    jax.clear_caches()  # of what other tests have compiled
    counter = CompilationCounter()
    assert plan.main([*argv, "--chip=cpu", "--compile"]) == 0
    made = [name for name in counter.total.names if re.search("_step|create_state", name)]
    loaded = make_engine(tokenizer, mesh=mesh, bundle=str(tmp_path), xla_flags=os.environ["XLA_FLAGS"])
    assert loaded._counter.total.names == []
    assert len(made) == len(loaded._runner.programs.by_name)  # each once
    assert answers(loaded) == answers(make_engine(tokenizer, mesh=mesh))
    assert warnings == []


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(m, marks=pytest.mark.slow if m == "2x1x1" else pytest.mark.long)
        for m in ("1x2", "2x1x1", "3x1x2")
    ],
)
def test_a_mesh_starts_from_its_bundle(
    mesh: str, tokenizer: Path, tmp_path: Path, warnings: list[str]
) -> None:
    written, loaded = (make_engine(tokenizer, mesh=mesh, bundle=str(tmp_path)) for _ in range(2))
    assert warnings == [f"compiling: there is no bundle in {tmp_path}"]
    assert answers(loaded) == answers(written)
    assert loaded._counter.total.names == []
    assert loaded.memory().measured == written.memory().measured


def test_a_damaged_bundle_is_compiled_anew_and_replaced(
    path: Path, tokenizer: Path, warnings: list[str], count_compiling: list[int]
) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    make_engine(tokenizer, bundle=str(path.parent))
    assert warnings == [f"compiling: the bundle {path} is damaged"]
    again = make_engine(tokenizer, bundle=str(path.parent))
    assert answers(again)
    assert (len(count_compiling), len(warnings)) == (1, 1)


def test_programs_that_jax_cannot_load_are_compiled_anew(
    path: Path,
    tokenizer: Path,
    warnings: list[str],
    count_compiling: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: unknown executable format")

    monkeypatch.setattr("jax.experimental.serialize_executable.deserialize_and_load", refuse)
    assert answers(make_engine(tokenizer, bundle=str(path.parent)))
    assert re.fullmatch(r"compiling: jax cannot load .*: INTERNAL: unknown executable format", warnings[0])
    assert count_compiling == [1]


def test_hosts_of_which_one_has_no_bundle_all_compile(
    compiled: Engine, path: Path, warnings: list[str], count_compiling: list[int]
) -> None:
    config = compiled.config.replace(bundle=str(path.parent))
    args = (config, compiled.model_config, compiled._resolved, (None,), CompilationCounter())
    for all_have, count in ((True, 0), (False, 1)):
        hosts = SimpleNamespace(share=lambda has, others=all_have: [has, True, others])
        assert isinstance(prepare_programs(*args, cast(Hosts, hosts)), Programs)
        assert len(count_compiling) == count
    assert warnings == ["compiling: host 2 has no bundle that fits"]


def test_a_directory_that_cannot_be_written_is_no_failure(
    tokenizer: Path, tmp_path: Path, warnings: list[str], count_compiling: list[int]
) -> None:
    (tmp_path / "file").touch()
    assert answers(make_engine(tokenizer, bundle=str(tmp_path / "file")))
    assert re.match("the bundle could not be written", warnings[1])
    assert count_compiling == [1]


@pytest.mark.slow
def test_the_command_starts_from_its_bundle(tiny: tuple[str, ...], tmp_path: Path) -> None:
    argv = (*tiny, "--prompt=Hello", "--max_tokens=4", "--verbosity=0")
    first = run_command("generate", *argv, f"--bundle={tmp_path}")
    assert "compiling: there is no bundle" in first.stderr
    second = run_command("generate", *argv, f"--bundle={tmp_path}")
    assert "0 programs compiled, 0 cached" in second.stderr
    assert second.stdout == first.stdout
