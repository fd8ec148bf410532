"""The arithmetic that the TPU's decode and prefill kernels share: logits, masks, the online softmax.

Dims as in attention_layout.py; c positions of a computed block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxinfer_kernels.layout import first_seen
from jaxinfer_kernels.tpu.attention_layout import LANES

Ref = Any  # a Pallas reference: pl.pallas_call hands it to the kernel
Scalar = jax.Array
# Of rows: the running maximum and total [rows, 128], equal in all lanes, and the sum [rows, lanes].
State = tuple[jax.Array, jax.Array, jax.Array]

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: no row that saw nothing yet turns into NaN
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class AttentionOptions:
    """The options of `api.paged_attention` that a kernel is compiled for."""

    scale: float
    sliding_window: int | None = None
    attention_chunk: int | None = None
    soft_cap: float | None = None

    def first_seen(self, position: Scalar) -> Scalar:
        """The first position that a query at `position` sees."""
        return first_seen(position, self.sliding_window, self.attention_chunk)

    def logits(self, products: jax.Array, key_scales: jax.Array | None) -> jax.Array:
        """q.k as logits to the base 2: exp2 is what the hardware has."""
        if key_scales is not None:
            products = products * key_scales
        if self.soft_cap is None:
            return products * (self.scale * LOG2_E)
        return jnp.tanh(products * (self.scale / self.soft_cap)) * (self.soft_cap * LOG2_E)


def matmul(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """A product with f32 sums; f32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a,
        b,
        (((contracted[0],), (contracted[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def widen(column: jax.Array, lanes: int) -> jax.Array:
    """[rows, 128] of equal lanes -> [rows, lanes]; costs nothing, since registers repeat."""
    if lanes < LANES:
        return column[:, :lanes]
    return jnp.tile(column, (1, lanes // LANES))


def online_softmax(
    logits: jax.Array,
    values: jax.Array,
    value_scales: jax.Array | None,
    state: State,
) -> State:
    """Adds a block of positions (Milakov and Gimelshein, arXiv 1805.02867), to the base 2.

    A block in which a row sees nothing leaves the row's state as it was, bit for bit, or what has no
    weight any more once the row sees something.

    Args:
      logits: [rows, c] f32.
      values: [c, lanes].
      value_scales: [1, c] or None.
      state: of the rows.
    """
    running_max, total, acc = state
    new_max = jnp.maximum(running_max, logits.max(1, keepdims=True))
    weights = jnp.exp2(logits - widen(new_max, logits.shape[1]))
    rescale = jnp.exp2(running_max - new_max)
    total = total * rescale + weights.sum(1, keepdims=True)
    if value_scales is not None:
        weights = weights * value_scales
    weighted = matmul(weights.astype(values.dtype), values, (1, 0))
    return new_max, total, acc * widen(rescale, acc.shape[1]) + weighted


def finish_rows(state: State) -> tuple[jax.Array, jax.Array]:
    """The outputs [rows, lanes], and the log-sum-exps to the base e [rows, 128], equal in all lanes."""
    running_max, total, acc = state
    total = jnp.maximum(total, 1e-30)  # of a row that saw nothing
    return acc / widen(total, acc.shape[1]), (running_max + jnp.log2(total)) * LN_2


def silence_values(kv: Ref, rows: pl.Slice, lanes: slice, used: jax.Array) -> None:
    """Zeroes the values of rows that are not the sequence's: a weight of 0 does not silence a NaN there.

    kv [K, f, W], whose values are in `lanes`; used [rows, lanes].
    """

    def silence(head: Scalar, _: None) -> None:
        values = kv[head, rows, lanes]
        kv[head, rows, lanes] = jnp.where(used, values.astype(jnp.float32), 0.0).astype(values.dtype)

    lax.fori_loop(0, kv.shape[0], silence, None)
