"""What the user left open, decided once: sizes and dtypes from the flags, the model and the device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

from absl import logging

from jaxinfer.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    parse_mesh,
)
from jaxinfer.engine.step_batch import PREFILL_TILE, padded_rows
from jaxinfer.memory.ledger import GIB, choose_num_pages, itemsize, kv_bytes_per_token
from jaxinfer.parallel.layout import device_share, padding
from jaxinfer_kernels import kv_tile_tokens

# On a host, whose memory other programs share, the cache takes so much unless told otherwise.
CPU_KV_CACHE_BYTES = GIB
DTYPES = ("float32", "bfloat16", "float16")


class Device(Protocol):
    """What is asked of a `jax.Device`."""

    @property
    def platform(self) -> str: ...

    def memory_stats(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class ResolvedConfig:
    """Everything that the engine's parts need, with nothing left to derive."""

    dtype: str
    scheduler: SchedulerConfig
    cache: CacheConfig


def check(config: EngineConfig) -> None:
    """What can be refused before a file is opened.

    Raises:
      ConfigError: names the flag, its value, and what it may be.
    """
    if parse_mesh(config.mesh).data > 1:
        raise ConfigError(f"mesh={config.mesh} must be 1xT: no data-parallel groups yet")
    for name in ("dtype", "kv_cache_dtype"):
        value = getattr(config, name)
        if value not in ("auto", *DTYPES):
            raise ConfigError(f"{name}={value!r} must be auto, {', '.join(DTYPES)}")
    for name in ("max_num_seqs", "max_num_batched_tokens", "page_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be 1 or more")
    for name in ("max_model_len", "num_pages", "kv_cache_bytes"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be 1 or more")
    if config.max_num_batched_tokens < PREFILL_TILE:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} must be {PREFILL_TILE} or more"
        )
    if not 0.0 < config.memory_utilization <= 1.0:
        raise ConfigError(f"memory_utilization={config.memory_utilization} must be over 0 and at most 1")
    try:
        kv_tile_tokens(config.page_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def resolve(config: EngineConfig, model: ModelConfig, device: Device) -> ResolvedConfig:
    """Sizes and dtypes for this model on this device.

    Raises:
      ConfigError: the model cannot do what is asked, or it does not fit.
    """
    check(config)
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
    mesh = parse_mesh(config.mesh)
    for name, (before, after) in padding(model, mesh.tensor).items():
        logging.info("mesh=%s: %s is laid out as %d instead of %d", mesh, name, after, before)
    size = itemsize(kv_dtype)
    share = device_share(model, mesh.tensor)
    budget_bytes = config.kv_cache_bytes or _kv_budget(config, share, device, itemsize(dtype))
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} must be at most {model.max_position_embeddings}, "
            "the model's own limit; --rope_scaling can stretch it"
        )
    if config.max_model_len is None:
        # Nobody asked for the model's own limit, which may be far more than the cache holds.
        token_bytes = kv_bytes_per_token(share, size)
        held = config.num_pages * config.page_size if config.num_pages else budget_bytes // token_bytes
        fitting = max(held // config.page_size - 1, 1) * config.page_size
        if fitting < max_model_len:
            logging.info(
                "max_model_len is %d: the KV cache holds no more of the model's %d", fitting, max_model_len
            )
            max_model_len = fitting
    num_pages = choose_num_pages(
        share,
        page_size=config.page_size,
        itemsize=size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_pages=config.num_pages,
        budget_bytes=budget_bytes,
    )
    max_num_batched_tokens = config.max_num_batched_tokens
    if config.enable_chunked_prefill:
        # No step has more prefill rows than all slots at the length limit.
        padded = padded_rows(max_model_len)
        max_num_batched_tokens = min(max_num_batched_tokens, padded * config.max_num_seqs)
    scheduler = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        scheduling=config.scheduling,
    )
    return ResolvedConfig(dtype, scheduler, CacheConfig(config.page_size, num_pages, kv_dtype))


def _kv_budget(config: EngineConfig, share: ModelConfig, device: Device, weight_bytes: int) -> int:
    """Bytes for the KV cache on each device: what `memory_utilization` leaves beside its weights."""
    num_weights = _num_weights(share)
    if device.platform == "cpu":
        num_devices = parse_mesh(config.mesh).num_devices  # which share the host's memory
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_devices
        left = int(total * config.memory_utilization) - num_weights * weight_bytes
        return max(0, min(CPU_KV_CACHE_BYTES, left))
    total = device.memory_stats()["bytes_limit"]  # type: ignore[index]
    return max(0, int(total * config.memory_utilization) - num_weights * weight_bytes)


def _num_weights(model: ModelConfig) -> int:
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    layer = model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)
    embeddings = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    return layer * model.num_hidden_layers + embeddings
