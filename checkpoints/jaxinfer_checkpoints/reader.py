"""What every checkpoint format offers: named tensors, read slice by slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

_MAX_NAMES = 50  # names of tensors that a message lists for one problem


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, read or trusted: one line that says what is wrong.

    `problems` maps each thing that is wrong to the names of all the tensors it befalls (none where
    it befalls the checkpoint as a whole); the message shortens long lists.
    """

    def __init__(self, message: str, problems: Mapping[str, tuple[str, ...]] | None = None) -> None:
        super().__init__(message)
        self.problems: Mapping[str, tuple[str, ...]] = MappingProxyType(dict(problems or {}))


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's name in the checkpoint, its shape as Hugging Face has it ([out, in]), its stored type.

    `dtype` is the name that safetensors or GGUF gives it: "F32", "F16", "BF16", "Q4_1" ...
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class CheckpointReader(Protocol):
    """An open checkpoint.

    Attributes:
      path: the directory or the file that was opened.
      format: "safetensors" or "gguf".
      config: config.json, with generation_config.json (where there is one) under the key
        "generation_config"; or GGUF metadata as plain Python values.
      tensors: every tensor by name, in the order of the files.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Reads a tensor, or the part `index` of it, touching only the bytes of that part.

        Returns:
          The stored dtype, as a read-only view of the mapped file, for plain types; a new float32
          array for quantised ones.

        Raises:
          CheckpointError: no such tensor, bytes beyond the end of the file, or a closed reader.
        """
        ...

    def close(self) -> None:
        """Lets go of the files. Arrays already read stay valid."""
        ...


class Problems:
    """Collects what is wrong with a checkpoint, to report all of it at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, list[str]] = {}

    def add(self, reason: str, *names: str) -> None:
        """Notes that `reason` befalls the tensors `names`."""
        self._names.setdefault(reason, []).extend(names)

    def raise_if_any(self) -> None:
        """Raises one CheckpointError with everything noted, if anything was."""
        if not self._names:
            return
        texts = []
        for reason, names in self._names.items():
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            texts.append(reason + (": " if names else "") + ", ".join(names[:_MAX_NAMES]) + more)
        raise CheckpointError(
            f"{self._path}: " + "; ".join(texts), {k: tuple(v) for k, v in self._names.items()}
        )
