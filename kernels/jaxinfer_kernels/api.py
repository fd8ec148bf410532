"""The public ops of attention: arguments checked by name, then the backend for the platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, overload

import jax

from jaxinfer_kernels import xla
from jaxinfer_kernels.checks import (
    check_backend,
    check_kv_scales,
    check_mla_paged_attention,
    check_paged_attention,
    has_layout,
)
from jaxinfer_kernels.cpu import attention as cpu
from jaxinfer_kernels.layout import AttentionMetadata, Backend, KVPages, kv_pages_shape, mla_pages_shape


def _tpu_paged_attention(*args: Any, **options: Any) -> Any:
    # Importing a Pallas backend takes 0.3 s, which only those pay who use it.
    from jaxinfer_kernels.tpu.attention import paged_attention

    return paged_attention(*args, **options)


def _tpu_mla_paged_attention(*args: Any, **options: Any) -> Any:
    from jaxinfer_kernels.tpu.attention import mla_paged_attention

    return mla_paged_attention(*args, **options)


def _gpu_mla_paged_attention(*args: Any, **options: Any) -> Any:
    from jaxinfer_kernels.gpu.mla import mla_paged_attention

    return mla_paged_attention(*args, **options)


def _gpu_paged_attention(*args: Any, **options: Any) -> Any:
    from jaxinfer_kernels.gpu.attention import paged_attention

    return paged_attention(*args, **options)


# Each op by backend. All take the public op's arrays by place and its options by name, and give the
# log-sum-exp; Pallas kernels take `interpret`, and tpu `return_lse`, since it costs something there. A
# backend is added here and in layout.py.
_PAGED_ATTENTION: Mapping[Backend, Callable[..., Any]] = {
    "cpu": cpu.paged_attention,
    "tpu": _tpu_paged_attention,
    "gpu": _gpu_paged_attention,
    "xla": xla.paged_attention,
}
_MLA_PAGED_ATTENTION: Mapping[Backend, Callable[..., Any]] = {
    "tpu": _tpu_mla_paged_attention,
    "gpu": _gpu_mla_paged_attention,
    "xla": xla.mla_paged_attention,
}

# What the platform that is lowered for runs with backend="auto"; any other runs xla.
_PLATFORM_BACKENDS: Mapping[str, Backend] = {"tpu": "tpu", "cuda": "gpu"}


@overload
def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: Literal[False] = False,
    backend: Backend | Literal["auto"] = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, KVPages]: ...


@overload
def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: Literal[True],
    backend: Backend | Literal["auto"] = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, KVPages]: ...


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    backend: Backend | Literal["auto"] = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, KVPages] | tuple[jax.Array, jax.Array, KVPages]:
    """Writes a step's keys and values into their pages, then attends to everything up to each query.

    A sequence's output depends on its own queries, keys and values alone, bit for bit: not on the
    batch, the pages' places, nor on chunks that end at multiples of the prefill tile.

    Args:
      q: [T, N, H] queries, rotated.
      k: [T, K, H] keys, rotated; N is a multiple of K. In q's dtype.
      v: [T, K, H] values, in q's dtype.
      kv_pages: the layer's cache, donated by the caller so that it is written in place. int8 and
        float8_e4m3fn caches get a scale a token and head, which multiplies logits and weights.
      metadata: which rows belong to which sequence, and where their pages lie.
      scale: multiplies q.k.
      sliding_window: a query sees so many positions, its own included; None sees all.
      attention_chunk: c lets a query at position p see those from p // c * c on (Llama 4's
        chunked-local attention); None sees all.
      soft_cap: c in c * tanh(logits / c); None is off.
      sinks: [N] f32, a further logit a head, neither scaled nor capped, that takes weight and gives no
        value (gpt-oss).
      return_lse: whether to give the log of each query's sum of exponentials, the sink's included.
      backend: "auto" is the backend whose layout the pages have; where several share it, the one of
        the platform that is lowered for. "cpu" is taken by name alone, after `cpu.build.load`.
      interpret: runs the kernel of a named backend, tpu or gpu, by interpretation on the CPU.

    Returns:
      [T, N, H] outputs in q's dtype, with `return_lse` then [T, N] f32, and the pages. Padding rows
      hold what they like.

    Raises:
      ValueError: an argument does not fit or the backend does not support it, by the argument's name.
    """
    check_paged_attention(
        q,
        k,
        v,
        kv_pages,
        metadata,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    check_backend("paged_attention", tuple(_PAGED_ATTENTION), backend, interpret)
    num_pages, page_size = kv_pages.data.shape[0], kv_pages.page_size
    num_kv_heads, head_dim = k.shape[1:]
    fitting: dict[Backend, Callable[..., Any]] = {}
    for name, function in _PAGED_ATTENTION.items():
        layout = kv_pages_shape(num_pages, page_size, num_kv_heads, head_dim, name)
        by_name = backend == name or (backend == "auto" and name != "cpu")
        if by_name and has_layout(kv_pages, layout, name):
            check_kv_scales(kv_pages, num_kv_heads, name)
            options = {} if name in ("cpu", "xla") else {"interpret": interpret}
            if name == "tpu":
                options["return_lse"] = return_lse
            fitting[name] = partial(
                function,
                scale=scale,
                sliding_window=sliding_window,
                attention_chunk=attention_chunk,
                soft_cap=soft_cap,
                **options,
            )
    if not fitting:
        raise ValueError(
            f"kv_pages.data{kv_pages.data.shape} ({kv_pages.data.dtype}) is not in the layout of "
            f"backend={backend!r}: see "
            f"kv_pages_shape({num_pages}, {page_size}, {num_kv_heads}, {head_dim}, backend)"
        )
    out, lse, kv_pages = _run(fitting, q, k, v, kv_pages, metadata, sinks)
    return (out, lse, kv_pages) if return_lse else (out, kv_pages)


def mla_paged_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    scale: float,
    backend: Backend | Literal["auto"] = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, KVPages]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with its projections absorbed.

    All heads share one latent vector a token, which is value and, beside a rotary part, key: the cache
    holds R + Hr numbers a token. A logit is scale * (q_latent . latent + q_rope . k_rope); with
    q_latent = W_uk^T q_nope, and W_uv applied to the output, that is attention with a key W_uk latent
    and a value W_uv latent of each head's own.

    Args:
      q_latent: [T, N, R] queries, brought into the latent space.
      q_rope: [T, N, Hr] their rotary parts, rotated.
      latent: [T, R] the tokens' latent vectors, normalised.
      k_rope: [T, Hr] their rotary keys, rotated.
      kv_pages: of `create_mla_pages`, donated by the caller so that it is written in place.
      metadata: as for `paged_attention`.
      scale: multiplies the logits.
      backend: as for `paged_attention`.
      interpret: as for `paged_attention`.

    Returns:
      [T, N, R] outputs in the latent space, in q_latent's dtype, and the pages.

    Raises:
      ValueError: an argument does not fit, by its name.
    """
    check_mla_paged_attention(q_latent, q_rope, latent, k_rope, kv_pages, metadata)
    check_backend("mla_paged_attention", tuple(_MLA_PAGED_ATTENTION), backend, interpret)
    sizes = (kv_pages.data.shape[0], kv_pages.page_size, latent.shape[1], k_rope.shape[1])
    fitting: dict[Backend, Callable[..., Any]] = {
        name: partial(function, scale=scale, **({} if name == "xla" else {"interpret": interpret}))
        for name, function in _MLA_PAGED_ATTENTION.items()
        if backend in ("auto", name) and has_layout(kv_pages, mla_pages_shape(*sizes, name), name)
    }
    if not fitting:
        raise ValueError(
            f"kv_pages.data{kv_pages.data.shape} ({kv_pages.data.dtype}) is not in the layout of "
            f"backend={backend!r}: see mla_pages_shape{(*sizes, backend)}"
        )
    return _run(fitting, q_latent, q_rope, latent, k_rope, kv_pages, metadata)


def _run(implementations: Mapping[Backend, Callable[..., Any]], *args: Any) -> Any:
    """Calls the only implementation, or that of the platform that is lowered for."""
    if len(implementations) == 1:
        return next(iter(implementations.values()))(*args)
    branches = {
        platform: implementations[backend]
        for platform, backend in _PLATFORM_BACKENDS.items()
        if backend in implementations
    }
    return jax.lax.platform_dependent(*args, **branches, default=implementations["xla"])
