"""Arguments of the public ops, checked by name before any backend sees them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxinfer_kernels.layout import (
    KV_DTYPES,
    QUANTIZED_DTYPES,
    AttentionMetadata,
    Backend,
    KVPages,
    QueryTiles,
    kv_scales_shape,
    kv_tile_tokens,
)


def check_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    sliding_window: int | None,
    attention_chunk: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> None:
    """Raises ValueError where an argument of `api.paged_attention` does not fit. The layout is apart."""
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(f"q{q.shape}, k{k.shape} and v{v.shape} must be [T, N, H], [T, K, H], [T, K, H]")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q{q.shape} must have a multiple of k's heads, k{k.shape}")
    if q.dtype != k.dtype or q.dtype != v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q ({q.dtype}), k ({k.dtype}) and v ({v.dtype}) must have one float dtype")
    check_kv_pages(kv_pages)
    check_metadata(metadata, q.shape[0], kv_pages.page_size)
    positives = {"sliding_window": sliding_window, "attention_chunk": attention_chunk, "soft_cap": soft_cap}
    check_positive(positives)
    if sliding_window is not None and attention_chunk is not None:
        raise ValueError(
            f"sliding_window={sliding_window} and attention_chunk={attention_chunk}: one must be None"
        )
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.dtype != jnp.float32):
        raise ValueError(f"sinks{sinks.shape} ({sinks.dtype}) must be [{q.shape[1]}] float32")


def check_mla_paged_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
) -> None:
    """Raises ValueError where an argument of `api.mla_paged_attention` does not fit."""
    if q_latent.ndim != 3 or q_rope.ndim != 3 or q_latent.shape[:2] != q_rope.shape[:2]:
        raise ValueError(f"q_latent{q_latent.shape} and q_rope{q_rope.shape} must be [T, N, R], [T, N, Hr]")
    for name, keys, queries in (("latent", latent, q_latent), ("k_rope", k_rope, q_rope)):
        if keys.shape != queries.shape[::2]:
            raise ValueError(f"{name}{keys.shape} must be {queries.shape[::2]}")
    dtypes = {x.dtype for x in (q_latent, q_rope, latent, k_rope)}
    if len(dtypes) > 1 or not jnp.issubdtype(q_latent.dtype, jnp.floating):
        raise ValueError(f"q_latent, q_rope, latent and k_rope must have one float dtype, not {dtypes}")
    if kv_pages.dtype.name not in KV_DTYPES or kv_pages.dtype.name in QUANTIZED_DTYPES:
        raise ValueError(f"kv_pages.data ({kv_pages.dtype}) must hold float32, bfloat16 or float16")
    check_kv_pages(kv_pages)
    check_metadata(metadata, q_latent.shape[0], kv_pages.page_size)


def check_backend(op: str, implemented: tuple[Backend, ...], backend: str, interpret: bool) -> None:
    """Raises ValueError for a backend that the op does not have, and for one that nobody interprets."""
    if backend not in ("auto", *implemented):
        names = ", ".join(("auto", *implemented))
        raise ValueError(f"backend={backend!r} must be one of {names}: {op} has no other")
    if interpret and backend not in ("tpu", "gpu"):
        raise ValueError(f"interpret=True needs backend='tpu' or 'gpu', not backend={backend!r}")


def check_positive(values: Mapping[str, float | None]) -> None:
    """Raises ValueError for a value that is neither None nor above 0."""
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} must be above 0, or None")


def check_kv_pages(kv_pages: KVPages) -> None:
    """Raises ValueError where the pages' dtype, page size or scales do not fit. Shapes are apart."""
    if kv_pages.dtype.name not in KV_DTYPES:
        raise ValueError(f"kv_pages.data ({kv_pages.data.dtype}) must hold one of {', '.join(KV_DTYPES)}")
    kv_tile_tokens(kv_pages.page_size)
    scales = kv_pages.scales
    if kv_pages.dtype.name not in QUANTIZED_DTYPES:
        if scales is not None:
            raise ValueError(f"kv_pages.scales must be None where kv_pages.data is {kv_pages.dtype}")
        return
    if scales is None or scales.dtype != jnp.float32:
        got = None if scales is None else scales.dtype
        raise ValueError(f"kv_pages.scales is {got} and must be float32 for {kv_pages.dtype}")


