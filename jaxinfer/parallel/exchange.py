"""What pipeline stages on several hosts exchange: programs that all devices of some stages run together.

`jax.device_put` moves an array only to devices of its own process. An exchange is one collective over the
devices of several stages instead: a stage gives its arrays, the others zeros of the same shapes, and each
gets what is meant for it. All hosts with a part in an exchange must launch theirs in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from jaxinfer.parallel.mesh import DATA, TENSOR, row_sharding

STAGE = "stage"
_ROWS = PartitionSpec((STAGE, DATA))  # the stages' arrays, each as `row_sharding` has it, one after another


@dataclass(frozen=True)
class Exchange:
    """A program over the devices of some stages, for arrays that one of them has.

    Attributes:
      step: what each device does with its shards; returns a tuple.
      meshes: the stages', in the pipeline's order.
      source: of these, the one that has the arrays.
      arrays: on the source, which lie as `row_sharding` says: shapes and dtypes.
      out_specs: where each result lies on the mesh of all the stages' devices.
    """

    step: Callable[..., tuple[jax.Array, ...]]
    meshes: tuple[Mesh, ...]
    source: int
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    out_specs: tuple[PartitionSpec, ...]

    @cached_property
    def mesh(self) -> Mesh:
        """Of all the stages' devices."""
        devices = np.stack([mesh.devices for mesh in self.meshes])
        return Mesh(devices, (STAGE, DATA, TENSOR), axis_types=(AxisType.Auto,) * 3)

    @cached_property
    def place(self) -> NamedSharding:
        """Of the arguments: the stages' arrays, one after another."""
        return NamedSharding(self.mesh, _ROWS)

    def lower(self) -> Lowered:
        """The program."""

        def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return jax.shard_map(
                self.step, mesh=self.mesh, in_specs=_ROWS, out_specs=self.out_specs, check_vma=False
            )(*arrays)

        run.__name__ = self.step.__name__
        args = [
            jax.ShapeDtypeStruct(self._whole(array), array.dtype, sharding=self.place)
            for array in self.arrays
        ]
        return jax.jit(run).lower(*args)

    def zeros(self) -> list[list[jax.Array]]:
        """For each array, what this host's devices give that have none of it."""
        has = set(self.meshes[self.source].devices.flat)
        devices = [
            d for d in self.mesh.devices.flat if d.process_index == jax.process_index() and d not in has
        ]
        return [[jax.device_put(self._shard(array), device) for device in devices] for array in self.arrays]

    def _shard(self, array: jax.ShapeDtypeStruct) -> np.ndarray:
        shape = row_sharding(self.meshes[self.source]).shard_shape(array.shape)
        return np.zeros(shape, array.dtype)

    def _whole(self, array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        return (array.shape[0] * len(self.meshes), *array.shape[1:])

    def joined(
        self, arrays: Sequence[jax.Array] | None, zeros: Sequence[Sequence[jax.Array]]
    ) -> list[jax.Array]:
        """The program's arguments: the source's arrays where this host has a part of them, and zeros."""
        shards = [list(others) for others in zeros]
        for own, array in zip(shards, arrays or (), strict=arrays is not None):
            own += [shard.data for shard in array.addressable_shards]
        return [
            jax.make_array_from_single_device_arrays(self._whole(array), self.place, own)
            for array, own in zip(self.arrays, shards, strict=True)
        ]

    def part(self, result: jax.Array, stage: int) -> jax.Array | None:
        """A stage's part of a result that has one for each; None where this host has nothing of the stage.

        Args:
          result: as `_ROWS` says.
          stage: among the exchange's.
        """
        mesh = self.meshes[stage]
        devices = set(mesh.devices.flat)
        shards = [shard.data for shard in result.addressable_shards if shard.device in devices]
        if not shards:
            return None
        shape = (result.shape[0] // len(self.meshes), *result.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, row_sharding(mesh), shards)


def hand_on(meshes: tuple[Mesh, Mesh], hidden: jax.ShapeDtypeStruct) -> Exchange:
    """A hidden state [D, T], of each group, from a stage to the next.

    All devices of a group have the whole of it. Each sends a part alone, where they divide it, and the
    receivers put theirs together (Narayanan et al. 2021, arXiv 2104.04473, section 4.1): between hosts it
    goes once, not once a device.
    """
    num_parts = meshes[0].shape[TENSOR]
    if hidden.shape[0] // meshes[0].shape[DATA] % num_parts:
        num_parts = 1

    def hand_on_step(hidden: jax.Array) -> tuple[jax.Array]:
        if num_parts == 1:
            return (lax.ppermute(hidden, STAGE, [(0, 1)]),)
        size = hidden.shape[0] // num_parts
        part = lax.dynamic_slice_in_dim(hidden, lax.axis_index(TENSOR) * size, size)
        return (lax.all_gather(lax.ppermute(part, STAGE, [(0, 1)]), TENSOR, tiled=True),)

    return Exchange(hand_on_step, meshes, 0, (hidden,), (_ROWS,))


def deliver(
    meshes: tuple[Mesh, ...],
    to_all: Sequence[jax.ShapeDtypeStruct],
    to_first: Sequence[jax.ShapeDtypeStruct] = (),
) -> Exchange:
    """From the last stage the rows of all groups to every device, for the hosts to read, and others to the
    first stage, where each group gets its own.
    """
    last = len(meshes) - 1

    def deliver_step(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        whole = [
            lax.all_gather(x, (STAGE, DATA), tiled=True)[-x.shape[0] * meshes[0].shape[DATA] :]
            for x in arrays[: len(to_all)]
        ]
        return (*whole, *(lax.ppermute(x, STAGE, [(last, 0)]) for x in arrays[len(to_all) :]))

    specs = (PartitionSpec(),) * len(to_all) + (_ROWS,) * len(to_first)
    return Exchange(deliver_step, meshes, last, (*to_all, *to_first), specs)
