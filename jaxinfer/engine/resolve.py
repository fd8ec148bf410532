"""What the user left open, decided once: sizes and dtypes from the flags, the model and the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from absl import logging

from jaxinfer.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    ModelConfig,
    SchedulerConfig,
    padded_rows,
    parse_mesh,
)
from jaxinfer.engine.page_pool import pages_for
from jaxinfer.memory.chips import GIB
from jaxinfer.memory.ledger import CompiledBytes, DoesNotFitError, Ledger, MemoryModel
from jaxinfer.parallel.layout import padding
from jaxinfer_kernels import Backend, kv_tile_tokens, prefill_tile_tokens
from jaxinfer_kernels.gpu import GPU_CAPABILITIES

# On a host, whose memory other programs share, the cache takes so much unless told otherwise.
CPU_KV_CACHE_BYTES = GIB
DTYPES = ("float32", "bfloat16", "float16")
SMALLEST_TPU_PAGE = 16  # tokens: rows that a TPU's memory is addressed by


class Device(Protocol):
    """What is asked of a `jax.Device`."""

    @property
    def platform(self) -> str: ...

    def memory_stats(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class ResolvedConfig:
    """Everything that the engine's parts need, with nothing left to derive.

    `memory` says what a device's bytes are for. Of them `budget_bytes` may be used, which leaves room for
    `available_pages` of the KV cache; of those the engine takes what its slots can use.
    """

    dtype: str
    matmul: Literal["cpu", "xla"]
    scheduler: SchedulerConfig
    cache: CacheConfig
    memory: MemoryModel
    budget_bytes: int
    available_pages: int

    def ledger(self, stages: Sequence[int] | None = None) -> Ledger:
        """Of a device of the fullest stage of all, or of these."""
        return self.memory.ledger(self.cache.num_pages, stages)

    def fullest_stage(self, stages: Sequence[int]) -> int:
        return self.memory.fullest_stage(self.cache.num_pages, stages)


def check(config: EngineConfig) -> None:
    """What can be refused before a file is opened.

    Raises:
      ConfigError: names the flag, its value, and what it may be.
    """
    parse_mesh(config.mesh)
    for name in ("dtype", "kv_cache_dtype"):
        value = getattr(config, name)
        if value not in ("auto", *DTYPES):
            raise ConfigError(f"{name}={value!r} must be auto, {', '.join(DTYPES)}")
    for name in ("max_num_seqs", "max_num_batched_tokens", "page_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be 1 or more")
    # A sequence is a token of prompt and one of answer at least; a page belongs to nobody.
    for name, least in (("max_model_len", 2), ("num_pages", 2), ("kv_cache_bytes", 1)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value} must be {least} or more")
    if not 0.0 < config.memory_utilization <= 1.0:
        raise ConfigError(f"memory_utilization={config.memory_utilization} must be over 0 and at most 1")
    try:
        kv_tile_tokens(config.page_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    device: Device,
    quantize: str = "none",
    compiled: tuple[CompiledBytes, ...] = (),
    *,
    cpu_kernels: bool = False,
) -> ResolvedConfig:
    """Sizes and dtypes for this model on this device.

    Args:
      config: what the user asks for.
      model: the model.
      device: one of the mesh's, or the stand-in of one that `jaxinfer.plan` asks about.
      quantize: how the projections are stored; the engine itself knows only "none".
      compiled: what the compiler says of each stage's programs; none is estimates.
      cpu_kernels: whether the C++ kernels are there for the device to run.

    Raises:
      DoesNotFitError: the model or a request at the length limit does not fit.
      ConfigError: the model cannot do what is asked.
    """
    check(config)
    dtype, kv_dtype = _dtypes(config, device)
    mesh = parse_mesh(config.mesh)
    cpu_kernels &= device.platform == "cpu"
    backend = _backend(config, device, dtype, kv_dtype, cpu_kernels=cpu_kernels)
    matmul = _matmul(config, mesh, dtype, cpu_kernels)
    tile = prefill_tile_tokens(backend)
    if config.max_num_batched_tokens < tile:
        raise ConfigError(f"max_num_batched_tokens={config.max_num_batched_tokens} must be {tile} or more")
    if (config.max_model_len or 0) > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len} must be at most {model.max_position_embeddings}, "
            "the model's own limit; --rope_scaling can stretch it"
        )
    for name, (before, after) in padding(model, mesh.tensor).items():
        logging.info("mesh=%s: %s is laid out as %d instead of %d", mesh, name, after, before)
    memory = MemoryModel(
        model,
        dtype,
        kv_dtype,
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_prefill_rows(config, model.max_position_embeddings, tile),
        tensor=mesh.tensor,
        pipe=mesh.pipe,
        quantize=quantize,
        on_host=device.platform == "cpu",
        compiled=compiled,
        backend=backend,
        apart=config.hosts is not None and mesh.pipe > 1,
    )
    total_bytes = _total_bytes(device, mesh, config.hosts.num_hosts if config.hosts else 1)
    budget_bytes = int(total_bytes * config.memory_utilization)
    available_pages = _available_pages(config, memory, total_bytes, budget_bytes)
    max_model_len = config.max_model_len or _longest_that_fits(config, memory, available_pages)
    num_pages = _num_pages(config, memory, max_model_len, available_pages, budget_bytes)
    planned = memory.ledger(num_pages)
    if planned.device_bytes > total_bytes:  # pages that were asked for by number or size
        raise DoesNotFitError(
            f"num_pages={num_pages} make {planned.device_bytes / GIB:.1f} GiB with the weights, and the "
            f"device has {total_bytes / GIB:.1f} GiB: lower num_pages or kv_cache_bytes",
            planned,
            budget_bytes,
        )
    memory = replace(memory, max_num_batched_tokens=_prefill_rows(config, max_model_len, tile))
    scheduler = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=memory.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        scheduling=config.scheduling,
        prefill_tile=tile,
        num_groups=mesh.data,
        num_waves=mesh.pipe,
    )
    cache = CacheConfig(config.page_size, num_pages, kv_dtype, backend)
    return ResolvedConfig(dtype, matmul, scheduler, cache, memory, budget_bytes, available_pages)


def _dtypes(config: EngineConfig, device: Device) -> tuple[str, str]:
    """Of weights and activations, and of the KV cache."""
    on_cpu = device.platform == "cpu"
    dtype = config.dtype
    if dtype == "auto":
        # bfloat16 is 20 times slower than float32 on the CPU with few rows.
        dtype = "float32" if on_cpu else "bfloat16"
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if on_cpu and kv_dtype == "bfloat16":
        if config.kv_cache_dtype == "bfloat16":
            raise ConfigError(
                "kv_cache_dtype='bfloat16' must be float32 or float16 on the CPU, "
                "where XLA converts the whole cache at each step"
            )
        kv_dtype = "float32"
    return dtype, kv_dtype


def _backend(config: EngineConfig, device: Device, *dtypes: str, cpu_kernels: bool = False) -> Backend:
    """The attention kernels' backend: as asked, else a TPU's or CPU's own, and XLA's elsewhere."""
    fits_cpu = cpu_kernels and set(dtypes) == {"float32"}
    backend: Backend = "xla"
    if config.attention != "auto":
        backend = config.attention
    elif device.platform == "tpu":
        backend = "tpu"
    elif fits_cpu:
        backend = "cpu"
    if backend == "cpu" and not fits_cpu:
        raise ConfigError(
            "attention=cpu is for CPUs, with dtype and kv_cache_dtype float32 (here "
            f"{' and '.join(dtypes)} on a {device.platform}): use attention=xla"
        )
    capability = getattr(device, "compute_capability", None)
    if device.platform == "gpu" and capability not in GPU_CAPABILITIES:
        known = " or ".join(GPU_CAPABILITIES)
        if backend == "gpu":
            raise ConfigError(
                f"attention=gpu has kernels for GPUs of compute capability {known}, and this one's is "
                f"{capability}: use attention=xla"
            )
        if config.attention == "auto":
            logging.info(
                "attention=auto is plain XLA: there are kernels for GPUs of compute capability %s, and this "
                "one's is %s",
                known,
                capability,
            )
    if backend == "gpu" and dtypes not in {("bfloat16", "bfloat16"), ("float16", "float16")}:
        raise ConfigError(
            f"dtype={config.dtype!r} and kv_cache_dtype={config.kv_cache_dtype!r} must both be bfloat16 or "
            "both float16 with attention=gpu"
        )
    if backend == "tpu" and config.page_size < SMALLEST_TPU_PAGE:
        raise ConfigError(
            f"page_size={config.page_size} must be {SMALLEST_TPU_PAGE} or more with "
            f"attention={config.attention}"
        )
    if backend == "tpu" and "float16" in dtypes:
        raise ConfigError(
            f"dtype={config.dtype!r} and kv_cache_dtype={config.kv_cache_dtype!r} must not be float16 with "
            f"attention={config.attention}, whose kernel for TPUs has none: use bfloat16, or attention=xla"
        )
    return backend


def _matmul(config: EngineConfig, mesh: MeshConfig, dtype: str, cpu_kernels: bool) -> Literal["cpu", "xla"]:
    """Whose kernels multiply by the weights. XLA cannot divide a product of ours among devices."""
    fits = cpu_kernels and dtype == "float32" and mesh.tensor == 1
    if config.matmul == "cpu" and not fits:
        raise ConfigError(
            f"matmul=cpu is for CPUs, with dtype float32 (here {dtype}) and mesh=Dx1 (here {mesh}): use "
            "matmul=xla"
        )
    return "cpu" if fits and config.matmul != "xla" else "xla"


def _prefill_rows(config: EngineConfig, max_model_len: int, tile: int) -> int:
    """Of the largest step: no more than all slots have at the length limit."""
    if not config.enable_chunked_prefill:
        return config.max_num_batched_tokens
    return min(config.max_num_batched_tokens, padded_rows(max_model_len, tile) * config.max_num_seqs)


def _total_bytes(device: Device, mesh: MeshConfig, num_hosts: int) -> int:
    """The device's memory; a CPU's devices share the host's."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * num_hosts // mesh.num_devices
    return device.memory_stats()["bytes_limit"]  # type: ignore[index]


