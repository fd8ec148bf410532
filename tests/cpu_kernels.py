"""The C++ kernels for tests that call them: compiled once, where the commands keep them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxinfer_kernels.cpu import CompilerError, load


def kept_files() -> Path:
    """What is kept from one run to the next."""
    return Path(os.environ.get("JAXINFER_CACHE_DIR") or Path.home() / ".cache" / "jaxinfer")


def load_cpu_kernels() -> None:
    """Skips the test where they cannot be compiled."""
    try:
        load(kept_files() / "kernels")
    except CompilerError as error:
        pytest.skip(f"the C++ kernels are not there: {error}")
