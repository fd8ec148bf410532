"""The TPU's attention kernels under the interpreter that simulates copies and semaphores, on small shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels import KVPages, reference
from jaxinfer_kernels.layout import pack_kv_pages, unpack_kv_pages
from jaxinfer_kernels.specs import AttentionSpec
from jaxinfer_kernels.tpu import attention, attention_body, attention_prefill_body
from jaxinfer_kernels.tpu.attention import TILE_ROWS
from tests.kernels.attention_cases import Case, make_case

SPEC = AttentionSpec("small", 2, 1, 64, page_size=64)
# Sequences and tiles that share a group of rows, whole groups, blocks ahead of the sequence in use.
DECODES = [70, 0, 1, 140]
PREFILLS = [(0, 26), (37, 11), (130, 3)]


def simulate(case: Case, **params: Any) -> tuple[jax.Array, KVPages]:
    """A step as the simulated TPU takes it; raises where copies race with what needs them."""
    out, _, pages = jax.jit(
        lambda *args: attention.paged_attention(
            *args,
            **case.options(),
            return_lse=False,
            interpret=pltpu.InterpretParams(detect_races=True, **params),
        )
    )(case.q, case.k, case.v, case.kv_pages("tpu"), case.metadata, case.sinks)
    return jax.block_until_ready((out, pages))


def small_case(kv_dtype: str = "float32", **changes: Any) -> Case:
    """Tiles of 16 rows, which are quicker to simulate than those of 128."""
    return make_case(
        replace(SPEC, **changes), DECODES, PREFILLS, kv_dtype=kv_dtype, backend="tpu", tile=TILE_ROWS
    )


def expect(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The reference's outputs, and the numbers in all pages but the null page."""
    pages = pack_kv_pages(case.numbers, case.scales)
    out, _, numbers, _ = reference.paged_attention(
        case.q, case.k, case.v, pages, case.metadata, sinks=case.sinks, **case.options()
    )
    return out, numbers[1:]


def numbers_of(case: Case, pages: KVPages) -> np.ndarray:
    numbers = unpack_kv_pages(pages, case.spec.num_kv_heads, case.spec.head_dim, "tpu")
    return np.asarray(numbers, np.float64)[1:]


@pytest.mark.parametrize(
    ("kv_dtype", "changes", "copies"),
    [
        ("float32", {}, "on_wait"),
        ("bfloat16", dict(sliding_window=50, sinks=True, page_size=128), "eager"),
        pytest.param("int8", dict(page_size=16), "on_wait", marks=pytest.mark.slow),
        pytest.param("int8", dict(page_size=32), "eager", marks=pytest.mark.slow),
        pytest.param("float32", dict(attention_chunk=24, num_kv_heads=2), "on_wait", marks=pytest.mark.slow),
        pytest.param("float32", dict(attention_chunk=24, num_kv_heads=2), "eager", marks=pytest.mark.slow),
    ],
)
def test_no_races(kv_dtype: str, changes: dict[str, Any], copies: str) -> None:
    """Copies that happen at once, or not before somebody waits for them."""
    case = small_case(kv_dtype, **changes)
    out, pages = simulate(case, dma_execution_mode=copies)
    want, want_numbers = expect(case)
    np.testing.assert_allclose(np.asarray(out)[case.valid], want[case.valid], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(numbers_of(case, pages), want_numbers)


def nothing(*_: Any) -> None:
    """In the place of a wait."""


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10's interpreter does not raise for a race")
@pytest.mark.parametrize(("decodes", "prefills"), [(DECODES, []), ([], PREFILLS)])
def test_a_fetch_that_nobody_waits_for_is_caught(
    monkeypatch: pytest.MonkeyPatch, decodes: list[int], prefills: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(attention_body, "wait_pages", nothing)
    case = make_case(SPEC, decodes, prefills, backend="tpu", tile=TILE_ROWS)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Rr]ace"):
            simulate(case, dma_execution_mode="eager")
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_a_write_that_nobody_waits_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not happened when attention reads the page, and never does."""
    monkeypatch.setattr(attention_prefill_body.PrefillBody, "wait_writes", nothing)
    case = small_case()
    try:
        _, pages = simulate(case, dma_execution_mode="on_wait")
        with pytest.raises(AssertionError):
            np.testing.assert_array_equal(numbers_of(case, pages), expect(case)[1])
    finally:
        pltpu.reset_tpu_interpret_mode_state()
