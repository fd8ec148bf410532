"""The Hopper kernels under the interpreter that tells of races, and what it says of a wait left out.

It checks what threads load and store and what TMA copies, not what wgmma reads (jax 0.12).
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer_kernels.gpu import attention
from jaxinfer_kernels.specs import AttentionSpec
from tests.kernels.attention_cases import Room, check, make_case

pytestmark = [
    pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="needs jax 0.11: InterpretGPUParams"),
    # The keys of positions that nobody wrote are NaN here; what is made of them is masked.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]
# Copies of one simulated TMA thread are in order, which would hide a wait that is missing: a thread for each.
RACES: dict[str, Any] = dict(detect_races=True, num_tma_threads_per_device=32)
SPEC = AttentionSpec("small", 2, 1, 64, sliding_window=90, sinks=True, page_size=32)


def simulate(decodes: list[int], prefills: list[tuple[int, int]], kv_dtype: str = "bfloat16") -> None:
    """Raises where two threads touch the same memory, one of them writing, and nothing orders them."""
    case = make_case(SPEC, decodes, prefills, backend="gpu", dtype="bfloat16", kv_dtype=kv_dtype)
    params = plgpu.InterpretGPUParams(**RACES)
    step = jax.jit(partial(attention.paged_attention, **case.options(), interpret=params))
    jax.block_until_ready(step(case.q, case.k, case.v, case.kv_pages("gpu"), case.metadata, case.sinks))


@pytest.mark.parametrize(
    "kv_dtype", ["bfloat16", *(pytest.param(x, marks=pytest.mark.slow) for x in ("int8", "float8_e4m3fn"))]
)
def test_no_races(kv_dtype: str) -> None:
    simulate([140, 0, 7], [(60, 70)], kv_dtype)


def test_a_tile_that_nobody_waits_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode's, before it zeroes the rows of values that nobody sees."""
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state

    wait = plgpu.barrier_wait

    def wait_but_for_tiles(*args: Any) -> None:
        caller = inspect.currentframe().f_back  # type: ignore[union-attr]
        if caller is not None and caller.f_code.co_name != "_attend_tile":
            wait(*args)

    monkeypatch.setattr(plgpu, "barrier_wait", wait_but_for_tiles)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RACE"):
            simulate([140], [])
    finally:
        reset_gpu_interpret_mode_state()  # public for TPUs alone; without it nothing is interpreted any more


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 200), max_size=3),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 90)), max_size=1),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=5, deadline=None)
def test_random_ragged_steps(decodes: list[int], prefills: list[tuple[int, int]], seed: int) -> None:
    """One shape, so that one program serves all."""
    room = Room(decodes=3, tiles=1, pages_a_seq=16, pages=49)
    half: dict[str, Any] = dict(backend="gpu", dtype="bfloat16", kv_dtype="bfloat16")
    check(make_case(AttentionSpec("plain", 2, 1, 64), decodes, prefills, room=room, seed=seed, **half))
