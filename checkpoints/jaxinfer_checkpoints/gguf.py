"""A GGUF file, or several of a split one.

The `gguf` package's own reader takes seconds for a vocabulary of 50,000 tokens, since it keeps an
array for each string; this parser makes plain Python values, in a hundredth of the time. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer_checkpoints.dequantize import BLOCK_FORMATS
from jaxinfer_checkpoints.mapped import MappedFile, MappedReader, StoredTensor, stored_bytes
from jaxinfer_checkpoints.reader import CheckpointError, Problems, TensorInfo

SUPPORTED_TYPES = ("F32", "F16", "BF16", *BLOCK_FORMATS)

# ggml_type in ggml.h. Those that are not supported are here to be refused by name.
_TYPES_FROM_0 = "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K"
_TYPES_FROM_16 = "IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"
_TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    dict(enumerate(f"{_TYPES_FROM_0} {_TYPES_FROM_16}".split()))
    | {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}
)

_STRING, _ARRAY = 8, 9
# gguf_type -> struct code, the two above left out
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """True for a file that begins as GGUF files do."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The metadata alone of one GGUF file, as plain Python values. Raises CheckpointError."""
    return _parse(MappedFile(path)).metadata


def open_gguf(path: Path) -> MappedReader:
    """Opens a GGUF file; any part of a split one opens all of it, with the first one's metadata.

    Raises:
      CheckpointError: not GGUF, cut off within its header, an unsupported version, and together:
        missing parts, unsupported types, misshapen and doubled tensors.
    """
    problems = Problems(path)
    paths = _split_paths(path)
    for missing in (p for p in paths if not p.exists()):
        problems.add(f"{missing.name} of the {len(paths)} files of the split is missing")
    headers = [_parse(MappedFile(p)) for p in paths if p.exists()]
    metadata = headers[0].metadata
    count = metadata.get("split.count", 1)
    if len(paths) != max(count, 1):
        problems.add(f"it is one of {count} files, so it must keep its name, *-00001-of-{count:05}.gguf")
    tensors: dict[str, StoredTensor] = {}
    for tensor in (t for header in headers for t in header.tensors):
        _check_tensor(tensor, problems)
        if tensor.info.name in tensors:
            problems.add("tensors that are there twice", tensor.info.name)
        tensors[tensor.info.name] = tensor
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        problems.add(f"split.tensors.count promises {total} tensors, of which {len(tensors)} were found")
    problems.raise_if_any()
    return MappedReader(path, "gguf", metadata, tensors.values())


def _split_paths(path: Path) -> list[Path]:
    """All the files of the split that `path` is a part of, or `path` alone."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match or not int(match["count"]):
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{no:05}-of-{count:05}.gguf") for no in range(1, count + 1)]


def _check_tensor(tensor: StoredTensor, problems: Problems) -> None:
    info = tensor.info
    if info.dtype not in SUPPORTED_TYPES:
        problems.add(f"unsupported type {info.dtype} (known: {', '.join(SUPPORTED_TYPES)})", info.name)
    elif stored_bytes(info.shape, info.dtype) is None:
        size = BLOCK_FORMATS[info.dtype].block_size
        problems.add(
            f"rows that are not whole {info.dtype} blocks of {size}", f"{info.name} {list(info.shape)}"
        )


@dataclass(frozen=True)
class _Header:
    metadata: dict[str, Any]
    tensors: tuple[StoredTensor, ...]


def _parse(file: MappedFile) -> _Header:
    """Metadata and tensor table of one file."""
    if file.map[:4] != b"GGUF":
        raise CheckpointError(f"{file.path}: not a GGUF file")
    cursor = _Cursor(file)
    try:
        version = cursor.scalar("I")
        if version not in (2, 3):
            # The bytes of a big-endian file's version are in the wrong order.
            what = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise CheckpointError(f"{file.path}: GGUF {what} is not supported: little-endian 2 and 3 are")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        table = [cursor.tensor() for _ in range(num_tensors)]
    except struct.error as error:
        raise CheckpointError(f"{file.path}: truncated within its header, at {file.size} bytes") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file.path}: a text of the metadata is not UTF-8: {error}") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{file.path}: general.alignment is {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    return _Header(metadata, tuple(_stored(info, file, base + offset) for info, offset in table))


def _stored(info: TensorInfo, file: MappedFile, start: int) -> StoredTensor:
    known = info.dtype in SUPPORTED_TYPES
    return StoredTensor(info, file, start, (stored_bytes(info.shape, info.dtype) if known else None) or 0)


class _Cursor:
    """Reads values one after the other from byte 4 on. A value past the end raises struct.error."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self.position = 4

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._file.map, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # A loop of its own, since vocabularies and merges have hundreds of thousands.
        data, position, unpack = self._file.map, self.position, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            (length,) = unpack(data, position)
            position += 8
            out.append(str(data[position : position + length], "utf-8"))
            position += length
        if position > self._file.size:
            raise struct.error("string beyond the end")
        self.position = position
        return out

    def value(self, kind: int) -> Any:
        """One metadata value of gguf_type `kind`; arrays as lists."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            if kind == _STRING:
                return self._strings(count)
            if kind == _ARRAY:
                return [self.value(_ARRAY) for _ in range(count)]
            return self._numbers(kind, count)
        return self.scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._file.path}: unknown metadata type {kind} at byte {self.position}")
        return _SCALARS[kind]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype("<" + self._code(kind))
        if self.position + count * dtype.itemsize > self._file.size:
            raise struct.error("array beyond the end")
        values = np.frombuffer(self._file.map, dtype, count, self.position).tolist()
        self.position += count * dtype.itemsize
        return values

    def tensor(self) -> tuple[TensorInfo, int]:
        """An entry of the tensor table, and its offset in the data."""
        name = self.string()
        dims = [self.scalar("Q") for _ in range(self.scalar("I"))]
        kind, offset = self.scalar("I"), self.scalar("Q")
        # GGUF lists the fastest dimension first.
        return TensorInfo(name, tuple(reversed(dims)), _TYPE_NAMES.get(kind, f"number {kind}")), offset