def _available_pages(config: EngineConfig, memory: MemoryModel, total_bytes: int, budget_bytes: int) -> int:
    """As many as asked for, or that the bytes asked for hold, or what is left beside everything else.

    Raises:
      DoesNotFitError: nothing is left.
    """
    if config.num_pages is not None:
        return config.num_pages
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes // memory.page_bytes
    rest = memory.ledger(0)
    if budget_bytes <= rest.device_bytes:
        raise DoesNotFitError(
            f"the model does not fit: {rest.weights / GIB:.2f} GiB of weights and "
            f"{(rest.device_bytes - rest.weights) / GIB:.2f} GiB of all but the KV cache are "
            f"{rest.device_bytes / GIB:.2f} GiB a device, of which {budget_bytes / GIB:.2f} may be used "
            f"({config.memory_utilization:g} of {total_bytes / GIB:.2f})",
            rest,
            budget_bytes,
        )
    return memory.pages_within(budget_bytes, CPU_KV_CACHE_BYTES if memory.on_host else budget_bytes)


def _longest_that_fits(config: EngineConfig, memory: MemoryModel, available_pages: int) -> int:
    """The length limit where nobody asked for one: the model's own may be far more than the cache holds."""
    longest = memory.model.max_position_embeddings
    fitting = max(available_pages - 1, 1) * config.page_size
    if fitting >= longest:
        return longest
    logging.info("max_model_len is %d: the KV cache holds no more of the model's %d", fitting, longest)
    return fitting


def _num_pages(
    config: EngineConfig, memory: MemoryModel, max_model_len: int, available_pages: int, budget_bytes: int
) -> int:
    """Pages to allocate, the null page included: as asked, else what all slots can use or the budget holds.

    Raises:
      DoesNotFitError: one request at the length limit does not fit.
    """
    pages_a_seq = pages_for(max_model_len, config.page_size)
    num_pages = config.num_pages
    if num_pages is None:
        num_pages = min(config.max_num_seqs * pages_a_seq + 1, available_pages)
    if num_pages - 1 < pages_a_seq:
        fitting = max(0, num_pages - 1)
        lower = f"lower max_model_len to {fitting * config.page_size}, or " if fitting else ""
        raise DoesNotFitError(
            f"max_model_len={max_model_len} needs {pages_a_seq} pages of {config.page_size} tokens "
            f"({pages_a_seq * memory.page_bytes / GIB:.2f} GiB of KV cache), but {fitting} fit: "
            f"{lower}raise kv_cache_bytes or num_pages",
            memory.ledger(max(0, num_pages)),
            budget_bytes,
        )
    return num_pages
