"""What scripts/tune_kernels.py tunes: ops at models' shapes, and the sizes that they may take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer_kernels import AttentionMetadata, KVPages, QueryTiles, kv_pages_shape, paged_attention
from jaxinfer_kernels.specs import ATTENTION_SPECS, AttentionSpec
from jaxinfer_kernels.tpu import attention, grouped_matmul, quantized_matmul

PAGE, SEQUENCES, CONTEXT, CHUNK, TILE = 128, 64, 4096, 512, 128
GROUP = 128  # inputs that share a scale
SPECS = {spec.name: replace(spec, page_size=PAGE) for spec in ATTENTION_SPECS}
# Inputs and outputs of the fused projections, from each model's config.json: qkv, o, gate and up, down.
INT4 = {
    "llama-3.1-8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "qwen3-32b": ((5120, 10240), (8192, 5120), (5120, 51200), (25600, 5120)),
}
# Experts, experts of a token, inputs and outputs: gate and up, down.
EXPERTS = {
    "mixtral-8x7b": ((8, 2, 4096, 28672), (8, 2, 14336, 4096)),
    "qwen3-30b-a3b": ((128, 8, 2048, 1536), (128, 8, 768, 2048)),
}
# What a schedule can rank, and what only a clock can; the defaults come first.
SCHEDULED = {
    "paged_attention_decode": {"unroll": (8, 4, 2)},
    "paged_attention_prefill": {"compute_rows": (512, 256, 1024)},
    "int4_matmul": {"outputs": (512, 256, 1024)},
    "grouped_matmul": {"outputs": (512, 256, 1024)},
}
TIMED = SCHEDULED | {
    "paged_attention_decode": {"unroll": (8, 4), "num_buffers": (3, 4, 6), "sequences": (8, 4, 16)},
    "paged_attention_prefill": {"compute_rows": (512, 256, 1024), "num_buffers": (3, 4, 6)},
}
MODULES: dict[str, ModuleType] = {
    "paged_attention_decode": attention,
    "paged_attention_prefill": attention,
    "int4_matmul": quantized_matmul,
    "grouped_matmul": grouped_matmul,
}
Sizes = dict[str, int]
# Makes an argument of a shape, a dtype and a value, which is ones where it is None.
MakeArray = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One op at one shape of a model, which `number` tells from the model's others."""

    op: str
    model: str
    number: int = 0

    def candidates(self, *, timed: bool) -> list[Sizes]:
        """All combinations that fit the shape."""
        choices = (TIMED if timed else SCHEDULED)[self.op]
        sizes = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
        if self.op == "int4_matmul":
            return [size for size in sizes if INT4[self.model][self.number][1] % size["outputs"] == 0]
        if self.op == "grouped_matmul":
            return [size for size in sizes if EXPERTS[self.model][self.number][3] % size["outputs"] == 0]
        return sizes

    def use(self, sizes: Sizes) -> list[str]:
        """Has the op take these sizes, for all keys; returns the keys that it asks for."""
        asked: list[str] = []

        def tuned(name: str, key: str) -> Sizes:
            if name != self.op:
                return {}
            asked.append(key)
            return sizes

        MODULES[self.op].tuned = tuned  # type: ignore[attr-defined]
        return asked

    def step(self) -> Any:
        """A jitted function that gives something and then what it is to have in place of `in_place`."""
        if self.op == "int4_matmul":
            return jax.jit(lambda *args: (quantized_matmul.in_groups(*args), args[0]))
        if self.op == "grouped_matmul":
            return jax.jit(lambda *args: (grouped_matmul.grouped_matmul(*args), args[0]))
        scale = SPECS[self.model].head_dim ** -0.5
        return jax.jit(partial(paged_attention, scale=scale, backend="tpu"), donate_argnums=3)

    @property
    def in_place(self) -> int:
        """The argument that a launch takes from the one before."""
        return 3 if self.op.startswith("paged_attention") else 0

    def arguments(self, array: MakeArray) -> list[Any]:
        """64 decodes of 4096 tokens, or a chunk of 512 that ends there; the matmuls of such a chunk."""
        if self.op == "int4_matmul":
            inputs, outputs = INT4[self.model][self.number]
            weights, scales = (inputs, outputs), (inputs // GROUP, outputs)
            return [
                array((CHUNK, inputs), jnp.bfloat16),
                array(weights, jnp.int4),
                array(scales, jnp.float32),
            ]
        if self.op == "grouped_matmul":
            experts, each, inputs, outputs = EXPERTS[self.model][self.number]
            sizes = array((experts,), jnp.int32, np.full(experts, CHUNK * each // experts))
            lhs = array((CHUNK * each, inputs), jnp.bfloat16)
            return [lhs, array((experts, outputs, inputs), jnp.bfloat16), sizes]
        return _attention_arguments(SPECS[self.model], self.op.endswith("decode"), array)


def find_cases(ops: list[str], models: list[str]) -> list[Case]:
    """Those of the ops at the models' shapes."""
    cases = []
    for model, op in itertools.product(models, ops):
        shapes = {"int4_matmul": INT4, "grouped_matmul": EXPERTS}.get(op, dict.fromkeys(SPECS, (0,)))
        cases += [Case(op, model, number) for number in range(len(shapes.get(model, ())))]
    return cases


def _attention_arguments(spec: AttentionSpec, decode: bool, array: MakeArray) -> list[Any]:
    width = CONTEXT // PAGE
    sequences, rows = (SEQUENCES, SEQUENCES) if decode else (1, CHUNK)
    num_tiles = SEQUENCES if decode else CHUNK // TILE
    pages = np.tile(1 + np.arange(sequences * width).reshape(sequences, width), (num_tiles // sequences, 1))
    ends = np.full(num_tiles, CONTEXT) if decode else np.arange(CONTEXT - CHUNK, CONTEXT, TILE) + TILE
    starts = ends - rows // num_tiles
    tiles = QueryTiles(*(array(x.shape, jnp.int32, x) for x in (pages, starts, ends)))
    index = array((rows,), jnp.int32, np.arange(rows) + PAGE)
    by_kind = (tiles, None) if decode else (None, tiles)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    shape = kv_pages_shape(sequences * width + 1, PAGE, spec.num_kv_heads, spec.head_dim, "tpu")
    qkv = [array((rows, n, spec.head_dim), jnp.bfloat16) for n in heads]
    return [*qkv, KVPages(array(shape, jnp.bfloat16), None), AttentionMetadata(index, *by_kind)]
