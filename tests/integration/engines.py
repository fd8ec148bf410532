"""Engines on the tiny committed models, with a tokenizer of bytes, and a loop that runs requests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine import prepare
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.programs import Programs
from jaxinfer.engine.resolve import ResolvedConfig
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


_compile = prepare.compile_engine
_compiled: dict[Any, Programs] = {}


def _compile_once(model: ModelConfig, resolved: ResolvedConfig, meshes: Any, counter: Any) -> Programs:
    """What `prepare` compiles, of which this process has one of each."""
    policy: dict[str, Any] = dict(enable_prefix_caching=True, enable_chunked_prefill=True)
    shapes = (model, resolved.dtype, resolved.cache, replace(resolved.scheduler, **policy))
    key = (repr(shapes), tuple(meshes))
    if key not in _compiled:
        _compiled[key] = _compile(model, resolved, meshes, counter)
    return _compiled[key]


def make_engine(
    tokenizer: Path, model: str = "llama", *, share_programs: bool = True, **changes: object
) -> Engine:
    """Engines of equal shapes compile once in a process, and read what another process has compiled.

    Without `share_programs` an engine reads its own from the persistent cache, as processes do. One with a
    bundle always compiles.
    """
    config = EngineConfig(
        model=str(MODELS / model),
        tokenizer=str(tokenizer),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        page_size=8,
        compilation_cache_dir=os.environ["JAX_COMPILATION_CACHE_DIR"],
        strict_shapes=True,
    ).replace(**changes)
    if config.bundle is not None or not share_programs:
        return Engine(config)
    with mock.patch.object(prepare, "compile_engine", _compile_once):
        return Engine(config)


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
