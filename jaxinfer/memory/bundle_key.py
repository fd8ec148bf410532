"""What compiled programs are keyed by: all that shapes them, found without tracing or lowering anything."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import jax

import jaxinfer_kernels
from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

# What else compiles or runs a platform's programs, and writes it into them.
_PLUGINS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt"), "cpu": ()}
)
_PACKAGES = (Path(__file__).parents[1], Path(jaxinfer_kernels.__file__).parent)
_SOURCE_SUFFIXES = (".py", ".json", ".cc", ".h")
# Of jax's own configuration, what changes what our functions are traced to.
_JAX_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl")


class Device(Protocol):
    """What is asked of a `jax.Device`, or of a described topology's."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


def bundle_key(
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    device: Device,
    num_hosts: int = 1,
    stages: Sequence[int] = (0,),
) -> dict[str, str]:
    """The key, a name and a value for each thing that must agree.

    Args:
      config: for the mesh and XLA's flags.
      model: of the checkpoint, before it is laid out for the mesh; it says whose kernels multiply.
      dtype: of the weights, resolved; so are the following.
      cache: the sizes of the KV cache.
      scheduler: the limits of a step.
      device: one of the mesh's, which are all alike.
      num_hosts: that the mesh spans.
      stages: of the pipeline, those that this host has a part of.
    """
    # What a checkpoint says of its tokens shapes no program; whose products they are is said apart.
    shape = repr(replace(model, bos_token_id=None, eos_token_ids=(), matmul="xla"))
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "mesh": config.mesh,
        "num_hosts": str(num_hosts),
        "stages": " ".join(map(str, stages)),
        "model": f"{model.architecture} {hashlib.sha256(shape.encode()).hexdigest()[:16]}",
        "dtype": dtype,
        "kv_cache_dtype": cache.dtype,
        "backend": cache.backend,
        "matmul": model.matmul,
        "max_model_len": str(scheduler.max_model_len),
        "max_num_seqs": str(scheduler.max_num_seqs),
        "max_num_batched_tokens": str(scheduler.max_num_batched_tokens),
        "page_size": str(cache.page_size),
        "num_pages": str(cache.num_pages),
        "jax_options": " ".join(f"{name}={getattr(jax.config, name)}" for name in _JAX_OPTIONS),
        "xla_flags": config.xla_flags,
        **versions(device.platform),
        **(_host() if device.platform == "cpu" else {}),
        "jaxinfer": source_digest(),
    }


def versions(platform_name: str) -> dict[str, str]:
    """Of all that compiles, and of Python, whose pickles a bundle holds."""
    found = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
    }
    for name in _PLUGINS.get(platform_name, ()):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _host() -> dict[str, str]:
    """A CPU's programs use all of its instructions, and split their work by its cores."""
    count_cores = getattr(os, "sched_getaffinity", None)
    info = _cpuinfo()
    return {
        "machine": platform.machine(),
        "cpu": info.get("model name") or platform.processor(),
        "cpu_features": " ".join(sorted((info.get("flags") or info.get("Features") or "").split())),
        "cores": str(len(count_cores(0)) if count_cores else os.cpu_count()),
    }


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first CPU: "flags" on x86, "Features" on ARM; nothing elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


@functools.cache
def source_digest() -> str:
    """Of all source of the runtime and the kernels: their version, and safe where somebody edits them.

    A program's own hash would need its lowering, which takes longer than loading it.
    """
    digest = hashlib.sha256()
    for path in _source_files():
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _source_files() -> Iterator[Path]:
    for package in _PACKAGES:
        yield from sorted(path for path in package.rglob("*") if path.suffix in _SOURCE_SUFFIXES)
