"""Bundles of compiled programs: what they are keyed by, and that only whole ones are loaded."""

from __future__ import annotations

import hashlib
import pickle
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.memory import bundle_key as key_module
from jaxinfer.memory.bundle import BundledProgram, BundleError, ProgramMemory, open_bundle, write_bundle
from jaxinfer.memory.bundle_key import bundle_key
from jaxinfer.models.families import load_model_config
from jaxinfer_checkpoints import open_checkpoint
from tests.integration.engines import MODELS


def devices_of(name: str) -> list[Any]:
    return jax.devices()[:1]


@dataclass(frozen=True)
class Chip:
    platform: str = "cpu"
    device_kind: str = "cpu"


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_model_config(open_checkpoint(MODELS / "llama"))


def make_key(model: ModelConfig, device: Any = Chip(), **changes: Any) -> dict[str, str]:
    """Each change goes to the configuration that has a field of its name."""
    parts = [
        EngineConfig("model"),
        CacheConfig(page_size=16, num_pages=64, dtype="float32"),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128),
    ]
    dtype = changes.pop("dtype", "float32")
    config, cache, scheduler = (
        replace(part, **{name: value for name, value in changes.items() if hasattr(part, name)})
        for part in parts
    )
    return bundle_key(config, model, dtype, cache, scheduler, device)


@pytest.fixture(scope="module")
def key(model: ModelConfig) -> dict[str, str]:
    return make_key(model)


