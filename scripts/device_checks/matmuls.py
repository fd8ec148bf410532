"""Checks of the matmuls on a device, on some of their results."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from device_checks.check import SAMPLED_ROWS, Check, Outcome, launch_ms, worst
from jaxinfer_kernels import Backend, gated_linear, grouped_matmul, linear, quantized_matmul, reference
from jaxinfer_kernels.quantize import quantize_weight

SAMPLED_OUTPUTS = 64  # of a linear layer, for all its rows


def linear_checks(backends: list[Backend], small: bool) -> list[Check]:
    """Llama-3.1-8B's down projection, and its gate and up, in float32."""
    num_hidden, num_ffn = (256, 512) if small else (4096, 14336)
    return [
        check(rows, *sizes, backend)
        for check, sizes in (
            (linear_check, (num_ffn, num_hidden)),
            (gated_linear_check, (num_hidden, num_ffn)),
        )
        for rows in ((4, 40) if small else (1, 32, 256))
        for backend in backends
    ]


def linear_check(num_rows: int, num_inputs: int, num_outputs: int, backend: Backend) -> Check:
    def run() -> Outcome:
        weight, x = random_layer(num_outputs, num_inputs, num_rows)
        multiply = jax.jit(partial(linear, backend=backend))
        outputs = np.unique(np.linspace(0, num_outputs - 1, SAMPLED_OUTPUTS).astype(int))
        want, off = exact_product(weight[outputs], x)
        error, bound = worst(multiply(weight, x)[outputs], want, off)
        ms = launch_ms(lambda _: multiply(weight, x), None)
        num_bytes = 4 * (weight.size + x.size + num_outputs * num_rows)
        return Outcome(error, bound, ms, num_bytes, 2 * num_rows * num_inputs * num_outputs)

    return Check("linear", f"{num_rows}x{num_inputs}x{num_outputs}", "float32", backend, run)


def gated_linear_check(num_rows: int, num_inputs: int, num_outputs: int, backend: Backend) -> Check:
    def run() -> Outcome:
        weight, x = random_layer(2 * num_outputs, num_inputs, num_rows)
        multiply = jax.jit(partial(gated_linear, activation="silu", backend=backend))
        outputs = np.unique(np.linspace(0, num_outputs - 1, SAMPLED_OUTPUTS).astype(int))
        gate, gate_off = exact_product(weight[outputs], x)
        up, up_off = exact_product(weight[num_outputs + outputs], x)
        activated = gate / (1 + np.exp(-gate))
        # silu's slope is at most 1.1. It is off itself by some units in the last place.
        off = (1.1 * gate_off + 1e-6 * np.maximum(np.abs(gate), 1)) * (np.abs(up) + up_off)
        off += np.abs(activated) * up_off
        error, bound = worst(multiply(weight, x)[outputs], activated * up, off)
        ms = launch_ms(lambda _: multiply(weight, x), None)
        num_bytes = 4 * (weight.size + x.size + num_outputs * num_rows)
        return Outcome(error, bound, ms, num_bytes, 4 * num_rows * num_inputs * num_outputs)

    return Check("gated_linear", f"{num_rows}x{num_inputs}x{num_outputs}", "float32", backend, run)