def has_layout(kv_pages: KVPages, shape: tuple[int, ...], backend: Backend) -> bool:
    """Whether the pages are a backend's, whose layout has this shape: only xla's may be bits (layout.py)."""
    bits = kv_pages.data.dtype != kv_pages.dtype
    return kv_pages.data.shape == shape and (backend in ("cpu", "xla") or not bits)


def check_kv_scales(kv_pages: KVPages, num_kv_heads: int, backend: Backend) -> None:
    """Raises ValueError where there are scales, and not in the backend's layout."""
    shape = kv_scales_shape(kv_pages.data.shape[0], kv_pages.page_size, num_kv_heads, backend)
    if kv_pages.scales is not None and kv_pages.scales.shape != shape:
        raise ValueError(f"kv_pages.scales{kv_pages.scales.shape} must be {shape} with backend={backend!r}")


def check_metadata(metadata: AttentionMetadata, num_tokens: int, page_size: int) -> None:
    """Raises ValueError where the metadata does not describe `num_tokens` rows."""
    index = metadata.kv_write_index
    if index.shape != (num_tokens,) or index.dtype != jnp.int32:
        raise ValueError(f"metadata.kv_write_index{index.shape} ({index.dtype}) must be [{num_tokens}] int32")
    if metadata.decode is None and metadata.prefill is None:
        raise ValueError("metadata.decode and metadata.prefill are both None: one must hold rows")
    if metadata.decode is not None:
        _check_tiles("decode", metadata.decode, page_size)
    num_decodes = 0 if metadata.decode is None else metadata.decode.start.shape[0]
    if metadata.prefill is None:
        if num_decodes != num_tokens:
            raise ValueError(f"metadata.decode.start has {num_decodes} rows and q {num_tokens}")
        return
    _check_tiles("prefill", metadata.prefill, page_size)
    num_rows, num_tiles = num_tokens - num_decodes, metadata.prefill.start.shape[0]
    if num_rows <= 0 or num_rows % num_tiles:
        raise ValueError(
            f"metadata.prefill has {num_tiles} tiles, which must divide the {num_rows} rows of q that are "
            f"left after {num_decodes} decodes"
        )


def _check_tiles(name: str, tiles: QueryTiles, page_size: int) -> None:
    num_tiles = tiles.start.shape[0]
    if num_tiles == 0:
        raise ValueError(f"metadata.{name} has no tiles: it must be None then")
    for field in ("page_table", "start", "kv_len"):
        array = getattr(tiles, field)
        rank = 2 if field == "page_table" else 1
        if array.ndim != rank or array.shape[0] != num_tiles or array.dtype != jnp.int32:
            wanted = f"[{num_tiles}, P]" if rank == 2 else f"[{num_tiles}]"
            raise ValueError(
                f"metadata.{name}.{field}{array.shape} ({array.dtype}) must be {wanted} of int32"
            )
    tile = kv_tile_tokens(page_size)
    if tiles.page_table.shape[1] * page_size % tile:
        raise ValueError(
            f"metadata.{name}.page_table{tiles.page_table.shape} must hold whole tiles of {tile} tokens, "
            f"in pages of {page_size}"
        )


def check_linear(weight: jax.Array, x: jax.Array, backend: str) -> None:
    """Raises ValueError where an argument of `matmul.linear` does not fit."""
    if weight.ndim != 2 or x.ndim != 2 or weight.shape[1] != x.shape[0]:
        raise ValueError(f"weight{weight.shape} and x{x.shape} must be [F, D] and [D, M]")
    check_backend("linear", ("cpu", "xla"), backend, interpret=False)
    if backend == "cpu" and (weight.dtype != jnp.float32 or x.dtype != jnp.float32):
        raise ValueError(f"weight ({weight.dtype}) and x ({x.dtype}) must be float32 with backend='cpu'")


