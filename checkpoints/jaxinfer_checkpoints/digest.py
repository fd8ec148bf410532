"""SHA-256 of files, against the sums that came with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxinfer_checkpoints.reader import CheckpointError, CheckpointReader

SUMS_FILE = "SHA256SUMS"
MAX_SAMPLES = 1024  # each may be a round trip to a file server


def sha256_of(path: Path) -> str:
    """The file's SHA-256, in lower-case hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(reader: CheckpointReader) -> str:
    """A digest that tells checkpoints apart without reading them: of the configuration, of the tensors'
    names, shapes and types, and of a row from the middle of each, of every nth where they are very many.
    """
    tensors = list(reader.tensors.values())
    table = [(info.name, info.shape, info.dtype) for info in tensors]
    header = json.dumps([dict(reader.config), table], sort_keys=True, default=str)
    digest = hashlib.sha256(header.encode("utf-8", "surrogatepass"))
    for info in tensors[:: 1 + len(tensors) // MAX_SAMPLES]:
        row = tuple(slice(size // 2, size // 2 + 1) for size in info.shape[:-1])
        digest.update(reader.read(info.name, row).tobytes())
    return digest.hexdigest()[:16]


def verify_sha256(files: Sequence[Path], pinned: Mapping[str, str]) -> None:
    """Checks files of one directory against its SHA256SUMS or, without one, pinned digests.

    Args:
      files: all in one directory.
      pinned: file name -> SHA-256, for files that are known without SHA256SUMS.

    Raises:
      CheckpointError: files for which there is nothing to verify against, or that differ; all
        are named.
    """
    directory = files[0].parent
    sums = _read_sums(directory / SUMS_FILE) if (directory / SUMS_FILE).exists() else pinned
    unknown = [f.name for f in files if f.name not in sums]
    if unknown:
        raise CheckpointError(
            f"{directory}: verify=sha256 has nothing to verify {', '.join(unknown)} against: "
            f"put a {SUMS_FILE} file that lists it beside it, or use verify=size"
        )
    different = [f.name for f in files if sha256_of(f) != sums[f.name]]
    if different:
        raise CheckpointError(
            f"{directory}: SHA-256 differs from the expected one, the file is damaged or another: "
            + ", ".join(different)
        )


def _read_sums(path: Path) -> dict[str, str]:
    """File name -> digest, from lines of `digest  name` or `digest *name`, as sha256sum writes."""
    sums = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.strip().partition(" ")
        sums[name.strip().removeprefix("*").removeprefix("./")] = digest.lower()
    return sums