def affine(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return params["scale"] * x + params["shift"], {"sum": x.sum()}


@pytest.fixture(scope="module")
def program() -> Any:
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jax.jit(affine).lower({"scale": shape, "shift": shape}, shape).compile()


@pytest.fixture
def path(tmp_path: Path, key: dict[str, str], program: Any) -> Path:
    return write_bundle(tmp_path, key, {"affine": program})


def call(program: BundledProgram) -> tuple[list[float], float]:
    scale, shift, x = np.array([[1, 2, 3, 4], [0, 0, 1, 1], [5, 6, 7, 8]], np.float32)
    out, extra = program({"scale": scale, "shift": shift}, x)
    return out.tolist(), float(extra["sum"])


def test_a_program_comes_back_as_it_was(path: Path, key: dict[str, str], program: Any) -> None:
    loaded = open_bundle(path.parent, key, devices_of)
    assert list(loaded) == ["affine"]
    assert loaded["affine"].memory_analysis() == ProgramMemory.of(program)
    assert call(loaded["affine"]) == ([5, 12, 22, 33], 26)


@pytest.mark.parametrize("damage", ["a byte", "cut off", "cut to nothing", "longer", "another file"])
def test_a_damaged_file_is_told_by_its_checksum(path: Path, key: dict[str, str], damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "a byte":
        data[len(data) // 2] ^= 1
    written = {
        "a byte": data,
        "cut off": data[:-1],
        "cut to nothing": b"",
        "longer": data + b"\0",
        "another file": b"PK\3\4" + bytes(100),
    }
    path.write_bytes(written[damage])
    with pytest.raises(BundleError, match="damaged"):
        open_bundle(path.parent, key, devices_of)


class Trap:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_nothing_is_unpickled_before_the_check(
    path: Path, key: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = pickle.dumps(Trap(tmp_path / "mark"))
    path.write_bytes(path.read_bytes()[: -len(trap)] + trap)
    with pytest.raises(BundleError, match="damaged"):
        open_bundle(path.parent, key, devices_of)
    assert not (tmp_path / "mark").exists()


def test_a_crash_while_writing_leaves_the_older_one(
    path: Path, key: dict[str, str], program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: Path, target: Path) -> None:
        raise OSError("no space left")

    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="no space left"):
        write_bundle(path.parent, key, {"affine": program, "again": program})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_writers_and_readers_at_once(tmp_path: Path, key: dict[str, str], program: Any) -> None:
    """A reader finds none or a whole one, whoever writes."""
    found: list[list[str] | str] = []

    def write() -> None:
        for _ in range(5):
            write_bundle(tmp_path, key, {"affine": program})

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        try:
            found.append(list(open_bundle(tmp_path, key, devices_of)))
        except BundleError as error:
            found.append(str(error))
    assert [names for names in found if names not in (["affine"], f"there is no bundle in {tmp_path}")] == []
    assert call(open_bundle(tmp_path, key, devices_of)["affine"]) == ([5, 12, 22, 33], 26)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": "1x2"},
        {"dtype": "float16"},
        {"num_pages": 65},
        {"page_size": 32},
        {"max_num_seqs": 8},
        {"max_model_len": 256},
        {"max_num_batched_tokens": 128},
        {"backend": "gpu"},
        {"xla_flags": "--xla_cpu_max_isa=AVX2"},
    ],
)
def test_the_reason_names_what_differs(path: Path, model: ModelConfig, changes: dict[str, Any]) -> None:
    (name, value), *_ = changes.items()
    was = make_key(model)[name]
    with pytest.raises(BundleError) as error:
        open_bundle(path.parent, make_key(model, **changes), devices_of)
    assert f"the closest was made for {name}={was!r}, not {str(value)!r}" in str(error.value)


def test_a_bundle_of_older_source_is_replaced(path: Path, key: dict[str, str], program: Any) -> None:
    edited = {**key, "jaxinfer": "0123456789abcdef"}
    with pytest.raises(BundleError, match=f"jaxinfer='{key['jaxinfer']}', not '0123456789abcdef'"):
        open_bundle(path.parent, edited, devices_of)
    assert write_bundle(path.parent, edited, {"affine": program}) == path
    assert list(open_bundle(path.parent, edited, devices_of)) == ["affine"]


def test_programs_of_an_avx512_machine_are_not_loaded_on_an_avx2_machine(
    tmp_path: Path, model: ModelConfig, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = {"model name": "A CPU", "flags": "fpu avx avx2 fma"}
    larger = {**cpu, "flags": cpu["flags"] + " avx512f avx512bw"}
    monkeypatch.setattr(key_module, "_cpuinfo", lambda: larger)
    write_bundle(tmp_path, make_key(model), {"affine": program})
    assert open_bundle(tmp_path, make_key(model), devices_of)
    monkeypatch.setattr(key_module, "_cpuinfo", lambda: cpu)
    with pytest.raises(BundleError, match="cpu_features='avx512bw avx512f', not 'fewer'"):
        open_bundle(tmp_path, make_key(model), devices_of)


def test_what_shapes_no_program_is_not_in_the_key(model: ModelConfig, key: dict[str, str]) -> None:
    assert make_key(replace(model, eos_token_ids=(1, 2), bos_token_id=5)) == key
    assert make_key(model, enable_prefix_caching=False, scheduling="priority", seed=3) == key
    assert make_key(replace(model, rms_norm_eps=1e-3)) != key


def test_the_key_of_an_accelerator_knows_nothing_of_the_host(model: ModelConfig) -> None:
    """So that a described topology and the machine that has it give the same."""
    key = make_key(model, Chip("tpu", "TPU v5 lite"))
    assert {"machine", "cpu", "cpu_features", "cores"}.isdisjoint(key)
    assert (key["platform"], key["device_kind"]) == ("tpu", "TPU v5 lite")


def test_the_source_is_that_of_runtime_and_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no source", encoding="utf-8")
    monkeypatch.setattr(key_module, "_PACKAGES", (tmp_path,))
    digests = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        source.write_text(text, encoding="utf-8")
        digests.append(key_module.source_digest.__wrapped__())
    assert digests[0] == digests[2] != digests[1]
    assert digests[0] == hashlib.sha256(b"kernel.py 6\nx = 1\n").hexdigest()[:16]
