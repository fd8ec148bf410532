"""One check on a device: what it finds, its launches timed, and the place where it is the furthest off."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer_kernels import Backend

SAMPLED_ROWS = 4  # of what is too large for the reference as a whole
RUNS, RUN_S, MAX_LAUNCHES = 5, 0.02, 100


@dataclass(frozen=True)
class Outcome:
    """What one check found.

    Attributes:
      error, bound: at the place where the error is the largest part of its bound.
      ms: of one launch, the median of several runs.
      num_bytes, flops: that the op has to move and to compute, whatever it does.
      rate: the arithmetic's, as chips.py names it.
    """

    error: float
    bound: float
    ms: float
    num_bytes: int
    flops: int
    rate: str = "bf16"


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    op: str
    shape: str
    dtype: str
    backend: Backend
    run: Callable[[], Outcome]


def launch_ms(launch: Callable[[Any], Any], state: Any) -> float:
    """Of `launch`, which takes what the last one gave. Only the end of a run of launches waits."""
    state = jax.block_until_ready(launch(state))

    def run(launches: int, state: Any) -> tuple[float, Any]:
        start_s = time.perf_counter()
        for _ in range(launches):
            state = launch(state)
        jax.block_until_ready(state)
        return (time.perf_counter() - start_s) / launches, state

    once_s, state = run(1, state)
    launches = min(max(1, round(RUN_S / once_s)), MAX_LAUNCHES)
    times = []
    for _ in range(RUNS):
        seconds, state = run(launches, state)
        times.append(seconds)
    return statistics.median(times) * 1e3


def worst(out: Any, want: np.ndarray, bound: np.ndarray) -> tuple[float, float]:
    """Error and bound where they are the furthest apart; what is no number is infinitely wrong."""
    error = np.abs(np.asarray(out, np.float64) - want)
    error = np.where(np.isnan(error), np.inf, error)
    bound = np.maximum(np.broadcast_to(bound, error.shape), np.finfo(np.float64).tiny)
    index = np.unravel_index(np.argmax(error / bound), error.shape)
    return float(error[index]), float(bound[index])
