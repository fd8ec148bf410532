"""Norm and rotary embedding, XLA's and the C++ kernels, against their formulas in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxinfer_kernels import Backend, add_rms_norm, rotate_qkv
from tests.cpu_kernels import load_cpu_kernels

UNIT_ROUNDOFF = 2.0**-24
EPS = 1e-5


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_cpu_kernels()


def draw(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def norm(x: np.ndarray, delta: np.ndarray, weight: np.ndarray, backend: Backend) -> list[np.ndarray]:
    total, normed = add_rms_norm(*map(jnp.asarray, (x, delta, weight)), eps=EPS, backend=backend)
    return [np.asarray(total), np.asarray(normed)]


@given(st.integers(1, 150), st.integers(1, 140), st.integers(0, 2**32 - 1))
@example(576, 1, 0)
@example(64, 16, 0)  # one vector of columns
@example(64, 64, 0)  # as many as a pass takes
@example(64, 67, 0)
def test_add_rms_norm(num_features: int, num_tokens: int, seed: int) -> None:
    check_add_rms_norm("cpu", num_features, num_tokens, seed)


@pytest.mark.parametrize(("num_features", "num_tokens"), [(576, 1), (61, 37)])
def test_add_rms_norm_by_xla(num_features: int, num_tokens: int) -> None:
    check_add_rms_norm("xla", num_features, num_tokens, 0)


def check_add_rms_norm(backend: Backend, num_features: int, num_tokens: int, seed: int) -> None:
    x, delta, weight = draw(seed, (num_features, num_tokens), (num_features, num_tokens), (num_features,))
    total, normed = norm(x, delta, weight, backend)
    np.testing.assert_array_equal(total, x + delta)
    exact = total.astype(np.float64)
    exact *= weight[:, None] / np.sqrt((exact**2).mean(0) + EPS)
    # The sum of D squares is off by D roundings at most (Higham 2002, 3.5), of which the root halves the
    # effect; 8 more for all else, of which XLA's own root takes some.
    assert (np.abs(normed - exact) <= (num_features / 2 + 8) * UNIT_ROUNDOFF * np.abs(exact)).all()


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, and where they are NaN."""
    x, delta, weight = draw(0, (576, 70), (576, 70), (576,))
    x[:, 1::2] = np.nan
    for alone in (1, 8, 16, 32, 69):
        for few, many in zip(
            norm(x[:, :alone], delta[:, :alone], weight, "cpu"), norm(x, delta, weight, "cpu"), strict=True
        ):
            np.testing.assert_array_equal(many[:, :alone:2], few[:, ::2])
            assert np.isfinite(few[:, ::2]).all()


@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), st.integers(1, 70), st.integers(0, 2**32 - 1)
)
def test_rotate_qkv(num_heads: int, num_kv_heads: int, half: int, num_tokens: int, seed: int) -> None:
    check_rotate_qkv("cpu", num_heads, num_kv_heads, half, num_tokens, seed)


def test_rotate_qkv_by_xla() -> None:
    check_rotate_qkv("xla", 4, 2, 16, 13, 0)


def check_rotate_qkv(
    backend: Backend, num_heads: int, num_kv_heads: int, half: int, num_tokens: int, seed: int
) -> None:
    """A pair is a complex number, which is multiplied by one of its angle."""
    heads, angles = draw(seed, (num_heads + 2 * num_kv_heads, 2 * half, num_tokens), (half, num_tokens))
    cos, sin = np.cos(angles), np.sin(angles)
    got = rotate_qkv(*map(jnp.asarray, (heads, cos, sin)), num_kv_heads=num_kv_heads, backend=backend)

    pairs = (heads[:, :half] + 1j * heads[:, half:]).astype(np.complex128)
    turned = pairs * (cos.astype(np.float64) + 1j * sin)
    q, k, v = np.split(np.concatenate([turned.real, turned.imag], 1), (num_heads, num_heads + num_kv_heads))
    for x, exact in zip(got[:2], (q, k), strict=True):
        np.testing.assert_allclose(x, exact, atol=4 * UNIT_ROUNDOFF * np.abs(heads).max())
    assert v.shape == got[2].shape
    np.testing.assert_array_equal(got[2], heads[num_heads + num_kv_heads :])


def test_arguments_that_do_not_fit() -> None:
    x, weight = jnp.zeros((4, 3)), jnp.zeros((4,))
    with pytest.raises(ValueError, match=r"x\(4, 3\), delta\(4, 2\) and weight\(4,\) must be \[D, T\]"):
        add_rms_norm(x, x[:, :2], weight, eps=EPS)
    with pytest.raises(ValueError, match=r"delta \(bfloat16\) must be float32 with backend='cpu'"):
        add_rms_norm(x, x.astype(jnp.bfloat16), weight, eps=EPS, backend="cpu")
    with pytest.raises(ValueError, match="backend='gpu' must be one of auto, cpu, xla"):
        add_rms_norm(x, x, weight, eps=EPS, backend="gpu")
    heads, table = jnp.zeros((6, 8, 3)), jnp.zeros((4, 3))
    with pytest.raises(ValueError, match=r"heads\(6, 8, 3\) must be .* num_kv_heads=3 and H even"):
        rotate_qkv(heads, table, table, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"cos\(4, 3\) and sin\(3, 3\) must be \[H / 2, T\]"):
        rotate_qkv(heads, table, table[:3], num_kv_heads=2)
    with pytest.raises(ValueError, match=r"heads \(bfloat16\) must be float32 with backend='cpu'"):
        rotate_qkv(heads.astype(jnp.bfloat16), table, table, num_kv_heads=2, backend="cpu")
