"""The committed block sizes: of ops, shapes and chips that there are, and without effect on results."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer_kernels import paged_attention, tuning
from jaxinfer_kernels.specs import ATTENTION_SPECS, AttentionSpec
from jaxinfer_kernels.tpu import attention
from tests.kernels.attention_cases import make_case

FILES = sorted((Path(tuning.__file__).parent / "data").glob("*.json"))
ENTRIES = [
    (path.stem, op, key, sizes)
    for path in FILES
    for op, table in json.loads(path.read_text(encoding="utf-8")).items()
    for key, sizes in table.items()
]
# Of each op, what may be tuned: the fields of its sizes but for what decides how sums are associated.
BLOCKS = {
    "paged_attention_decode": attention.DecodeBlocks,
    "paged_attention_prefill": attention.PrefillBlocks,
}
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
    names = {field.name for field in fields(BLOCKS[op])} - {"compute_tokens"}
    assert sizes.keys() <= names
    assert all(size > 0 for size in sizes.values())
    shapes = {f"{spec.num_heads}x{spec.num_kv_heads}x{spec.head_dim}" for spec in ATTENTION_SPECS}
    assert key.split()[0] in shapes
    assert tuning._table(chip)[op][key] == sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "sizes"), sorted({(op, tuple(sorted(sizes.items()))) for _, op, _, sizes in ENTRIES})
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
