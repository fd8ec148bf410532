"""The programs of an engine: loaded from a bundle where there is one that fits, else compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.compilation import CompilationCounter
from jaxinfer.engine.programs import Program, Programs, compile_programs, first_needed, stage_index
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.engine.step_batch import StepBatcher
from jaxinfer.memory.bundle import BundledProgram, BundleError, load_in_background, open_bundle, write_bundle
from jaxinfer.memory.bundle_key import bundle_key
from jaxinfer.models.weights import abstract_stages
from jaxinfer.parallel.hosts import Hosts


def prepare_programs(
    config: EngineConfig,
    model: ModelConfig,
    resolved: ResolvedConfig,
    meshes: Sequence[Mesh | None],
    counter: CompilationCounter,
    hosts: Hosts | None = None,
) -> Programs:
    """All programs that serving can need. With a bundle none is compiled, and those that a first request
    needs are loaded when this returns; a thread loads the others, and a step that comes before waits for
    its own alone. `meshes` are the stages'.

    Of several hosts each has a bundle, or all compile: compilers may talk to each other.

    Raises:
      HostsError: another host has failed or gone.
    """
    if config.bundle is None:
        return compile_engine(model, resolved, meshes, counter)
    directory, key = Path(config.bundle), engine_key(config, model, resolved, meshes)
    batcher = StepBatcher(resolved.scheduler, resolved.cache)
    bundled = _load(directory, key, meshes, batcher)
    if hosts is not None:
        lacking = [str(i) for i, found in enumerate(hosts.share(isinstance(bundled, dict))) if not found]
        if lacking and isinstance(bundled, dict):
            bundled = BundleError(f"host {', '.join(lacking)} has no bundle that fits")
    if isinstance(bundled, dict):
        load_in_background(bundled.values())
        logging.info("%d programs from the bundle in %s", len(bundled), directory)
        return Programs.of(batcher, bundled, len(meshes))
    logging.warning("compiling: %s", bundled)
    programs = compile_engine(model, resolved, meshes, counter)
    try:
        logging.info("wrote the bundle %s", write_bundle(directory, key, programs.by_name()))
    except OSError as error:
        logging.warning("the bundle could not be written to %s: %s", directory, error.strerror or error)
    return programs


def compile_engine(
    model: ModelConfig,
    resolved: ResolvedConfig,
    meshes: Sequence[Mesh | None],
    counter: CompilationCounter | None = None,
    made: Mapping[str, Program] = MappingProxyType({}),
) -> Programs:
    """All programs that serving can need; `made` are there already. The devices need not be here."""
    stages = abstract_stages(model, jnp.dtype(resolved.dtype), meshes)
    return compile_programs(stages, resolved.cache, resolved.scheduler, meshes, counter, made)


def engine_key(
    config: EngineConfig, model: ModelConfig, resolved: ResolvedConfig, meshes: Sequence[Mesh | None]
) -> dict[str, str]:
    """What the engine's bundle is found by."""
    devices = _devices(meshes[0])
    num_hosts = len({device.process_index for device in devices})
    return bundle_key(
        config, model, resolved.dtype, resolved.cache, resolved.scheduler, devices[0], num_hosts
    )


def _devices(mesh: Mesh | None) -> list[Any]:
    return jax.devices()[:1] if mesh is None else list(mesh.devices.flat)


def _load(
    directory: Path, key: dict[str, str], meshes: Sequence[Mesh | None], batcher: StepBatcher
) -> dict[str, BundledProgram] | BundleError:
    """By name, those that a first request needs loaded; or why jax cannot, or that there is no bundle."""
    devices = [_devices(mesh) for mesh in meshes]
    try:
        bundled = open_bundle(directory, key, lambda name: devices[stage_index(name)])
    except BundleError as error:
        return error
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(bundled[name].load) for name in first_needed(batcher, len(devices))]
    for future in first:
        if error := future.exception():
            return BundleError(f"jax cannot load the bundle in {directory}: {error}")
    return bundled
