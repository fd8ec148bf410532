"""The mesh of devices: its axes, where each array lies on it, and how a step runs over it.

Each pipeline stage (parallel/stages.py) has a mesh and programs of its own, so no mesh has an axis for
stages. Two axes. Along "data" lie groups of devices that serve requests of their own, each with its own pages
and slots: a step is one program that every group runs on its part of the step's arrays, side by side
(`over_groups`). Along "tensor" the devices of a group share each layer (Shoeybi et al. 2019, arXiv
1909.08053): the parameters' shardings and `constrain` tell the compiler how, and only attention and sampling
are written for one device (ops/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import ConfigError, MeshConfig, ModelConfig
from jaxinfer.parallel.layout import row_share, split_axis

DATA, TENSOR = "data", "tensor"
_MAX_SIMULATED = 16  # devices that a CPU is worth dividing into


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh | None:
    """The mesh of one stage, over the first of `devices`; None for one device, which needs none.

    Raises:
      ConfigError: too few devices.
    """
    if config.num_devices == 1:
        return None
    _check_number(config, devices)
    return mesh_over(devices[: config.num_devices], config)


def make_meshes(config: MeshConfig, devices: Sequence[Any]) -> tuple[Mesh | None, ...]:
    """The mesh of each pipeline stage: its devices are those after the stage before.

    With stages there is a mesh for one device too, which says which it is.

    Raises:
      ConfigError: too few devices.
    """
    if config.pipe == 1:
        return (make_mesh(config, devices),)
    _check_number(config, devices)
    size = config.stage.num_devices
    return tuple(mesh_over(devices[n * size : (n + 1) * size], config) for n in range(config.pipe))


def mesh_over(devices: Sequence[Any], config: MeshConfig) -> Mesh:
    """The mesh of one stage, over all of `devices`."""
    shape = (config.data, config.tensor)
    return Mesh(np.asarray(devices).reshape(shape), (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)


def _check_number(config: MeshConfig, devices: Sequence[Any]) -> None:
    if config.num_devices > len(devices):
        count = f"{len(devices)} ({devices[0].platform}) {'is' if len(devices) == 1 else 'are'} here"
        advice = "use one of no more"
        if config.num_devices <= _MAX_SIMULATED:
            option = f"--xla_force_host_platform_device_count={config.num_devices}"
            advice += f", or, to try it on a CPU, set XLA_FLAGS={option} JAX_PLATFORMS=cpu"
        raise ConfigError(f"mesh={config} needs {config.num_devices} devices, and {count}: {advice}")


def hosts_of(meshes: Sequence[Mesh | None]) -> set[int]:
    """The numbers of the hosts that have a device of them."""
    return {device.process_index for mesh in meshes if mesh is not None for device in mesh.devices.flat}


def are_apart(meshes: Sequence[Mesh | None]) -> bool:
    """Whether pipeline stages, whose meshes these are, lie on more than one host."""
    return len(meshes) > 1 and len(hosts_of(meshes)) > 1


def stages_here(meshes: Sequence[Mesh | None]) -> tuple[int, ...]:
    """Of the stages, those of which this host has a device."""
    if not are_apart(meshes):
        return tuple(range(len(meshes)))
    return tuple(n for n, mesh in enumerate(meshes) if jax.process_index() in hosts_of([mesh]))


def num_groups(mesh: Mesh | None) -> int:
    """Data-parallel groups."""
    return 1 if mesh is None else mesh.shape[DATA]


def tensor_parallel(mesh: Mesh | None) -> int:
    """Devices that share each layer."""
    return 1 if mesh is None else mesh.shape[TENSOR]


def parameter_sharding(mesh: Mesh, path: str, laid_out: ModelConfig) -> NamedSharding:
    """Where a parameter of a model laid out for the mesh lies; each group has all of it."""
    axis = split_axis(path, laid_out)
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, TENSOR))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Of an array whose leading dimension holds the groups' rows one after another."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def read_sharding(mesh: Mesh) -> NamedSharding:
    """Of what the host reads of a step: its rows, or on a mesh of several hosts all rows everywhere."""
    return row_sharding(mesh) if len(hosts_of([mesh])) == 1 else NamedSharding(mesh, PartitionSpec())


def page_sharding(mesh: Mesh) -> NamedSharding:
    """Of the cache: pages by group, and the rows of a page by kv head."""
    return NamedSharding(mesh, PartitionSpec(DATA, TENSOR))


def over_groups(step: Callable[..., Any], mesh: Mesh, *, num_shared: int) -> Callable[..., Any]:
    """`step` run by each data-parallel group on its own part of the arguments and results.

    Args:
      step: takes arrays, or pytrees of them, of one group.
      mesh: of all groups.
      num_shared: leading arguments that are the groups' in common: the parameters.
    """

    def run(*args: Any) -> Any:
        specs = [PartitionSpec() if i < num_shared else PartitionSpec(DATA) for i in range(len(args))]
        # "tensor" is left to the compiler inside, and to `constrain`.
        return jax.shard_map(
            step,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=PartitionSpec(DATA),
            axis_names={DATA},
            check_vma=False,
        )(*args)

    return run


def rows_axis(num_rows: int) -> str | None:
    """The axis along which the devices of a group share so many rows of a step; None where they do not."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or row_share(num_rows, mesh.shape[TENSOR]) == num_rows else TENSOR


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Says where a group's activation lies: an axis name for each leading dimension, none is everywhere.

    Outside a step over a mesh it does nothing.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
