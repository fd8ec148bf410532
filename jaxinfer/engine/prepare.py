"""The programs of an engine: loaded from a bundle where there is one that fits, else compiled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.compilation import CompilationCounter
from jaxinfer.engine.programs import Programs, compile_programs, first_needed, stage_index
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.engine.step_batch import StepBatcher
from jaxinfer.memory.bundle import BundleError, load_in_background, open_bundle, write_bundle
from jaxinfer.memory.bundle_key import bundle_key
from jaxinfer.models.weights import abstract_stages


def prepare_programs(
    config: EngineConfig,
    model: ModelConfig,
    resolved: ResolvedConfig,
    meshes: Sequence[Mesh | None],
    counter: CompilationCounter,
) -> Programs:
    """All programs that serving can need. With a bundle none is compiled, and those that a first request
    needs are loaded when this returns; a thread loads the others, and a step that comes before waits for
    its own alone. `meshes` are the stages'.
    """
    if config.bundle is None:
        return _compile(model, resolved, meshes, counter)
    directory = Path(config.bundle)
    devices = [jax.devices()[:1] if mesh is None else list(mesh.devices.flat) for mesh in meshes]
    key = bundle_key(config, model, resolved.dtype, resolved.cache, resolved.scheduler, devices[0][0])
    try:
        return _load(directory, key, devices, StepBatcher(resolved.scheduler, resolved.cache))
    except BundleError as error:
        logging.warning("compiling: %s", error)
    programs = _compile(model, resolved, meshes, counter)
    try:
        logging.info("wrote the bundle %s", write_bundle(directory, key, programs.by_name()))
    except OSError as error:
        logging.warning("the bundle could not be written to %s: %s", directory, error.strerror or error)
    return programs


def _compile(
    model: ModelConfig,
    resolved: ResolvedConfig,
    meshes: Sequence[Mesh | None],
    counter: CompilationCounter,
) -> Programs:
    stages = abstract_stages(model, jnp.dtype(resolved.dtype), meshes)
    return compile_programs(stages, resolved.cache, resolved.scheduler, meshes, counter)


def _load(
    directory: Path, key: dict[str, str], devices: Sequence[Sequence[Any]], batcher: StepBatcher
) -> Programs:
    """Raises BundleError where there is no bundle, or jax cannot load it. `devices` are each stage's."""
    bundled = open_bundle(directory, key, lambda name: devices[stage_index(name)])
    programs = Programs.of(batcher, bundled, len(devices))
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(bundled[name].load) for name in first_needed(batcher, len(devices))]
    for future in first:
        if error := future.exception():
            raise BundleError(f"jax cannot load the bundle in {directory}: {error}") from error
    load_in_background(bundled.values())
    logging.info("%d programs from the bundle in %s", len(bundled), directory)
    return programs
