"""Small vocabularies and golden files that the tests of jaxinfer.text share."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jaxinfer.text.tokenizer import Tokenizer, tokenizer_from_gguf

GOLDEN = Path(__file__).parents[1] / "golden"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level BPE of 256 bytes, a few merges and some special tokens, as GGUF metadata."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "Ã ©", "ð Ł"]
    added = ["<s>", "</s>", "<|im_end|>", "<tool>", "｜é｜"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), *added]
    types = [NORMAL] * (len(tokens) - len(added)) + [CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**values, **changes}.items()}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A BPE with byte fallback and dummy prefix, trained by SentencePiece, as GGUF metadata."""
    model = golden("text/sentencepiece.json")
    values = {
        "model": "llama",
        "tokens": model["tokens"],
        "scores": model["scores"],
        "token_type": model["token_type"],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**values, **changes}.items()}


@functools.cache
def byte_level() -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata())


@functools.cache
def sentencepiece() -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata())
