"""Compiles the real steps for a chip that need not be there, and reads their bytes off the compiler.

Only the program of the most rows is compiled of each kind. Smaller ones are taken to have no more
temporaries and no more code. Each pipeline stage is compiled for a slice of its own.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from jaxinfer.config import ConfigError, EngineConfig, MeshConfig
from jaxinfer.engine.compilation import bypass_persistent_cache
from jaxinfer.engine.prepare import compile_engine, engine_key
from jaxinfer.engine.programs import forward_name, logprobs_name, sample_name, stage_name, step_lowerings
from jaxinfer.engine.step_batch import StepBatcher
from jaxinfer.memory.bundle import write_bundle
from jaxinfer.memory.chips import Chip
from jaxinfer.memory.gpu_targets import GPU_TARGETS
from jaxinfer.memory.ledger import CompiledBytes
from jaxinfer.memory.planning import Plan
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weights import abstract_stages
from jaxinfer.parallel.layout import row_share
from jaxinfer.parallel.mesh import make_meshes, mesh_over, tensor_parallel

# Slices that Cloud TPU offers, by the number of chips.
_SLICES: Mapping[int, Mapping[int, str]] = MappingProxyType(
    {
        2: {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
        3: {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8"},
    }
)
# Of these, those that are one host's and that the compiler would not take for one: it gives each 4 chips.
_ONE_HOST: Mapping[str, list[int]] = MappingProxyType(
    {"1x1": [1, 1, 1], "1x1x1": [1, 1, 1], "2x4": [2, 4, 1]}
)
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_GPUS_A_HOST = 8
_CUDA_PLUGIN = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
_MAX_REASON = 400  # characters of a compiler's message


@dataclass(frozen=True)
class CompiledStep:
    """One program as the compiler made it; bytes are of one device.

    Attributes:
      name: as in the engine's table of programs.
      num_programs: programs of its kind that serving compiles.
      argument_bytes: weights, cache and the step's arrays.
      alias_bytes: of the arguments, those whose memory the results take: the donated ones.
      temp_bytes, code_bytes: temporaries, and the program itself.
      collectives: how many there are of each.
      kernels: Mosaic kernels that it calls.
      compile_s: seconds to lower and compile.
    """

    name: str
    num_programs: int
    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    collectives: Mapping[str, int]
    kernels: int
    compile_s: float


@dataclass(frozen=True)
class LargestProgram:
    """Of a kind of program, the one with the most rows.

    Attributes:
      name: as in the engine's table of programs.
      lower: lowers it.
      num_programs: programs of its kind that serving compiles.
    """

    name: str
    lower: Callable[[], Lowered]
    num_programs: int

    @cached_property
    def compiled(self) -> Compiled:
        """Compiled once.

        Raises:
          ConfigError: the compiler finds that it does not fit.
        """
        try:
            return self.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{self.name} does not compile: {reason[:_MAX_REASON]}") from error


def largest_programs(plan: Plan, meshes: Sequence[Mesh | None]) -> tuple[tuple[LargestProgram, ...], ...]:
    """Of each pipeline stage of a plan the decode and the prefill step; of the last stage also the sampling
    and the prompt log-probabilities step. `meshes` are the stages'.
    """
    stages = abstract_stages(plan.model, jnp.dtype(plan.resolved.dtype), meshes)
    return tuple(_largest_of_stage(plan, *stage) for stage in zip(stages, meshes, strict=True))


def _largest_of_stage(plan: Plan, model: Transformer, mesh: Mesh | None) -> tuple[LargestProgram, ...]:
    resolved, stage = plan.resolved, model.config.stage
    batcher = StepBatcher(resolved.scheduler, resolved.cache)
    lowerings = step_lowerings(model, batcher, resolved.cache, resolved.scheduler, mesh)
    buckets = batcher.buckets
    kinds = [
        {forward_name(bucket): bucket.num_rows for bucket in buckets if not bucket.num_prefill_rows},
        {forward_name(bucket): bucket.num_rows for bucket in buckets if bucket.num_prefill_rows},
    ]
    if stage.is_last:
        # By the rows of a device; of those with as many, the largest.
        sizes, tensor = reversed(batcher.sample_sizes), tensor_parallel(mesh)
        kinds.append({sample_name(size): row_share(size, tensor) for size in sizes})
        kinds.append({logprobs_name(rows): rows for rows in batcher.prefill_sizes})
    programs = []
    for kind in kinds:
        largest = stage_name(max(kind, key=lambda name: kind[name]), stage.index, stage.num_stages)
        programs.append(LargestProgram(largest, lowerings[largest], len(kind)))
    return tuple(programs)


def compile_step(program: LargestProgram) -> CompiledStep:
    """The program, compiled.

    Raises:
      ConfigError: the compiler finds that it does not fit.
    """
    start_s = time.monotonic()
    compiled = program.compiled
    seconds = time.monotonic() - start_s
    memory = compiled.memory_analysis()
    if memory is None:
        raise ConfigError(f"{program.name}: this compiler does not tell the bytes of a program")
    text = compiled.as_text() or ""
    return CompiledStep(
        name=program.name,
        num_programs=program.num_programs,
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        collectives=dict(Counter(_COLLECTIVE.findall(text))),
        kernels=text.count('custom_call_target="tpu_custom_call"'),
        compile_s=seconds,
    )


def write_engine_bundle(
    config: EngineConfig, plan: Plan, meshes: Sequence[Mesh | None], made: Sequence[LargestProgram]
) -> Path:
    """Writes every program that the engine would serve with there to `config.bundle`; `made` are compiled.

    An engine finds the bundle where it has the plan's number of pages and length limit: the same flags give
    them, but for what its devices' memory is more or less than the chip's published one.

    Raises:
      OSError: it cannot be written.
    """
    assert config.bundle is not None
    known = {program.name: program.compiled for program in made}
    programs = compile_engine(plan.model, plan.resolved, meshes, made=known)
    key = engine_key(config, plan.model, plan.resolved, meshes)
    return write_bundle(Path(config.bundle), key, programs.by_name)


def compiled_bytes(plan: Plan, stages: Sequence[Sequence[CompiledStep]]) -> tuple[CompiledBytes, ...]:
    """The bytes of each stage's compiled steps. All programs of a kind count with the largest one's code."""
    found, num_pages = [], plan.resolved.cache.num_pages
    for (decode, prefill, *sampling), memory in zip(stages, plan.resolved.memory.stages, strict=True):
        compiled = CompiledBytes(
            # The cache is what a step writes in place. A TPU pads the last dimension to 128.
            page_bytes=max(memory.page_bytes, -(-decode.alias_bytes // num_pages)),
            activations=max(decode.temp_bytes, prefill.temp_bytes),
            logits=max((step.temp_bytes for step in sampling), default=0),
            programs=sum(step.code_bytes * step.num_programs for step in (decode, prefill, *sampling)),
        )
        found.append(compiled)
    return tuple(found)


def described_meshes(plan: Plan) -> tuple[Mesh | None, ...]:
    """Each stage's mesh, over devices of a described topology; over the CPU's own for `cpu`. From then on
    everything is compiled anew.

    Raises:
      ConfigError: the compiler for the chip is not installed, or has no such slice.
    """
    # Programs for absent devices cannot be read back from the cache here, and those in it not be bundled.
    bypass_persistent_cache()
    chip, mesh = plan.chip, plan.mesh
    if chip.platform == "cpu":
        return make_meshes(mesh, jax.devices("cpu"))
    describe = _described_tpu if chip.platform == "tpu" else _described_gpus
    # Even one device needs a mesh, which says that it is not this machine's.
    return (mesh_over(describe(chip, mesh.stage), mesh),) * mesh.pipe


def _described_gpus(chip: Chip, mesh: MeshConfig) -> Sequence[Any]:
    """One host's, or hosts of 8 each."""
    num_hosts, rest = divmod(mesh.num_devices, _GPUS_A_HOST)
    if mesh.num_devices > _GPUS_A_HOST and rest:
        raise ConfigError(
            f"mesh={mesh} has {mesh.num_devices} devices: use up to {_GPUS_A_HOST}, or a multiple of them"
        )
    shape = f"1x{max(num_hosts, 1)}x{min(mesh.num_devices, _GPUS_A_HOST)}"
    options = {"target_config": GPU_TARGETS[chip.name], "topology": shape}
    try:
        return topologies.get_topology_desc(chip.name, platform="cuda", **options).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{chip.name} cannot be described: {reason[:_MAX_REASON]}; compiling for GPUs needs jax's CUDA "
            f"plugin: pip install --no-deps {' '.join(_CUDA_PLUGIN)} (the first two in jax's version)"
        ) from error


def _described_tpu(chip: Chip, mesh: MeshConfig) -> Sequence[Any]:
    num_chips, rest = divmod(mesh.num_devices, chip.num_devices)
    slices = _SLICES[chip.topology_dims]
    if rest or num_chips not in slices:
        sizes = ", ".join(str(size * chip.num_devices) for size in slices)
        raise ConfigError(
            f"mesh={mesh} has {mesh.num_devices} devices, and {chip.name} slices have {sizes}: use one"
        )
    hosts = _ONE_HOST.get(slices[num_chips])
    options = {"chips_per_host_bounds": hosts} if hosts else {}
    name = f"{chip.name}:{slices[num_chips]}"
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{name} cannot be described: {reason[:_MAX_REASON]}; compiling for TPUs needs libtpu, which "
            "the extra plan brings: pip install -e '.[plan]' where jaxinfer's source is"
        ) from error
    if len(devices) != mesh.num_devices:
        raise ConfigError(
            f"chip={chip.name} is not compiled for: of {name} the compiler shows {len(devices)} devices, not "
            f"{mesh.num_devices}; leave out --compile"
        )
    return devices
