"""Engines on the tiny committed models, with a tokenizer of bytes, and a loop that runs requests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.types import Request, SamplingParams, TokenOutput

MODELS = Path(__file__).parents[1] / "golden" / "models"


def write_byte_tokenizer(directory: Path) -> Path:
    """A tokenizer.json with a token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    path = directory / "tokenizer.json"
    backend.save(str(path))
    return path


def make_engine(tokenizer: Path, model: str = "llama", **changes: object) -> Engine:
    """Engines of equal shapes compile once a session."""
    config = EngineConfig(
        model=str(MODELS / model),
        tokenizer=str(tokenizer),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        page_size=8,
        compilation_cache_dir=os.environ["JAX_COMPILATION_CACHE_DIR"],
        strict_shapes=True,
    )
    return Engine(config.replace(**changes))


def run(
    engine: Engine,
    requests: Mapping[str, tuple[Sequence[int], SamplingParams]],
    before_step: Callable[[int], None] = lambda step: None,
) -> dict[str, list[TokenOutput]]:
    """Runs requests to their end; their outputs by request, and for n > 1 by "id/index"."""
    outputs: dict[str, list[TokenOutput]] = {}
    for request_id, (prompt, params) in requests.items():
        engine.add_request(Request(request_id, tuple(prompt), params, time.monotonic()))
    step = 0
    while engine.has_unfinished():
        before_step(step)
        for output in engine.step():
            key = f"{output.request_id}/{output.index}" if output.index else output.request_id
            outputs.setdefault(key, []).append(output)
        step += 1
    return outputs


def tokens(outputs: Sequence[TokenOutput]) -> list[int]:
    return [i for output in outputs for i in output.token_ids]
