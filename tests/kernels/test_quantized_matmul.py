"""Matmul by quantised weights against the reference, on the same numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer_kernels import quantized_matmul, reference
from jaxinfer_kernels.quantize import quantize_weight


def operands(num_rows: int, num_inputs: int, num_outputs: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    lhs, weight = rng.standard_normal((num_rows, num_inputs)), rng.standard_normal((num_outputs, num_inputs))
    return jnp.asarray(lhs, dtype), jnp.asarray(weight, jnp.float32)


def check(lhs: jax.Array, weights: jax.Array, scales: jax.Array, *, rounded: int = 1, **options: Any) -> None:
    """float32 within 1e-5 of the sum of magnitudes; bfloat16 within `rounded` roundings of it."""
    quantize_lhs = options.get("quantize_lhs", False)
    out = jax.jit(partial(quantized_matmul, **options))(lhs, weights, scales)
    want = reference.quantized_matmul(lhs, weights, scales, quantize_lhs=quantize_lhs)
    magnitude = reference.quantized_matmul(jnp.abs(lhs), jnp.abs(weights.astype(jnp.float32)), scales)
    tolerance = 1e-5 if lhs.dtype == jnp.float32 else rounded * 2**-8
    assert out.dtype == lhs.dtype
    assert (np.abs(np.asarray(out, np.float64) - want) <= tolerance * magnitude).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight_dtype", ["int8", "int4", "float8_e4m3fn"])
def test_a_scale_a_channel(weight_dtype: str, dtype: str) -> None:
    lhs, weight = operands(5, 96, 40, dtype)
    check(lhs, *quantize_weight(weight, weight_dtype))


@pytest.mark.parametrize("weight_dtype", ["int8", "float8_e4m3fn"])
def test_both_quantised(weight_dtype: str) -> None:
    """An exact product of 8-bit numbers: float32's tolerance, whatever the rows were rounded by."""
    lhs, weight = operands(5, 96, 40, "float32")
    lhs = lhs.at[2].set(0)
    check(lhs, *quantize_weight(weight, weight_dtype), quantize_lhs=True)


@pytest.mark.parametrize("num_rows", [3, 20])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("backend", "dtype"), [("xla", "float32"), ("tpu", "float32"), ("tpu", "bfloat16")])
def test_in_groups(backend: str, dtype: str, group_size: int, num_rows: int) -> None:
    """Two blocks of inputs for the kernel, and padded rows. In bfloat16 the weights are rounded too."""
    lhs, weight = operands(num_rows, 2048, 256, dtype)
    weights, scales = quantize_weight(weight, "int4", group_size=group_size)
    check(lhs, weights, scales, rounded=2, backend=backend, interpret=backend == "tpu")


def test_auto_is_xla_on_the_cpu() -> None:
    lhs, weight = operands(20, 512, 128, "float32")
    args = (lhs, *quantize_weight(weight, "int4", group_size=32))
    want = jax.jit(partial(quantized_matmul, backend="xla"))(*args)
    np.testing.assert_array_equal(jax.jit(quantized_matmul)(*args), want)


def test_quantised_weights_are_near() -> None:
    _, weight = operands(1, 256, 24, "float32")
    for largest, dtype, group_size in ((7, "int4", 64), (7, "int4", None), (127, "int8", None)):
        weights, scales = quantize_weight(weight, dtype, group_size=group_size)
        if group_size is None:
            wide, steps = weights.astype(jnp.float32) * scales[:, None], np.asarray(scales)[:, None]
        else:
            steps = np.repeat(scales, group_size, axis=0).T
            wide = weights.astype(jnp.float32).T * steps
        assert (np.abs(wide - weight) <= 0.501 * steps).all()
        assert steps.max() <= float(jnp.abs(weight).max()) / largest * 1.001


LHS, WEIGHT = jnp.zeros((4, 256)), jnp.zeros((128, 256))
CHANNEL = quantize_weight(WEIGHT, "int8")
GROUPS = quantize_weight(WEIGHT, "int4", group_size=64)


@pytest.mark.parametrize(
    ("weights", "scales", "options", "message"),
    [
        (WEIGHT, CHANNEL[1], {}, r"weights \(float32\)"),
        (CHANNEL[0], CHANNEL[1][1:], {}, r"scales\(127,\)"),
        (CHANNEL[0].T, CHANNEL[1], {}, r"weights\(256, 128\) must be \[F, D\]"),
        (GROUPS[0].T, GROUPS[1], {}, r"weights\(128, 256\) must be \[D, F\]"),
        (GROUPS[0], GROUPS[1][1:], {}, r"scales\(3, 128\) must divide the 256 inputs"),
        (GROUPS[0].astype(jnp.int8), GROUPS[1], {}, r"weights \(int8\)"),
        (*GROUPS, dict(quantize_lhs=True), "quantize_lhs=True"),
        (*CHANNEL, dict(backend="tpu"), "backend='tpu'"),
        (*CHANNEL, dict(backend="gpu"), "backend='gpu'"),
        (GROUPS[0][:, :100], GROUPS[1][:, :100], dict(backend="tpu"), "divide into blocks"),
    ],
)
def test_what_does_not_fit_is_named(
    weights: jax.Array, scales: jax.Array, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quantized_matmul(LHS, weights, scales, **options)
    with pytest.raises(ValueError, match="group_size=48"):
        quantize_weight(WEIGHT, "int4", group_size=48)
