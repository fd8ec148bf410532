"""What the hosts of an engine must have in common, compared before they start to wait for each other."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import jax

from jaxinfer.config import ConfigError, EngineConfig, MeshConfig
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.memory.bundle_key import source_digest, versions
from jaxinfer.parallel.hosts import Hosts, HostsError
from jaxinfer_checkpoints import CheckpointReader, fingerprint

# Where things lie may differ, and a checkpoint is known by its fingerprint.
_OWN_FLAGS = frozenset(
    {"model", "tokenizer", "revision", "verify", "hosts", "cache_dir", "compilation_cache_dir", "bundle"}
)


def flags_and_versions(config: EngineConfig) -> dict[str, str]:
    """By name, those that must be the same on all hosts."""
    flags = {f.name: str(getattr(config, f.name)) for f in fields(config) if f.name not in _OWN_FLAGS}
    flags["bundle"] = "none" if config.bundle is None else "given"
    return {**versions("tpu"), **versions("gpu"), "jaxinfer": source_digest(), **flags}


def sizes(resolved: ResolvedConfig) -> dict[str, str]:
    """What a host derives from its own devices' memory."""
    derived = {
        "dtype": resolved.dtype,
        "matmul": resolved.matmul,
        **asdict(resolved.scheduler),
        **asdict(resolved.cache),
    }
    return {name: str(value) for name, value in derived.items()}


def devices_of_all(hosts: Hosts, reader: CheckpointReader, mesh: MeshConfig) -> list[Any]:
    """Starts jax on all hosts, where all have the same checkpoint, and gives their devices, host by host, so
    that those of one host are neighbours on the mesh, along "tensor" first.

    Nothing may have asked jax for a device before.

    Raises:
      HostsError: a checkpoint differs.
      ConfigError: the mesh takes another number of devices than there are.
    """
    config = hosts.config
    hosts.agree({"checkpoint": fingerprint(reader)})
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_hosts,
            config.host_id,
            # Nothing is left to detect, and jax would give each of Slurm's tasks one GPU alone.
            cluster_detection_method="deactivate",
        )
    except jax.errors.JaxRuntimeError as error:
        raise HostsError(f"jax cannot connect the hosts at {config.coordinator}: {error}") from error
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    hosts.agree({"devices": str(len(devices))})  # none may fail while another still looks for the devices
    if len(devices) != mesh.num_devices:
        raise ConfigError(
            f"mesh={mesh} has {mesh.num_devices} devices, and the {config.num_hosts} hosts have "
            f"{len(devices)}: it must take all of them"
        )
    return devices