def random_layer(num_outputs: int, num_inputs: int, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Weights and feature-major activations whose products are near 1."""
    keys = jax.random.split(jax.random.key(0))
    weight = jax.random.normal(keys[0], (num_outputs, num_inputs)) / num_inputs**0.5
    return weight, jax.random.normal(keys[1], (num_inputs, num_rows))


def exact_product(weight: jax.Array, x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and how far off it a sum in float32 may be."""
    wide = [np.asarray(array, np.float64) for array in (weight, x)]
    return wide[0] @ wide[1], 1e-5 * (np.abs(wide[0]) @ np.abs(wide[1]))


def matmul_checks(dtype: str, small: bool) -> list[Check]:
    """Llama-3.1-8B's gate by quantised weights; Mixtral's and Qwen3-30B-A3B's experts."""
    num_inputs, num_outputs = (512, 256) if small else (4096, 14336)
    formats = [
        ("int8", None, False),
        ("int4", None, False),
        ("float8_e4m3fn", None, False),
        ("int8", None, True),
        ("float8_e4m3fn", None, True),
        ("int4", 128, False),
        ("int4", 32, False),
    ]
    checks = [
        quantized_check(rows, num_inputs, num_outputs, dtype, *form)
        for form in formats
        for rows in ((16,) if small else (16, 512))
    ]
    experts = (
        [(40, 6, 128, 256)]
        if small
        else [(1024, 8, 4096, 14336), (4096, 128, 2048, 768), (128, 128, 2048, 768)]
    )
    return checks + [grouped_check(*sizes, dtype) for sizes in experts]


def quantized_check(
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    dtype: str,
    weight_dtype: str,
    group_size: int | None,
    quantize_lhs: bool,
) -> Check:
    def run() -> Outcome:
        keys = jax.random.split(jax.random.key(0))
        lhs = jax.random.normal(keys[0], (num_rows, num_inputs), dtype)
        weight = jax.random.normal(keys[1], (num_outputs, num_inputs))
        weights, scales = jax.jit(
            lambda w: quantize_weight(w, weight_dtype, group_size=group_size)  # type: ignore[arg-type]
        )(weight)
        multiply = jax.jit(partial(quantized_matmul, quantize_lhs=quantize_lhs))
        rows = np.unique(np.linspace(0, num_rows - 1, SAMPLED_ROWS).astype(int))
        wide = weights.astype(jnp.float32)
        want = reference.quantized_matmul(lhs[rows], weights, scales, quantize_lhs=quantize_lhs)
        magnitude = reference.quantized_matmul(jnp.abs(lhs[rows]), jnp.abs(wide), scales)
        # See tests/kernels/test_quantized_matmul.py: in groups, the weights are rounded too.
        rounding = 1e-5 if dtype == "float32" else (1 if group_size is None else 2) * 2**-8
        error, bound = worst(multiply(lhs, weights, scales)[rows], want, rounding * magnitude)
        ms = launch_ms(lambda _: multiply(lhs, weights, scales), None)
        bits = 4 if weight_dtype == "int4" else 8
        num_bytes = (
            weights.size * bits // 8 + scales.size * 4 + lhs.nbytes + num_rows * num_outputs * lhs.itemsize
        )
        rate = {"int8": "int8", "float8_e4m3fn": "fp8"}[weight_dtype] if quantize_lhs else "bf16"
        return Outcome(error, bound, ms, num_bytes, 2 * num_rows * num_inputs * num_outputs, rate)

    name = (
        weight_dtype + (f" groups of {group_size}" if group_size else "") + (" w8a8" if quantize_lhs else "")
    )
    shape = f"{num_rows}x{num_inputs}x{num_outputs}"
    return Check("quantized_matmul", shape, f"{dtype}/{name}", "auto", run)  # type: ignore[arg-type]


def grouped_check(num_rows: int, num_groups: int, num_inputs: int, num_outputs: int, dtype: str) -> Check:
    def run() -> Outcome:
        keys = jax.random.split(jax.random.key(0))
        lhs = jax.random.normal(keys[0], (num_rows, num_inputs), dtype)
        rhs = jax.random.normal(keys[1], (num_groups, num_outputs, num_inputs), dtype) / num_inputs**0.5
        group_of = np.sort(np.random.default_rng(0).integers(0, num_groups, num_rows))
        sizes = np.bincount(group_of, minlength=num_groups).astype(np.int32)
        multiply = jax.jit(grouped_matmul)
        rows = np.unique(np.linspace(0, num_rows - 1, SAMPLED_ROWS).astype(int))
        groups, counts = np.unique(group_of[rows], return_counts=True)
        want, magnitude = (
            reference.grouped_matmul(
                *(jnp.asarray(f(x), jnp.float32) for x in (lhs[rows], rhs[groups])), counts
            )
            for f in (jnp.asarray, jnp.abs)
        )
        rounding = 1e-5 if dtype == "float32" else 2**-8
        error, bound = worst(multiply(lhs, rhs, jnp.asarray(sizes))[rows], want, rounding * magnitude)
        ms = launch_ms(lambda _: multiply(lhs, rhs, jnp.asarray(sizes)), None)
        used = int(np.count_nonzero(sizes)) * num_inputs * num_outputs
        num_bytes = lhs.itemsize * (used + num_rows * (num_inputs + num_outputs))
        return Outcome(error, bound, ms, num_bytes, 2 * num_rows * num_inputs * num_outputs)

    shape = f"{num_rows}x{num_groups}x{num_inputs}x{num_outputs}"
    return Check("grouped_matmul", shape, dtype, "auto", run)  # type: ignore[arg-type]
