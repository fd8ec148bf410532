"""What fits on a chip that need not be there, how fast it could go, and what to change if it does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxinfer.config import ConfigError, EngineConfig, MeshConfig, ModelConfig, parse_mesh
from jaxinfer.engine.cpu_kernels import load_cpu_kernels
from jaxinfer.engine.page_pool import pages_for
from jaxinfer.engine.resolve import ResolvedConfig, resolve
from jaxinfer.memory.chips import GIB, Chip
from jaxinfer.memory.ledger import CompiledBytes, DoesNotFitError
from jaxinfer.memory.roofline import Roofline, decode_roofline, prefill_roofline

MAX_DEVICES = 1024  # beyond which no advice goes


@dataclass(frozen=True)
class Plan:
    """An engine's sizes on a mesh of chips, as the engine itself would choose them.

    Attributes:
      resolved: what one data-parallel group has.
      model, chip: of what, on what.
      mesh: data-parallel groups, each with pages and slots of its own, the devices in each, and stages.
      mean_len: tokens of a request on average.
    """

    resolved: ResolvedConfig
    model: ModelConfig
    chip: Chip
    mesh: MeshConfig
    mean_len: int

    @property
    def num_groups(self) -> int:
        return self.mesh.data

    @property
    def num_chips(self) -> float:
        return self.mesh.num_devices / self.chip.num_devices

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, in all groups."""
        cache = self.resolved.cache
        return self.num_groups * (cache.num_pages - 1) * cache.page_size

    def num_requests(self, num_tokens: int) -> int:
        """Requests of so many tokens that run together, in all groups: by pages and by slots."""
        cache = self.resolved.cache
        held = (cache.num_pages - 1) // pages_for(num_tokens, cache.page_size)
        return self.num_groups * min(held, self.resolved.scheduler.max_num_seqs)

    @property
    def largest_context(self) -> int:
        """Tokens of one request, where it has a group's KV cache to itself."""
        page_size = self.resolved.cache.page_size
        held = (self.resolved.available_pages - 1) * page_size
        return min(held, self.model.max_position_embeddings)

    @property
    def limited_by(self) -> str:
        """What keeps more requests of the mean length from running."""
        slots = self.num_groups * self.resolved.scheduler.max_num_seqs
        if self.num_requests(self.mean_len) < slots:
            return "memory: the pages of the KV cache"
        return f"max_num_seqs={self.resolved.scheduler.max_num_seqs}"

    def decode(self, batch: int | None) -> Roofline | None:
        """A decode step of each group, of `batch` requests in all steps in flight; None is as many as fit.

        Raises:
          ConfigError: so many do not run together.
        """
        most = self.num_requests(self.mean_len)
        if batch is not None and batch > most:
            raise ConfigError(
                f"batch={batch} must be at most {most}, the requests of {self.mean_len} tokens that run "
                f"together, limited by {self.limited_by}"
            )
        num_seqs = -(-(batch or most) // (self.num_groups * self.mesh.pipe))
        return decode_roofline(self.resolved.memory, self.chip, num_seqs, self.mean_len)

    def prefill(self) -> Roofline | None:
        """The largest prefill step of each group."""
        memory = self.resolved.memory
        return prefill_roofline(memory, self.chip, memory.max_num_batched_tokens)


def make_plan(
    config: EngineConfig,
    model: ModelConfig,
    chip: Chip,
    quantize: str,
    mean_len: int,
    compiled: tuple[CompiledBytes, ...] = (),
) -> Plan:
    """The engine's sizes on that chip; see `resolve`.

    Raises:
      DoesNotFitError: it does not fit.
      ConfigError: the flags or the mesh do not go with the model.
    """
    cpu_kernels = load_cpu_kernels(config, chip)
    resolved = resolve(config, model, chip, quantize, compiled, cpu_kernels=cpu_kernels)
    model = replace(model, matmul=resolved.matmul)
    length = min(mean_len, resolved.scheduler.max_model_len)
    return Plan(resolved, model, chip, parse_mesh(config.mesh), length)


@dataclass(frozen=True)
class Change:
    """Something that would make it fit: what to change, and what comes of it."""

    change: str
    outcome: str


def advice(
    error: DoesNotFitError, config: EngineConfig, model: ModelConfig, chip: Chip, quantize: str
) -> tuple[Change, ...]:
    """What would make it fit, the least change first.

    Fewer pages than asked for; another mesh of the same chips; quantised weights; shorter requests; more
    chips in a group, or in stages where that is too few; and last, how much would have to stay in the host's
    memory.
    """

    def fits(config: EngineConfig, quantize: str = quantize) -> Plan | None:
        try:
            return make_plan(config, model, chip, quantize, mean_len=1)
        except ConfigError:
            return None

    def quantised(format: str) -> tuple[str, Plan | None]:
        """On the mesh as it is, else on another of as many devices, else on a larger one."""
        for mesh in (config.mesh, *_meshes_as_large(config), *_larger_meshes(config)):
            if plan := fits(config.replace(mesh=mesh), format):
                return f"--quantize={format}" + (f" --mesh={mesh}" if mesh != config.mesh else ""), plan
        return "", None

    def candidates() -> Iterator[tuple[str, Plan | None]]:
        fewer = None if config.num_pages is None else fits(config.replace(num_pages=None))
        if fewer is not None and fewer.resolved.cache.num_pages < (config.num_pages or 0):
            yield f"--num_pages={fewer.resolved.cache.num_pages}", fewer
        for mesh in _meshes_as_large(config):
            yield f"--mesh={mesh}", fits(config.replace(mesh=mesh))
        if quantize == "none":
            yield from (quantised("int8"), quantised("int4"))
        shorter = fits(config.replace(max_model_len=None))
        if shorter is not None:
            yield f"--max_model_len={shorter.resolved.scheduler.max_model_len}", shorter
        meshes = itertools.chain.from_iterable(zip(_larger_meshes(config), _more_stages(config), strict=True))
        larger = ((mesh, fits(config.replace(mesh=mesh))) for mesh in meshes)
        yield next(((f"--mesh={mesh}", plan) for mesh, plan in larger if plan), ("", None))

    changes = [Change(change, _outcome(plan)) for change, plan in candidates() if plan is not None]
    excess_bytes = error.ledger.device_bytes - error.budget_bytes
    if excess_bytes > 0:
        text = f"{excess_bytes / GIB:.2f} GiB a device would have to stay in the host's memory, which "
        changes.append(Change("offload", f"{text}this version cannot do"))
    return tuple(changes)


def _outcome(plan: Plan) -> str:
    limit = plan.resolved.scheduler.max_model_len
    num_requests = plan.num_requests(limit)
    return (
        f"{plan.resolved.ledger().weights / GIB:.2f} GiB of weights a device, {plan.kv_tokens:,} tokens of "
        f"KV cache, {num_requests:,} request{'s' * (num_requests != 1)} of {limit:,} tokens"
    )


def _meshes_as_large(config: EngineConfig) -> Iterator[str]:
    """With more devices a group, and fewer groups."""
    mesh = parse_mesh(config.mesh)
    for ways in range(2, mesh.data + 1):
        if mesh.data % ways == 0:
            yield str(replace(mesh, data=mesh.data // ways, tensor=mesh.tensor * ways))


def _larger_meshes(config: EngineConfig) -> Iterator[str]:
    """One group of ever more devices, beyond those there are."""
    num_devices = parse_mesh(config.mesh).num_devices
    while num_devices <= MAX_DEVICES // 2:
        num_devices *= 2
        yield f"1x{num_devices}"


def _more_stages(config: EngineConfig) -> Iterator[str]:
    """Ever more stages of the devices that there are, as many in all as `_larger_meshes` has."""
    mesh = parse_mesh(config.mesh)
    while mesh.num_devices <= MAX_DEVICES // 2:
        mesh = replace(mesh, pipe=mesh.pipe * 2)
        yield str(mesh)
