"""What the engines' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.engines import MODELS, write_byte_tokenizer
from tests.integration.processes import TINY_FLAGS


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json with a token a byte."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tiny(tokenizer: Path) -> tuple[str, ...]:
    """The flags of a model that starts quickly, in the shapes of `make_engine`. A space is no token of it."""
    return (f"--model={MODELS / 'llama'}", f"--tokenizer={tokenizer}", *TINY_FLAGS)