def check_add_rms_norm(x: jax.Array, delta: jax.Array, weight: jax.Array, backend: str) -> None:
    """Raises ValueError where an argument of `elementwise.add_rms_norm` does not fit."""
    check_backend("add_rms_norm", ("cpu", "xla"), backend, interpret=False)
    if x.ndim != 2 or delta.shape != x.shape or weight.shape != x.shape[:1]:
        raise ValueError(
            f"x{x.shape}, delta{delta.shape} and weight{weight.shape} must be [D, T], [D, T] and [D]"
        )
    if backend == "cpu":
        _check_float32(x=x, delta=delta, weight=weight)


def check_rotate_qkv(
    heads: jax.Array, cos: jax.Array, sin: jax.Array, num_kv_heads: int, backend: str
) -> None:
    """Raises ValueError where an argument of `elementwise.rotate_qkv` does not fit."""
    check_backend("rotate_qkv", ("cpu", "xla"), backend, interpret=False)
    if heads.ndim != 3 or not (0 < num_kv_heads < heads.shape[0] / 2) or heads.shape[1] % 2:
        raise ValueError(
            f"heads{heads.shape} must be [N + 2K, H, T], with K = num_kv_heads={num_kv_heads} and H even"
        )
    if cos.shape != (heads.shape[1] // 2, heads.shape[2]) or sin.shape != cos.shape:
        raise ValueError(f"cos{cos.shape} and sin{sin.shape} must be [H / 2, T] of heads{heads.shape}")
    if backend == "cpu":
        _check_float32(heads=heads, cos=cos, sin=sin)


def _check_float32(**arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} ({array.dtype}) must be float32 with backend='cpu'")


def check_grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> None:
    """Raises ValueError where an argument of `matmul.grouped_matmul` does not fit."""
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[2]:
        raise ValueError(f"lhs{lhs.shape} and rhs{rhs.shape} must be [M, D] and [E, F, D]")
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"lhs ({lhs.dtype}) and rhs ({rhs.dtype}) must have one float dtype")
    if group_sizes.shape != rhs.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes{group_sizes.shape} ({group_sizes.dtype}) must be [{rhs.shape[0]}] int32"
        )


def check_quantized_matmul(
    lhs: jax.Array, weights: jax.Array, scales: jax.Array, *, quantize_lhs: bool
) -> None:
    """Raises ValueError where an argument of `matmul.quantized_matmul` does not fit."""
    in_groups = scales.ndim == 2
    dtypes = ("int4",) if in_groups else ("int8", "int4", "float8_e4m3fn")
    if lhs.ndim != 2 or weights.ndim != 2 or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(
            f"lhs{lhs.shape} ({lhs.dtype}) must be [M, D] floats, and weights{weights.shape} 2-D"
        )
    if weights.dtype.name not in dtypes:
        raise ValueError(f"weights ({weights.dtype}) must be of {', '.join(dtypes)} for scales{scales.shape}")
    inputs, outputs = weights.shape if in_groups else weights.shape[::-1]
    if lhs.shape[1] != inputs:
        wanted = "[D, F]" if in_groups else "[F, D]"
        raise ValueError(f"weights{weights.shape} must be {wanted} with the inputs of lhs{lhs.shape}")
    if scales.dtype != jnp.float32 or scales.ndim not in (1, 2) or scales.shape[-1] != outputs:
        raise ValueError(
            f"scales{scales.shape} ({scales.dtype}) must be float32 [{outputs}], [D / G, {outputs}]"
        )
    if in_groups and inputs % scales.shape[0]:
        raise ValueError(f"scales{scales.shape} must divide the {inputs} inputs of weights into equal groups")
    if quantize_lhs and (in_groups or weights.dtype.name == "int4"):
        raise ValueError("quantize_lhs=True needs int8 or float8_e4m3fn weights with a scale a channel")
