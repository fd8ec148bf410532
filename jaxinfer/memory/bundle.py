"""Bundles: all compiled programs of an engine in a file, which a start loads instead of compiling.

A directory holds any number of them, a file for each configuration, named by its key. A file is

    magic | sha256 of all that follows | length of the header, 8 bytes, little-endian | header | programs

The header is JSON: the key, and each program's name, place, and sizes in memory. The programs are those of
`jax.experimental.serialize_executable`, pickled with the trees of their arguments and results.

A bundle is code: whoever wrote it can run anything in the process that loads it. The checksum, which is
checked before anything is unpickled, finds damage, not malice.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax.experimental import serialize_executable

_MAGIC = b"jaxinfer bundle 1\n"
_DIGEST_SIZE = 32
_LENGTH_SIZE = 8
_SHOWN = 60  # characters of a value that a message shows


class BundleError(Exception):
    """Why a bundle cannot be used, in one line; the programs are compiled then."""


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes of a program on a device, as XLA's `memory_analysis` gives them."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int

    @classmethod
    def of(cls, program: Any) -> ProgramMemory:
        """Of a compiled one."""
        analysis = program.memory_analysis()
        return cls(**{name: getattr(analysis, name) for name in cls.__dataclass_fields__})


class BundledProgram:
    """A program of a bundle, called like the compiled one. Loaded by `load` or at its first call."""

    def __init__(self, pickled: memoryview, memory: ProgramMemory, devices: Sequence[Any]) -> None:
        self._pickled: memoryview | None = pickled
        self._memory = memory
        self._devices = devices
        self._lock = threading.Lock()
        self._program: Any = None

    def __call__(self, *args: Any) -> Any:
        """Runs it."""
        return (self._program or self.load())(*args)

    def load(self) -> Any:
        """The `jax.stages.Compiled`. Any thread may ask for it; the first one loads."""
        with self._lock:
            if self._pickled is not None:
                serialized, in_tree, out_tree = pickle.loads(self._pickled)
                self._program = serialize_executable.deserialize_and_load(
                    serialized,
                    in_tree,
                    out_tree,
                    backend=self._devices[0].client,
                    execution_devices=self._devices,
                )
                self._pickled = None
            return self._program

    def memory_analysis(self) -> ProgramMemory:
        """Needs no loading."""
        return self._memory


def load_in_background(programs: Iterable[BundledProgram]) -> None:
    """Loads them one after the other beside whatever else goes on, while the main thread lives."""

    def run() -> None:
        for program in programs:
            # No daemon: Python could not end it within XLA.
            if not threading.main_thread().is_alive():
                return
            program.load()

    threading.Thread(target=run, name="load-programs").start()


def write_bundle(directory: Path, key: Mapping[str, str], programs: Mapping[str, Any]) -> Path:
    """Writes a bundle whole or not at all, in place of the one of the same name.

    Args:
      directory: made where it is not there.
      key: see `bundle_key`.
      programs: compiled ones by name; for a described topology too.

    Raises:
      OSError: it cannot be written.
    """
    pickled = [pickle.dumps(serialize_executable.serialize(program)) for program in programs.values()]
    entries, start = [], 0
    for (name, program), data in zip(programs.items(), pickled, strict=True):
        memory = asdict(ProgramMemory.of(program))
        entries.append({"name": name, "start": start, "size": len(data), "memory": memory})
        start += len(data)
    header = json.dumps({"key": dict(key), "programs": entries}).encode()
    parts = [len(header).to_bytes(_LENGTH_SIZE, "little"), header, *pickled]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _file_name(key)
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.writelines([_MAGIC, digest.digest(), *parts])
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def open_bundle(
    directory: Path, key: Mapping[str, str], devices_of: Callable[[str], Sequence[Any]]
) -> dict[str, BundledProgram]:
    """The programs of the bundle with this key, by name, in the order they were written. None is loaded yet.

    Args:
      directory: of bundles.
      key: see `bundle_key`.
      devices_of: a program's, by its name, in its mesh's order.

    Raises:
      BundleError: there is none, it is damaged, or it was made for something else.
    """
    path = directory / _file_name(key)
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        raise BundleError(_why_there_is_none(directory, key)) from None
    except OSError as error:
        raise BundleError(f"the bundle {path} cannot be read: {error.strerror}") from error
    body = data[len(_MAGIC) + _DIGEST_SIZE :]
    digest = data[len(_MAGIC) : len(_MAGIC) + _DIGEST_SIZE]
    if data[: len(_MAGIC)] != _MAGIC or digest != hashlib.sha256(body).digest():
        raise BundleError(f"the bundle {path} is damaged")
    header, programs = _split(body)
    if header["key"] != key:
        raise BundleError(f"the bundle {path} was made {_difference(header['key'], key)}")
    return {
        entry["name"]: BundledProgram(
            programs[entry["start"] : entry["start"] + entry["size"]],
            ProgramMemory(**entry["memory"]),
            devices_of(entry["name"]),
        )
        for entry in header["programs"]
    }


def _file_name(key: Mapping[str, str]) -> str:
    """By the whole key but the source, so that a bundle of edited source takes the place of the older one."""
    digest = hashlib.sha256(json.dumps({**key, "jaxinfer": ""}, sort_keys=True).encode()).hexdigest()
    words = re.sub(r"\W+", "-", f"{key['model'].split()[0]}-{key['device_kind']}-{key['mesh']}")
    return f"{words}-{digest[:16]}.bundle".lower()


def _split(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    """The header and the programs."""
    end = _LENGTH_SIZE + int.from_bytes(body[:_LENGTH_SIZE], "little")
    return json.loads(bytes(body[_LENGTH_SIZE:end])), body[end:]


def _why_there_is_none(directory: Path, key: Mapping[str, str]) -> str:
    """What the most similar one differs in: not one that has come meanwhile, which differs in nothing."""
    found = (_read_key(path) for path in sorted(directory.glob("*.bundle")))
    keys = [other for other in found if other and other != key]
    if not keys:
        return f"there is no bundle in {directory}"
    closest = min(keys, key=lambda other: len(_differing(other, key)))
    return f"no bundle in {directory} fits: the closest was made {_difference(closest, key)}"


def _read_key(path: Path) -> dict[str, str] | None:
    """For messages: unchecked, and None where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(len(_MAGIC) + _DIGEST_SIZE)
            length = int.from_bytes(file.read(_LENGTH_SIZE), "little")
            return json.loads(file.read(min(length, path.stat().st_size)))["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _differing(made: Mapping[str, str], key: Mapping[str, str]) -> list[str]:
    return [name for name in {**made, **key} if made.get(name) != key.get(name)]


def _difference(made: Mapping[str, str], key: Mapping[str, str]) -> str:
    """ "for max_num_seqs=8, not 32"; of lists of words, those that are in one alone."""
    texts = []
    for name in _differing(made, key):
        theirs, ours = made.get(name, "nothing"), key.get(name, "nothing")
        if name == "cpu_features":
            theirs, ours = _words_apart(theirs, ours), _words_apart(ours, theirs)
        texts.append(f"{name}={_cut(theirs)}, not {_cut(ours)}")
    return f"for {'; '.join(texts)}"


def _words_apart(text: str, other: str) -> str:
    return " ".join(sorted(set(text.split()) - set(other.split()))) or "fewer"


def _cut(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else repr(text[:_SHOWN] + "...")
