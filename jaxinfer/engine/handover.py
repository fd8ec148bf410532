"""How a step passes from one pipeline stage's devices to the next, and what it sampled to the hosts.

Stages of one host hand arrays on with `jax.device_put`, which waits for nobody. Those of several hosts do so
by exchanges (parallel/exchange.py), each a program of the closed set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxinfer.config import SchedulerConfig
from jaxinfer.engine.step_batch import StepBatcher
from jaxinfer.ops.sampling import Sampled
from jaxinfer.parallel.exchange import Exchange, deliver, hand_on
from jaxinfer.parallel.mesh import are_apart, hosts_of, row_sharding
from jaxinfer.types import MAX_LOGPROBS

LogprobArrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # as token_logprobs returns them


def hand_on_name(rows: int, stage: int) -> str:
    """By the step's rows, and the stage that hands on."""
    return f"hand_on_step {rows} stage {stage}"


def deliver_name(size: int) -> str:
    """By the sampled rows."""
    return f"deliver_step {size}"


def deliver_logprobs_name(rows: int) -> str:
    """By the prefill rows."""
    return f"deliver_step logprobs {rows}"


def make_exchanges(
    batcher: StepBatcher,
    scheduler: SchedulerConfig,
    hidden_size: int,
    dtype: DTypeLike,
    meshes: Sequence[Mesh | None],
) -> dict[str, Exchange]:
    """By name, the exchanges that this host can have a part in; none where all stages lie on one host.

    Args:
      batcher: of the engine's shapes.
      scheduler: limits.
      hidden_size: D.
      dtype: of hidden states.
      meshes: the stages'.
    """
    placed = tuple(mesh for mesh in meshes if mesh is not None)
    if not are_apart(placed):
        return {}
    num_groups = scheduler.num_groups

    def rows(*shape: int, of: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((shape[0] * num_groups, *shape[1:]), jnp.dtype(of))

    def logprobs(size: int) -> list[jax.ShapeDtypeStruct]:
        top = (size, MAX_LOGPROBS)
        return [rows(size, of=jnp.float32), rows(size), rows(*top), rows(*top, of=jnp.float32)]

    exchanges = {
        hand_on_name(size, stage): hand_on(pair, rows(hidden_size, size, of=dtype))
        for stage, pair in enumerate(pairwise(placed))
        for size in sorted({bucket.num_rows for bucket in batcher.buckets})
        if len(hosts_of(pair)) > 1 and jax.process_index() in hosts_of(pair)
    }
    last_tokens = rows(scheduler.max_num_seqs + 1)
    for size in batcher.sample_sizes:
        exchanges[deliver_name(size)] = deliver(placed, [rows(size), *logprobs(size)], [last_tokens])
    for size in batcher.prefill_sizes:
        exchanges[deliver_logprobs_name(size)] = deliver(placed, logprobs(size))
    return exchanges


class Handover:
    """Hands arrays of steps on. Not thread safe.

    On several hosts all must call the same methods in the same order, whatever stages they have; arrays of
    other hosts' stages are None there.

    Attributes:
      waits: whether a stage that hands on waits until the receiver has come to the same exchange.
    """

    def __init__(
        self,
        meshes: Sequence[Mesh | None],
        exchanges: Mapping[str, Exchange],
        programs: Mapping[str, Any],
    ) -> None:
        """`programs` are the exchanges', compiled, by name; `meshes` the stages'."""
        self._places = [None if mesh is None else row_sharding(mesh) for mesh in meshes]
        self._exchanges, self._programs = exchanges, programs
        # XLA's CPU client keeps no order of programs of one local device, and one that waits for other hosts
        # may take the last of its threads.
        self._one_by_one = bool(exchanges) and jax.default_backend() == "cpu"
        self._zeros = {name: exchange.zeros() for name, exchange in exchanges.items()}
        self.waits = bool(exchanges)

    def held_bytes(self, stage: int) -> int:
        """What one of the stage's devices holds to take part in exchanges."""
        place = self._places[stage]
        if not self._exchanges or place is None:
            return 0
        device = min(place.addressable_devices, key=lambda device: device.id)
        arrays = jax.tree.leaves(self._zeros)
        return sum(array.nbytes for array in arrays if array.devices() == {device})

    def hand_on(self, hidden: jax.Array | None, stage: int, rows: int) -> jax.Array | None:
        """A hidden state of so many rows, from the stage to the next."""
        name = hand_on_name(rows, stage)
        if name in self._exchanges:
            (result,) = self._run(name, None if hidden is None else (hidden,))
            return self._exchanges[name].part(result, 1)
        return None if hidden is None else jax.device_put(hidden, self._places[stage + 1])

    def deliver(
        self, sampled: Sampled | None, last_tokens: jax.Array | None, size: int
    ) -> tuple[Sampled, jax.Array | None]:
        """What a step of so many rows sampled, for all hosts, and the slots' last tokens for the first stage.

        Both are the last stage's. The slots may be donated when this returns.
        """
        if not self._exchanges:
            assert sampled is not None
            return sampled, jax.device_put(last_tokens, self._places[0])
        name = deliver_name(size)
        arrays = None if sampled is None else (*_leaves(sampled), last_tokens)
        *results, tokens = self._run(name, arrays)
        return Sampled(*results), self._exchanges[name].part(tokens, 0)

    def deliver_logprobs(self, logprobs: LogprobArrays | None, rows: int) -> LogprobArrays:
        """The log-probabilities of so many rows of prompts, for all hosts."""
        if not self._exchanges:
            assert logprobs is not None
            return logprobs
        token, ranks, top_ids, top = self._run(deliver_logprobs_name(rows), logprobs)
        return token, ranks, top_ids, top

    def settle(self, arrays: Any) -> None:
        """Waits for what programs have made, where only that keeps those of several hosts in order."""
        if self._one_by_one:
            jax.block_until_ready(arrays)

    def _run(self, name: str, arrays: Any) -> tuple[jax.Array, ...]:
        results = self._programs[name](*self._exchanges[name].joined(arrays, self._zeros[name]))
        self.settle(results)
        return results


def _leaves(sampled: Sampled) -> tuple[jax.Array, ...]:
    return sampled.token_ids, sampled.logprobs, sampled.ranks, sampled.top_ids, sampled.top_logprobs
