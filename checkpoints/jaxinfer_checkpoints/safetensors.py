"""A Hugging Face directory: config.json and safetensors files, one or in shards.

A safetensors file is a little-endian uint64 n, n bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": ...}`, then the data, from
which the offsets count (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxinfer_checkpoints.mapped import PLAIN_DTYPES, MappedFile, MappedReader, StoredTensor, stored_bytes
from jaxinfer_checkpoints.reader import CheckpointError, Problems, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package


def open_safetensors(path: Path) -> MappedReader:
    """Opens a directory in Hugging Face's layout.

    Raises:
      CheckpointError: no config.json or no weights, files that are not what they should be, and
        together, by name: tensors of missing shards, tensors that the index promises and their
        shard lacks, misshapen ones and unknown dtypes.
    """
    config = read_json_object(path / "config.json", f"{path}: the directory has no config.json")
    if (path / "generation_config.json").exists():
        config["generation_config"] = read_json_object(path / "generation_config.json")
    problems = Problems(path)
    weight_map = {} if (path / SINGLE_FILE).exists() else _read_weight_map(path)
    tensors: dict[str, StoredTensor] = {}
    for file_name in dict.fromkeys(weight_map.values()) or [SINGLE_FILE]:
        promised = [n for n, f in weight_map.items() if f == file_name]
        if not (path / file_name).exists():
            problems.add(f"{file_name} is missing, which holds", *promised)
            continue
        found = _read_header(MappedFile(path / file_name), problems)
        absent = [n for n in promised if n not in found]
        if absent:
            problems.add(f"{file_name} lacks what {INDEX_FILE} says it holds", *absent)
        # A shard's tensors that the index leaves out are listed too: the loader will name them.
        tensors |= {n: t for n, t in found.items() if weight_map.get(n, file_name) == file_name}
    problems.raise_if_any()
    return MappedReader(path, "safetensors", config, tensors.values())


def read_json_object(path: Path, if_missing: str | None = None) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError, with the message `if_missing` where there is no file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(if_missing or f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: should hold a JSON object, not a {type(value).__name__}")
    return value


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index."""
    index = read_json_object(
        path / INDEX_FILE,
        f"{path}: the directory has neither {SINGLE_FILE} nor {INDEX_FILE}; for a GGUF file, name the file",
    )
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX_FILE}: has no weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{path / INDEX_FILE}: {name} is in {file_name!r}, not a file name")
    return weight_map


def _read_header(file: MappedFile, problems: Problems) -> dict[str, StoredTensor]:
    """The tensors that a file's header lists; notes the misshapen and the unknown."""
    size = int.from_bytes(file.map[:8], "little")
    if file.size < 8 or size > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{file.path}: not a safetensors file")
    if 8 + size > file.size:
        raise CheckpointError(f"{file.path}: truncated within its header, at {file.size} of {8 + size} bytes")
    try:
        entries = json.loads(file.map[8 : 8 + size])
        entries.pop("__metadata__", None)
        tensors = {}
        for name, entry in entries.items():
            begin, end = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(dim) for dim in entry["shape"])
            info = TensorInfo(name, shape, entry["dtype"])
            tensors[name] = StoredTensor(info, file, 8 + size + begin, end - begin)
            if begin < 0 or any(dim < 0 for dim in shape):
                raise ValueError(f"{name} has a negative size")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file.path}: the header is not safetensors' JSON: {error!r}") from error
    for name, tensor in tensors.items():
        info = tensor.info
        if info.dtype not in PLAIN_DTYPES:
            problems.add(f"unknown dtype {info.dtype} (known: {', '.join(PLAIN_DTYPES)})", name)
        elif stored_bytes(info.shape, info.dtype) != tensor.num_bytes:
            problems.add(
                f"{file.path.name} has offsets that do not fit the shape",
                f"{name} ({info.dtype} {list(info.shape)} in {tensor.num_bytes} bytes)",
            )
    return tensors
