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
from jaxinfer.engine.handover import make_exchanges
from jaxinfer.engine.programs import Program, Programs, compile_programs, first_needed, stage_index
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.engine.step_batch import StepBatcher
from jaxinfer.memory.bundle import BundledProgram, BundleError, load_in_background, open_bundle, write_bundle
from jaxinfer.memory.bundle_key import bundle_key
from jaxinfer.models.weights import abstract_stages
from jaxinfer.parallel.hosts import Hosts
from jaxinfer.parallel.mesh import hosts_of, stages_here


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
    bundled = _load(directory, key, model, resolved, meshes, batcher)
    if hosts is not None:
        lacking = [str(i) for i, found in enumerate(hosts.share(isinstance(bundled, dict))) if not found]
        if lacking and isinstance(bundled, dict):
            bundled = BundleError(f"host {', '.join(lacking)} has no bundle that fits")
    if isinstance(bundled, dict):
        load_in_background(bundled.values())
        logging.info("%d programs from the bundle in %s", len(bundled), directory)
        return Programs.of(batcher, bundled, len(meshes), stages_here(meshes))
    logging.warning("compiling: %s", bundled)
    programs = compile_engine(model, resolved, meshes, counter)
    try:
        logging.info("wrote the bundle %s", write_bundle(directory, key, programs.by_name))
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
    """All programs that serving can need here; `made` are there already. The devices need not be here."""
    stages = abstract_stages(model, jnp.dtype(resolved.dtype), meshes)
    return compile_programs(stages, resolved.cache, resolved.scheduler, meshes, counter, made)


def engine_key(
    config: EngineConfig, model: ModelConfig, resolved: ResolvedConfig, meshes: Sequence[Mesh | None]
) -> dict[str, str]:
    """What the engine's bundle is found by."""
    device, num_hosts = _devices(meshes[0])[0], max(1, len(hosts_of(meshes)))
    here = stages_here(meshes)
    return bundle_key(
        config, model, resolved.dtype, resolved.cache, resolved.scheduler, device, num_hosts, here
    )


def _devices(mesh: Mesh | None) -> list[Any]:
    return jax.devices()[:1] if mesh is None else list(mesh.devices.flat)


def _load(
    directory: Path,
    key: dict[str, str],
    model: ModelConfig,
    resolved: ResolvedConfig,
    meshes: Sequence[Mesh | None],
    batcher: StepBatcher,
) -> dict[str, BundledProgram] | BundleError:
    """By name, those that a first request needs loaded; or why jax cannot, or that there is no bundle."""
    exchanges = make_exchanges(batcher, resolved.scheduler, model.hidden_size, resolved.dtype, meshes)
    devices = [_devices(mesh) for mesh in meshes]

    def devices_of(name: str) -> list[Any]:
        exchange = exchanges.get(name)
        return devices[stage_index(name)] if exchange is None else list(exchange.mesh.devices.flat)

    try:
        bundled = open_bundle(directory, key, devices_of)
    except BundleError as error:
        return error
    with ThreadPoolExecutor(2) as pool:
        names = [*first_needed(batcher, len(meshes), stages_here(meshes)), *exchanges]
        first = [pool.submit(bundled[name].load) for name in names]
    for future in first:
        if error := future.exception():
            return BundleError(f"jax cannot load the bundle in {directory}: {error}")
    return bundled
