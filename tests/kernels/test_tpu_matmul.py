"""The TPU's matmul kernels under the interpreter that simulates copies, which raises for races.

Their blocks come and go through Pallas's own pipeline: they start no copy themselves, so that there is no
wait of theirs to leave out and see caught, as test_tpu_attention.py does. What could race is a block of
outputs that several steps of the grid add to.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels import reference
from jaxinfer_kernels.quantize import quantize_weight
from jaxinfer_kernels.tpu import grouped_matmul, quantized_matmul

SIMULATED = pltpu.InterpretParams(detect_races=True)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape) / 10, jnp.float32)


@pytest.mark.slow
def test_groups_of_int4() -> None:
    """Three blocks of inputs, which add up in one block of outputs."""
    lhs = random(20, 768)
    weights, scales = quantize_weight(random(256, 768), "int4", group_size=32)
    assert quantized_matmul.block_sizes(20, 768, 256, 32) == (32, 256, 256)
    out = jax.jit(lambda *args: quantized_matmul.in_groups(*args, interpret=SIMULATED))(lhs, weights, scales)
    want = reference.quantized_matmul(lhs, weights, scales)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [[9, 0, 14, 3], [0, 0, 0, 1]])
def test_groups_of_rows(sizes: list[int]) -> None:
    """Groups that share a block of rows, an empty one, and rows of none."""
    lhs, rhs = random(40, 384), random(4, 128, 384)
    assert grouped_matmul.block_sizes(40, 4, 384, 128) == (16, 128, 128)
    out = jax.jit(lambda *args: grouped_matmul.grouped_matmul(*args, interpret=SIMULATED))(
        lhs, rhs, jnp.asarray(sizes, jnp.int32)
    )
    want = reference.grouped_matmul(lhs, rhs, np.asarray(sizes))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
