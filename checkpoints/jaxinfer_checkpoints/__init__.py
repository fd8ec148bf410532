"""Checkpoints: bytes to named tensors. Knows no models and imports no jax."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jaxinfer_checkpoints.digest import verify_sha256
from jaxinfer_checkpoints.gguf import is_gguf, open_gguf, read_gguf_metadata
from jaxinfer_checkpoints.hub import PINNED_SHA256, resolve_model
from jaxinfer_checkpoints.reader import CheckpointError, CheckpointReader, TensorInfo
from jaxinfer_checkpoints.safetensors import open_safetensors

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "TensorInfo",
    "open_checkpoint",
    "read_gguf_metadata",
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
