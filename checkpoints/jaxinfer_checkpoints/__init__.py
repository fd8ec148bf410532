"""Checkpoints: bytes to named tensors. Knows no models and imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxinfer_checkpoints.digest import fingerprint, verify_sha256
from jaxinfer_checkpoints.gguf import is_gguf, open_gguf, read_gguf_metadata
from jaxinfer_checkpoints.hub import PINNED_SHA256, resolve_config, resolve_model
from jaxinfer_checkpoints.reader import CheckpointError, CheckpointReader, TensorInfo
from jaxinfer_checkpoints.safetensors import open_safetensors, read_json_object

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "TensorInfo",
    "fingerprint",
    "open_checkpoint",
    "read_config",
    "read_gguf_metadata",
    "resolve_config",
    "resolve_model",
]


def open_checkpoint(path: Path, verify: Literal["none", "size", "sha256"] = "size") -> CheckpointReader:
    """Opens a Hugging Face directory (config.json and safetensors) or a GGUF file.

    Args:
      path: the directory or the file.
      verify: "none" trusts the tensor table; "size" checks that every tensor lies within its file
        and overlaps no other; "sha256" reads and checks every byte too, against the SHA256SUMS
        file beside the weights or the digest pinned for the demo model.

    Raises:
      CheckpointError: one line; whatever is wrong with tensors is reported together, by name.
    """
    if path.is_dir():
        reader = open_safetensors(path)
    elif not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    elif is_gguf(path):
        reader = open_gguf(path)
    else:
        raise CheckpointError(
            f"{path}: not a GGUF file; give a .gguf file, or the directory of safetensors files"
        )
    if verify != "none":
        reader.check_extents()
    if verify == "sha256":
        verify_sha256(reader.files, PINNED_SHA256)
    return reader


def read_config(
    path: Path,
) -> tuple[Literal["safetensors", "gguf"], Mapping[str, Any], tuple[TensorInfo, ...]]:
    """A model's configuration without its weights, which need not be there.

    Args:
      path: a directory with a config.json, a config.json by whatever name, or a GGUF file.

    Returns:
      The format, config.json or GGUF metadata, and the tensors that the GGUF header lists.

    Raises:
      CheckpointError: it is none of these, or unreadable.
    """
    if path.is_dir():
        return "safetensors", read_json_object(path / "config.json", f"{path}: has no config.json"), ()
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if not is_gguf(path):
        return "safetensors", read_json_object(path), ()
    reader = open_gguf(path)
    reader.close()
    return "gguf", reader.config, tuple(reader.tensors.values())
