"""Tensors in memory-mapped files: what the readers of safetensors and GGUF share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxinfer_checkpoints.dequantize import BLOCK_FORMATS, dequantize
from jaxinfer_checkpoints.reader import CheckpointError, Problems, TensorInfo

PLAIN_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "I64": np.dtype("<i8"),
        "I32": np.dtype("<i4"),
        "I16": np.dtype("<i2"),
        "I8": np.dtype("i1"),
        "U64": np.dtype("<u8"),
        "U32": np.dtype("<u4"),
        "U16": np.dtype("<u2"),
        "U8": np.dtype("u1"),
        "BOOL": np.dtype("?"),
    }
)

# Mapped pages count as the process's memory until they are dropped: drop them after so many bytes.
_RESIDENT_BYTES = 64 << 20


class MappedFile:
    """A file mapped for reading."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, with the reason, for a file that cannot be read or is empty."""
        self.path = path
        try:
            self.size = path.stat().st_size
            if not self.size:
                raise CheckpointError(f"{path}: the file is empty")
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        self._touched = 0

    def view(self, start: int, num_bytes: int) -> np.ndarray:
        """Bytes [start, start + num_bytes) as uint8, not copied."""
        return np.frombuffer(self.map, np.uint8, num_bytes, start)

    def touch(self, num_bytes: int) -> None:
        """Counts bytes about to be read, and drops the pages of earlier reads now and then.

        Arrays that still look at dropped pages read them again from the system's page cache.
        """
        self._touched += num_bytes
        if self._touched > _RESIDENT_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)
            self._touched = num_bytes


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the bytes [start, start + num_bytes) of its file."""

    info: TensorInfo
    file: MappedFile
    start: int
    num_bytes: int


def stored_bytes(shape: tuple[int, ...], dtype: str) -> int | None:
    """Bytes of a tensor, or None where its rows are not whole blocks. KeyError: unknown dtype."""
    if dtype in PLAIN_DTYPES:
        return math.prod(shape) * PLAIN_DTYPES[dtype].itemsize
    block = BLOCK_FORMATS[dtype]
    if not shape or shape[-1] % block.block_size:
        return None
    return math.prod(shape) // block.block_size * block.block_bytes


def check_extents(tensors: Iterable[StoredTensor], problems: Problems) -> None:
    """Notes the tensors that lie beyond the end of their file, and those that overlap another."""
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file.path, []).append(tensor)
    for stored in by_file.values():
        file = stored[0].file
        needed = max(t.start + t.num_bytes for t in stored)
        beyond = [t.info.name for t in stored if t.start + t.num_bytes > file.size]
        if beyond:
            problems.add(
                f"{file.path.name} is truncated, it has {file.size} bytes of at least {needed}, which cuts",
                *beyond,
            )
        last: StoredTensor | None = None  # the one that reaches furthest so far
        for tensor in sorted((t for t in stored if t.num_bytes), key=lambda t: t.start):
            if last is not None and tensor.start < last.start + last.num_bytes:
                problems.add(f"tensors overlap in {file.path.name}", last.info.name, tensor.info.name)
            if last is None or tensor.start + tensor.num_bytes > last.start + last.num_bytes:
                last = tensor


class MappedReader:
    """The CheckpointReader of every format whose tensors lie as they are in files."""

    def __init__(
        self,
        path: Path,
        format: Literal["safetensors", "gguf"],
        config: Mapping[str, Any],
        tensors: Iterable[StoredTensor],
    ) -> None:
        self.path: Path = path
        self.format: Literal["safetensors", "gguf"] = format
        self.config: Mapping[str, Any] = config
        self._stored = {t.info.name: t for t in tensors}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {n: t.info for n, t in self._stored.items()}
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold tensors."""
        return tuple(dict.fromkeys(t.file.path for t in self._stored.values()))

    def check_extents(self) -> None:
        """Raises CheckpointError, naming every tensor cut off or overlapping another."""
        problems = Problems(self.path)
        check_extents(self._stored.values(), problems)
        problems.raise_if_any()

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """See `CheckpointReader.read`."""
        if name not in self._stored:
            known = "it is closed" if not self._stored else f"no tensor {name!r}"
            raise CheckpointError(f"{self.path}: {known}")
        stored = self._stored[name]
        info, end = stored.info, stored.start + stored.num_bytes
        if end > stored.file.size:
            raise CheckpointError(f"{self.path}: truncated: {name} ends at byte {end} of {stored.file.size}")
        if index is not None and len(index) > len(info.shape):
            raise CheckpointError(f"{self.path}: {name} {list(info.shape)} has no part {index}")
        data = stored.file.view(stored.start, stored.num_bytes)
        if info.dtype in PLAIN_DTYPES:
            part = data.view(PLAIN_DTYPES[info.dtype]).reshape(info.shape)[(*(index or ()), ...)]
            stored.file.touch(part.nbytes)
            return part
        rows, columns = _select_blocks(data, info, index or ())
        stored.file.touch(rows.size)
        return dequantize(rows, info.dtype)[..., columns]

    def close(self) -> None:
        """See `CheckpointReader.close`."""
        self._stored = {}


def _select_blocks(data: np.ndarray, info: TensorInfo, index: tuple[slice, ...]) -> tuple[np.ndarray, slice]:
    """The blocks that hold `index` of a quantised tensor: uint8 [..., bytes], and where to cut them."""
    block = BLOCK_FORMATS[info.dtype]
    rows = data.reshape(*info.shape[:-1], info.shape[-1] // block.block_size * block.block_bytes)
    if len(index) < len(info.shape):
        return rows[index], slice(None)
    start, stop, step = index[-1].indices(info.shape[-1])
    if step != 1:
        return rows[index[:-1]], index[-1]
    first, end = start // block.block_size, -(-max(start, stop) // block.block_size)
    part = (*index[:-1], slice(first * block.block_bytes, end * block.block_bytes))
    skipped = first * block.block_size
    return rows[part], slice(start - skipped, max(start, stop) - skipped)
