"""The public matmuls: arguments checked by name, then the implementation for the platform.

Dims: M rows, D inputs, F outputs, G inputs of a group, E groups of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxinfer_kernels import grouped, quantized
from jaxinfer_kernels.checks import (
    check_backend,
    check_grouped_matmul,
    check_linear,
    check_quantized_matmul,
)
from jaxinfer_kernels.cpu import linear as cpu
from jaxinfer_kernels.layout import Backend

Activation = Literal["silu", "gelu_pytorch_tanh"]
ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}
_BACKENDS: tuple[Backend, ...] = ("tpu", "xla")


def linear(
    weight: jax.Array, x: jax.Array, *, token_major: bool = False, backend: Backend = "xla"
) -> jax.Array:
    """Multiplies weights by feature-major activations.

    Args:
      weight: [F, D] floats.
      x: [D, M] floats.
      token_major: gives the transpose.
      backend: "cpu" is the C++ kernel, for float32, after `cpu.build.load`; "xla" is XLA's product.

    Returns:
      [F, M], or [M, F] with token_major, in float32, in which it is summed.

    Raises:
      ValueError: an argument does not fit or the backend does not support it, by the argument's name.
    """
    check_linear(weight, x, backend)
    if backend == "cpu":
        return cpu.linear(weight, x, token_major=token_major)
    out = jax.lax.dot_general(weight, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return out.T if token_major else out


def gated_linear(
    weight: jax.Array, x: jax.Array, *, activation: Activation, backend: Backend = "xla"
) -> jax.Array:
    """The first half of a gated MLP: activation(gate x) * (up x).

    Args:
      weight: [2F, D] floats, gate above up.
      x: [D, M] floats.
      activation: of the gate, by Hugging Face's name.
      backend: as for `linear`.

    Returns:
      [F, M] float32, in which all is computed.

    Raises:
      ValueError: an argument does not fit or the backend does not support it, by the argument's name.
    """
    check_linear(weight, x, backend)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
    if weight.shape[0] % 2:
        raise ValueError(f"weight{weight.shape} must be [2F, D]")
    if backend == "cpu":
        return cpu.gated_linear(weight, x, activation=activation)
    gate, up = jnp.split(linear(weight, x), 2)
    return ACTIVATIONS[activation](gate) * up


def quantized_matmul(
    lhs: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    *,
    quantize_lhs: bool = False,
    backend: Backend | Literal["auto"] = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Multiplies by quantised weights, as `quantize.quantize_weight` makes them.

    With a scale a channel it is plain XLA everywhere: compiled for v5e, the int8, int4 and float8
    weights become bfloat16 inside the product's own fusion, with no temporaries and in the cycles that
    bfloat16 weights take, and int8 by int8 takes half of them. With scales in groups XLA writes all
    the weights to HBM in bfloat16 first (117 MB for 4096 x 14336, and 879,000 cycles beside the
    487,000 of the product of 512 rows), so that TPUs have a kernel (511,000 in all). Up to 16 rows
    in groups of 128 or more, a sum of each group's scaled product is better: 107,000 cycles for 16
    rows, where the kernel takes 140,000.

    Args:
      lhs: [M, D] floats.
      weights: [F, D] of int8, int4 or float8_e4m3fn with a scale a channel; [D, F] int4 in groups, whose
        scales then lie along the kernel's sublanes.
      scales: [F] float32; or [D / G, F] in groups of G inputs.
      quantize_lhs: quantises lhs to the weights' dtype as well, int8 or float8_e4m3fn, with a scale a
        row from the row itself (w8a8); the product is then of 8-bit numbers.
      backend: "auto" is, for weights in groups on a TPU, its kernel as said above where the shape
        divides into its blocks, and XLA otherwise. "tpu" is the kernel, and refuses other shapes.
      interpret: runs the kernel with backend="tpu" by interpretation on the CPU.

    Returns:
      [M, F] in lhs' dtype, summed in float32 (int32 for int8 by int8).

    Raises:
      ValueError: an argument does not fit or the backend does not support it, by the argument's name.
    """
    check_quantized_matmul(lhs, weights, scales, quantize_lhs=quantize_lhs)
    check_backend("quantized_matmul", _BACKENDS, backend, interpret)
    if scales.ndim == 1:
        if backend == "tpu":
            raise ValueError(f"backend='tpu' has a kernel for weights in groups, not scales{scales.shape}")
        run = quantized.both_quantized if quantize_lhs else quantized.per_channel
        return run(lhs, weights, scales)
    if backend == "tpu":
        return _tpu_in_groups(lhs, weights, scales, interpret=interpret)
    if backend == "xla" or quantized.few_rows(lhs, weights, scales) or not _tpu_fits(weights, scales):
        return quantized.in_groups(lhs, weights, scales)
    return jax.lax.platform_dependent(lhs, weights, scales, tpu=_tpu_in_groups, default=quantized.in_groups)


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    backend: Backend | Literal["auto"] = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Multiplies each group of rows by the group's own matrix: the experts of a mixture.

    XLA has a kernel for lax.ragged_dot on TPUs, before which it transposes all matrices in HBM, at each
    call (a copy of 805 MB for 128 experts of 2048 x 1536); ours takes them as they lie.

    Args:
      lhs: [M, D] rows, those of group 0 first.
      rhs: [E, F, D] matrices, feature-major.
      group_sizes: [E] int32, rows of each group; together at most M. Rows after the last are padding.
      backend: "auto" is the kernel on TPUs where D and F are multiples of 128, and XLA otherwise.
      interpret: runs the kernel with backend="tpu" by interpretation on the CPU.

    Returns:
      [M, F] in lhs' dtype, summed in float32: lhs[i] @ rhs[group of i].T. Padding rows are 0.

    Raises:
      ValueError: an argument does not fit or the backend does not support it, by the argument's name.
    """
    check_grouped_matmul(lhs, rhs, group_sizes)
    check_backend("grouped_matmul", _BACKENDS, backend, interpret)
    if backend == "tpu":
        return _tpu_grouped(lhs, rhs, group_sizes, interpret=interpret)
    if backend == "xla" or rhs.shape[1] % 128 or rhs.shape[2] % 128:
        return _xla_grouped(lhs, rhs, group_sizes)
    return jax.lax.platform_dependent(lhs, rhs, group_sizes, tpu=_tpu_grouped, default=_xla_grouped)


def _xla_grouped(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    on_cpu = partial(grouped.blocked_matmul, tile_bytes=grouped.CPU_TILE_BYTES)
    return jax.lax.platform_dependent(lhs, rhs, group_sizes, cpu=on_cpu, default=grouped.blocked_matmul)


# Importing Pallas takes 0.3 s, so each kernel is imported where it is first used.


def _tpu_in_groups(*args: jax.Array, **options: Any) -> jax.Array:
    from jaxinfer_kernels.tpu.quantized_matmul import in_groups

    return in_groups(*args, **options)


def _tpu_fits(weights: jax.Array, scales: jax.Array) -> bool:
    from jaxinfer_kernels.tpu.quantized_matmul import block_sizes

    num_inputs, num_outputs = weights.shape
    return block_sizes(1, num_inputs, num_outputs, num_inputs // scales.shape[0]) is not None


def _tpu_grouped(*args: jax.Array, **options: Any) -> jax.Array:
    from jaxinfer_kernels.tpu.grouped_matmul import grouped_matmul

    return grouped_matmul(*args, **options)
