"""Matmul with quantised weights in XLA.

Dims: M rows, D inputs, F outputs, G inputs of a group.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer_kernels.quantize import quantize


def per_channel(lhs: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
    """lhs [M, D], weights [F, D], scales [F] -> [M, F]. The scale multiplies the output, not the weights."""
    return (_dot(lhs, weights.astype(lhs.dtype), rhs_axis=1) * scales).astype(lhs.dtype)


def in_groups(lhs: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
    """lhs [M, D], weights [D, F], scales [D / G, F] -> [M, F].

    For few rows the scales multiply each group's product, and for more the weights, in lhs' dtype.
    """
    (num_groups, num_outputs), num_rows = scales.shape, lhs.shape[0]
    by_group = weights.reshape(num_groups, -1, num_outputs)
    if few_rows(lhs, weights, scales):
        rows = lhs.reshape(num_rows, num_groups, -1)
        dims = (((2,), (1,)), ((1,), (0,)))
        products = jax.lax.dot_general(
            rows, by_group.astype(lhs.dtype), dims, preferred_element_type=jnp.float32
        )
        return (products * scales[:, None]).sum(0).astype(lhs.dtype)
    wide = (by_group.astype(jnp.float32) * scales[:, None]).astype(lhs.dtype)
    return _dot(lhs, wide.reshape(weights.shape), rhs_axis=0).astype(lhs.dtype)


def few_rows(lhs: jax.Array, weights: jax.Array, scales: jax.Array) -> bool:
    """Whether a product a group is less work than expanding the weights: see `matmul.quantized_matmul`."""
    return lhs.shape[0] <= 16 and weights.shape[0] // scales.shape[0] >= 128


def both_quantized(lhs: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
    """As `per_channel`, with lhs quantised to the weights' dtype by a scale a row, and an exact product."""
    rows, row_scales = quantize(lhs, weights.dtype)
    exact = jnp.int32 if weights.dtype == jnp.int8 else jnp.float32
    product = jax.lax.dot_general(rows, weights, (((1,), (1,)), ((), ())), preferred_element_type=exact)
    return (product.astype(jnp.float32) * row_scales[:, None] * scales).astype(lhs.dtype)


def _dot(lhs: jax.Array, rhs: jax.Array, rhs_axis: int) -> jax.Array:
    dims = (((1,), (rhs_axis,)), ((), ()))
    return jax.lax.dot_general(lhs, rhs, dims, preferred_element_type=jnp.float32)
