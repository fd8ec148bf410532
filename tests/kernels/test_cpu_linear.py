"""The C++ products against float64, within the bound that summing in float32 gives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxinfer_kernels import gated_linear, linear
from jaxinfer_kernels.matmul import Activation
from tests.cpu_kernels import load_cpu_kernels

UNIT_ROUNDOFF = 2.0**-24

sizes = given(st.integers(1, 70), st.integers(1, 130), st.integers(1, 70), st.integers(0, 2**32 - 1))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_cpu_kernels()


def draw(num_out: int, num_in: int, num_tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((num_out, num_in), np.float32) / np.float32(num_in**0.5)
    return weight, rng.standard_normal((num_in, num_tokens), np.float32)


def run(op: Callable[..., jax.Array], weight: np.ndarray, x: np.ndarray, **options: Any) -> np.ndarray:
    """The kernel's result, in float64, which holds it exactly."""
    return np.asarray(op(jnp.asarray(weight), jnp.asarray(x), backend="cpu", **options), np.float64)


def product(weight: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """weight @ x, and how far off it a float32 sum of its terms in any order may be (Higham 2002, 3.5)."""
    exact = weight.astype(np.float64) @ x
    return exact, weight.shape[1] * UNIT_ROUNDOFF * (np.abs(weight).astype(np.float64) @ np.abs(x)) * 1.01


@sizes
@example(1, 1, 1, 0)
@example(33, 64, 8, 0)  # the most columns that are few
@example(12, 64, 9, 0)
@example(40, 2100, 33, 0)  # deeper than a pass goes, and a column more than a panel
@example(40, 2100, 3, 0)
@example(600, 16, 32, 0)  # more rows than a task takes
def test_linear(num_out: int, num_in: int, num_tokens: int, seed: int) -> None:
    weight, x = draw(num_out, num_in, num_tokens, seed)
    exact, error = product(weight, x)
    got = run(linear, weight, x)
    assert (np.abs(got - exact) <= error).all()
    np.testing.assert_array_equal(run(linear, weight, x, token_major=True), got.T)


@pytest.mark.parametrize("activation", get_args(Activation))
@sizes
@example(300, 40, 32, 0)
@example(37, 1100, 70, 0)
def test_gated_linear(activation: Activation, num_out: int, num_in: int, num_tokens: int, seed: int) -> None:
    weight, x = draw(2 * num_out, num_in, num_tokens, seed)
    exact, error = product(weight, 4 * x)
    gate, up = exact[:num_out], exact[num_out:]
    if activation == "silu":
        activated = gate / (1 + np.exp(-gate))
    else:
        activated = gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2
    # Neither function's slope is over 1.13, and each is within some units of its last place.
    off = 1.13 * error[:num_out] * np.abs(up) + np.abs(activated) * error[num_out:]
    off += 16 * UNIT_ROUNDOFF * np.maximum(np.abs(gate), 1) * np.abs(up)
    got = run(gated_linear, weight, 4 * x, activation=activation)
    assert (np.abs(got - activated * up) <= off + error[:num_out] * error[num_out:]).all()


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, among few and among many; where the neighbours are NaN, too."""
    weight, x = draw(50, 1500, 70)
    x[:, 1::2] = np.nan
    for alone, together in ((1, 8), (9, 70), (16, 32)):
        few, many = (run(linear, weight, x[:, :count]) for count in (alone, together))
        np.testing.assert_array_equal(many[:, :alone:2], few[:, ::2])
        assert np.isfinite(few[:, ::2]).all()


def test_no_rows_and_no_tokens() -> None:
    assert run(linear, np.zeros((0, 4), np.float32), np.zeros((4, 20), np.float32)).shape == (0, 20)
    assert run(linear, np.zeros((5, 4), np.float32), np.zeros((4, 0), np.float32)).shape == (5, 0)


def test_programs_that_run_at_the_same_time() -> None:
    """The kernels' threads serve one at a time: the others compute alone."""
    cases = [draw(200, 90, num_tokens, num_tokens) for num_tokens in range(1, 41)]
    with ThreadPoolExecutor(8) as pool:
        for (weight, x), got in zip(cases, pool.map(lambda case: run(linear, *case), cases), strict=True):
            exact, error = product(weight, x)
            assert (np.abs(got - exact) <= error).all()


@pytest.mark.parametrize(
    ("weight", "x", "message"),
    [
        ((4, 3), (4, 2), r"weight\(4, 3\) and x\(4, 2\) must be \[F, D\] and \[D, M\]"),
        ((4, 3, 1), (3, 2), r"weight\(4, 3, 1\)"),
    ],
)
def test_shapes_that_do_not_fit(weight: tuple[int, ...], x: tuple[int, ...], message: str) -> None:
    for op in (linear, gated_linear):
        options: dict[str, Any] = {"activation": "silu"} if op is gated_linear else {}
        with pytest.raises(ValueError, match=message):
            op(jnp.zeros(weight), jnp.zeros(x), backend="cpu", **options)


def test_other_arguments_that_do_not_fit() -> None:
    half = jnp.zeros((4, 4), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"weight \(bfloat16\) and x \(bfloat16\) must be float32"):
        linear(half, half, backend="cpu")
    with pytest.raises(ValueError, match="backend='tpu' must be one of auto, cpu, xla"):
        linear(half, half, backend="tpu")
    with pytest.raises(ValueError, match="activation='relu' must be one of silu, gelu_pytorch_tanh"):
        gated_linear(half, half, activation="relu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"weight\(3, 4\) must be \[2F, D\]"):
        gated_linear(half[:3], half, activation="silu")
