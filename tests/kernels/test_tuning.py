"""The committed block sizes: of ops, shapes and chips that there are, and without effect on results."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer_kernels import paged_attention, tuning
from jaxinfer_kernels.specs import ATTENTION_SPECS, AttentionSpec
from jaxinfer_kernels.tpu import attention, grouped_matmul, quantized_matmul
from tests.kernels.attention_cases import make_case

FILES = sorted((Path(tuning.__file__).parent / "data").glob("*.json"))
ENTRIES = [
    (path.stem, op, key, sizes)
    for path in FILES
    for op, table in json.loads(path.read_text(encoding="utf-8")).items()
    for key, sizes in table.items()
]
# Of each op, what may be tuned: all sizes but for what decides how sums are associated.
NAMES = {
    "paged_attention_decode": {field.name for field in fields(attention.DecodeBlocks)} - {"compute_tokens"},
    "paged_attention_prefill": {field.name for field in fields(attention.PrefillBlocks)} - {"compute_tokens"},
    "int4_matmul": {"outputs"},
    "grouped_matmul": {"outputs"},
}
ATTENTION = [entry for entry in ENTRIES if entry[1].startswith("paged_attention")]
# What libtpu calls the chips, and what else jax knows them by (jax/_src/tpu_info.py).
KINDS = {
    "tpu_v5_lite": ("TPU v5 lite", "TPU v5e"),
    "tpu_v5": ("TPU v5", "TPU v5p"),
    "tpu_v6_lite": ("TPU v6 lite", "TPU v6e"),
    "tpu7x": ("TPU7x",),
}


def test_there_are_sizes_for_the_chips_and_models_that_were_tuned() -> None:
    assert {path.stem for path in FILES} == KINDS.keys()
    for chip, kinds in KINDS.items():
        assert {tuning.chip_name(kind) for kind in kinds} == {chip}
        keys = {key for name, op, key, _ in ENTRIES if name == chip and op == "paged_attention_decode"}
        assert keys >= {f"{heads}x8x128 bfloat16 page 128 tile 512" for heads in (32, 64)}


@pytest.mark.parametrize(("chip", "op", "key", "sizes"), ENTRIES)
def test_entries_name_what_there_is(chip: str, op: str, key: str, sizes: dict[str, int]) -> None:
    assert sizes.keys() <= NAMES[op]
    assert all(size > 0 for size in sizes.values())
    assert tuning._table(chip)[op][key] == sizes
    shape = key.split()[0]
    if op.startswith("paged_attention"):
        specs = {f"{spec.num_heads}x{spec.num_kv_heads}x{spec.head_dim}" for spec in ATTENTION_SPECS}
        assert shape in specs
    else:
        num_outputs = int(shape.split("x")[-1])
        assert sizes["outputs"] % 128 == 0
        assert num_outputs % sizes["outputs"] == 0


@pytest.mark.parametrize("outputs", [256, 512, 1024])
def test_no_block_of_outputs_changes_a_product(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small integers, whose sums are exact in any order: what is left is which block an output is of."""
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.integers(-8, 8, (40, 256)), jnp.bfloat16)
    weights = jnp.asarray(rng.integers(-8, 8, (256, 2048)), jnp.int4)
    scales = jnp.asarray(2.0 ** rng.integers(-2, 2, (2, 2048)), jnp.float32)
    matrices = jnp.asarray(rng.integers(-8, 8, (3, 2048, 256)), jnp.bfloat16)
    sizes = jnp.asarray([9, 0, 14], jnp.int32)
    asked: dict[str, str] = {}

    def tuned(name: str, key: str) -> dict[str, int]:
        asked[name] = key
        return dict(outputs=outputs)

    def run() -> list[np.ndarray]:
        int4 = quantized_matmul.in_groups(lhs, weights, scales, interpret=True)
        grouped = grouped_matmul.grouped_matmul(lhs, matrices, sizes, interpret=True)
        return [np.asarray(int4), np.asarray(grouped)]

    defaults = run()
    for module in (quantized_matmul, grouped_matmul):
        monkeypatch.setattr(module, "tuned", tuned)
    for got, want in zip(run(), defaults, strict=True):
        np.testing.assert_array_equal(got, want)
    assert asked == {
        "int4_matmul": "256x2048 group 128 bfloat16",
        "grouped_matmul": "3x256x2048 bfloat16 rows 16",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "sizes"), sorted({(op, tuple(sorted(sizes.items()))) for _, op, _, sizes in ATTENTION})
)
def test_no_entry_changes_a_result(
    op: str, sizes: tuple[tuple[str, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = AttentionSpec("plain", 4, 2, 64, page_size=64)
    case = make_case(spec, [70, 0, 300], [(40, 150)], backend="tpu")

    def run() -> list[np.ndarray]:
        step = jax.jit(partial(paged_attention, backend="tpu", interpret=True, **case.options()))
        out, pages = step(case.q, case.k, case.v, case.kv_pages("tpu"), case.metadata)
        return [np.asarray(out)[case.valid], np.asarray(pages.data)]

    defaults = run()
    asked: list[str] = []

    def tuned(name: str, key: str) -> dict[str, Any]:
        asked.append(name)
        return dict(sizes) if name == op else {}

    monkeypatch.setattr(attention, "tuned", tuned)
    for got, want in zip(run(), defaults, strict=True):
        np.testing.assert_array_equal(got, want)
    assert op in asked
