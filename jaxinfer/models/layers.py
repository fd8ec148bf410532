"""Norm, rotary embedding, linear and embedding: the pieces that the decoder is made of.

Dims: T tokens of this step, N heads, H head_dim. Weights are [out, in], as Hugging Face stores them;
activations are feature-major, [features, T] (transformer.py says why).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxinfer.config import RopeConfig
from jaxinfer_kernels import Backend, add_rms_norm, linear, rms_norm


def unfuse(x: jax.Array, sizes: tuple[int, ...], num_blocks: int) -> list[jax.Array]:
    """The parts of a fused product, whose leading dimension is `num_blocks` blocks with a slice of each part.

    Args:
      x: [sum of sizes, ...].
      sizes: of the parts; each is a multiple of num_blocks.
      num_blocks: devices that the rows are divided among, a block each (parallel/layout.py).
    """
    blocks = x.reshape(num_blocks, -1, *x.shape[1:])
    ends = np.cumsum(sizes)[:-1] // num_blocks
    return [part.reshape(-1, *x.shape[1:]) for part in jnp.split(blocks, ends, axis=1)]


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap), or x where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rope_inv_freq(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angles per position, float32 [H / 2], with the scaling applied.

    Formulas: Su et al. 2021 (RoFormer); linear: Chen et al. 2023; yarn: Peng et al. 2023;
    llama3: Meta's reference code. They agree with transformers' modeling_rope_utils.
    """
    inv_freq = rope.rope_theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.freq_factors:
        inv_freq = inv_freq / np.asarray(rope.freq_factors, np.float64)
    if rope.rope_type == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.rope_type == "llama3":
        inv_freq = _llama3_inv_freq(rope, inv_freq)
    elif rope.rope_type == "yarn":
        inv_freq = _yarn_inv_freq(rope, inv_freq, head_dim)
    return inv_freq.astype(np.float32)


def _llama3_inv_freq(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Long wavelengths are divided by factor, short ones kept, those between blended."""
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / rope.factor)


def _yarn_inv_freq(rope: RopeConfig, inv_freq: np.ndarray, head_dim: int) -> np.ndarray:
    """Dimensions that turn less than beta_slow times are divided by factor, over beta_fast kept."""

    def dimension_of(turns: float) -> float:
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # The 0.001 keeps an empty range from dividing by zero, as the reference code does.
    ramp = (np.arange(head_dim // 2) - low) / ((high - low) or 0.001)
    keep = 1 - np.clip(ramp, 0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / rope.factor)


def rope_table(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position's angles, float32 [H / 2, T] each."""
    angles = rope_inv_freq(rope, head_dim)[:, None] * positions.astype(jnp.float32)[None, :]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


class Linear(nnx.Module):
    """weight [out, in] and perhaps a bias [out]."""

    def __init__(
        self, num_in: int, num_out: int, dtype: DTypeLike, use_bias: bool = False, backend: Backend = "xla"
    ) -> None:
        self.backend: Backend = backend
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[in, T] -> [out, T] in x's dtype; summed in float32."""
        out = linear(self.weight[...], x, backend=self.backend)
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)[:, None]
        return out.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Over `axis`; weight [dim], kept in float32: it is small, and 1 + w is not exact in bfloat16."""

    def __init__(self, dim: int, eps: float, axis: int = 0, backend: Backend = "xla") -> None:
        self.eps = eps
        self.axis = axis
        self.backend: Backend = backend
        self.weight = nnx.Param(jnp.ones((dim,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], eps=self.eps, axis=self.axis)

    def add(self, x: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x, delta [dim, T] -> x + delta, and its norm."""
        return add_rms_norm(x, delta, self.weight[...], eps=self.eps, backend=self.backend)


class Embedding(nnx.Module):
    """weight [V, D]; also the head where embeddings are tied."""

    def __init__(self, vocab_size: int, dim: int, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, dim), dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """[T] -> [T, D]."""
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")
