"""Dequantisation against the gguf package's reference, bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer_checkpoints.dequantize import BLOCK_FORMATS, dequantize

# Bytes at which a block holds float16 numbers (d, m or dmin), by ggml-common.h.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_rows(rng: np.random.Generator, dtype: str, lead: tuple[int, ...], blocks: int) -> np.ndarray:
    """Random blocks, every byte possible, but with finite float16 numbers of either sign."""
    block = BLOCK_FORMATS[dtype]
    rows = rng.integers(0, 256, (*lead, blocks, block.block_bytes), dtype=np.uint8)
    for start in HALVES[dtype]:
        rows[..., start : start + 2] = rng.normal(0, 0.1, (*lead, blocks, 1)).astype("<f2").view(np.uint8)
    return rows.reshape(*lead, -1)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def test_formats_have_the_sizes_that_gguf_gives_them():
    sizes = {name: (f.block_size, f.block_bytes) for name, f in BLOCK_FORMATS.items()}
    assert sizes == {name: gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in HALVES}


@pytest.mark.parametrize("dtype", BLOCK_FORMATS)
@pytest.mark.parametrize("lead", [(1,), (7,), (600,), (3, 5)])
def test_equals_gguf_reference(dtype, lead):
    rows = random_rows(np.random.default_rng(0), dtype, lead, blocks=3)
    expected = gguf.dequantize(rows, GGMLQuantizationType[dtype])
    assert_same_bits(dequantize(rows, dtype), expected)


@pytest.mark.parametrize("dtype", BLOCK_FORMATS)
def test_rows_of_a_view_equal_the_rows_of_the_whole(dtype):
    """Chunks cross rows, and the rows asked for need not be contiguous."""
    block_bytes = BLOCK_FORMATS[dtype].block_bytes
    rows = random_rows(np.random.default_rng(1), dtype, (4, 40), blocks=64)
    whole = dequantize(rows, dtype).reshape(4, 40, 64, -1)
    part = dequantize(rows[1::2, ::3, 5 * block_bytes : 9 * block_bytes], dtype)
    assert_same_bits(part, whole[1::2, ::3, 5:9].reshape(part.shape))


@given(data=st.data(), dtype=st.sampled_from(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]))
def test_weights_quantised_by_gguf_come_back_within_half_a_step(data, dtype):
    seed = data.draw(st.integers(0, 2**32 - 1))
    weights = np.random.default_rng(seed).uniform(-1, 1, (2, 64)).astype(np.float32)
    back = dequantize(gguf.quantize(weights, GGMLQuantizationType[dtype]), dtype)
    bits = int(dtype[1])
    # A step is at most 2 / (2^bits - 2); asymmetric types clip the far end by up to one step.
    np.testing.assert_allclose(back, weights, atol=1.01 * 2 / (2**bits - 2))


def test_results_are_aligned_for_jax_to_adopt():
    for rows in (1, 3, 1000):
        out = dequantize(np.zeros((rows, 3 * 20), np.uint8), "Q4_1")
        assert out.ctypes.data % 64 == 0
        assert out.flags.c_contiguous


def test_no_rows():
    assert dequantize(np.empty((0, 40), np.uint8), "Q4_1").shape == (0, 64)
