"""Grouped matmul against the reference: each implementation, whatever the groups' sizes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer_kernels import grouped, grouped_matmul, reference

M, E, D, F = 40, 6, 128, 128


def operands(seed: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """A tenth of normal numbers, for sums near 1."""
    rng = np.random.default_rng(seed)
    lhs, rhs = rng.standard_normal((M, D)), rng.standard_normal((E, F, D)) / 10
    return jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype)


jitted = {
    "auto": jax.jit(grouped_matmul),
    "xla": jax.jit(partial(grouped_matmul, backend="xla")),
    "tpu": jax.jit(partial(grouped_matmul, backend="tpu", interpret=True)),
    "tiled": jax.jit(partial(grouped.blocked_matmul, tile_bytes=4 * D * 5)),  # 5 outputs fit, 4 divide 128
}


@pytest.mark.parametrize("name", jitted)
@given(st.lists(st.integers(0, E), max_size=M), st.integers(0, 99))
@settings(max_examples=20)
@example([2] * M, 1)
@example([0] * 3 + [5] * (M - 3), 2)
@example([0] * 8 + [1] * 8 + [2] * 8 + [3] * 8 + [4] * 8, 3)
def test_equals_reference(name: str, groups: list[int], seed: int) -> None:
    """The group of each row, E for those that are padding."""
    sizes = np.bincount(np.asarray(groups, int), minlength=E + 1)[:E]
    lhs, rhs = operands(seed)
    want = reference.grouped_matmul(lhs, rhs, sizes)
    lhs = lhs.at[sizes.sum() :].set(jnp.nan)
    out = jitted[name](lhs, rhs, jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_sums_in_float32(name: str) -> None:
    """bfloat16 operands are exact in float32, so only the output is rounded, by half a unit."""
    lhs, rhs = operands(4, "bfloat16")
    sizes = jnp.asarray([3, 0, 20, 7, 1, 9], jnp.int32)
    want = reference.grouped_matmul(lhs, rhs, sizes)
    out = np.asarray(jitted[name](lhs, rhs, sizes), np.float64)
    assert (np.abs(out - want) <= np.abs(want) * 2**-8 + 1e-5).all()


@pytest.mark.parametrize(
    ("rows", "groups", "block"), [(8, 128, 1), (4096, 128, 32), (1024, 8, 128), (16, 8, 1), (17, 8, 8)]
)
def test_blocks_are_about_a_group(rows: int, groups: int, block: int) -> None:
    assert grouped.block_rows(rows, groups) == block


def test_tiles_are_whole() -> None:
    assert [grouped.tile_outputs(768, most) for most in (1000, 767, 128, 100, 0)] == [768, 384, 128, 96, 1]
    assert grouped.tile_outputs(13, 12) == 1


def test_what_does_not_fit_is_named() -> None:
    lhs, rhs = operands(0)
    sizes = jnp.zeros(E, jnp.int32)
    with pytest.raises(ValueError, match=r"rhs\(6, 128, 127\)"):
        grouped_matmul(lhs, rhs[..., 1:], sizes)
    with pytest.raises(ValueError, match="one float dtype"):
        grouped_matmul(lhs.astype(jnp.bfloat16), rhs, sizes)
    with pytest.raises(ValueError, match=r"rhs\(6, 127, 128\) must have multiples of 128"):
        grouped_matmul(lhs, rhs[:, 1:], sizes, backend="tpu", interpret=True)
    with pytest.raises(ValueError, match="backend='gpu'"):
        grouped_matmul(lhs, rhs, sizes, backend="gpu")
    with pytest.raises(ValueError, match=r"group_sizes\(5,\)"):
        grouped_matmul(lhs, rhs, sizes[1:])
