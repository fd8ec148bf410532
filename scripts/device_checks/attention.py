"""Checks of paged attention on a device: small steps as a whole, and anchors as models have them.

Random steps and bounds are those of tests/kernels. The anchors are too large for the reference as a whole:
some of their rows are compared, each as a decode on the pages that the step left.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from device_checks.check import SAMPLED_ROWS, Check, Outcome, launch_ms, worst
from jaxinfer_kernels import (
    AttentionMetadata,
    Backend,
    KVPages,
    QueryTiles,
    paged_attention,
    prefill_tile_tokens,
    reference,
)
from jaxinfer_kernels.layout import (
    QUANTIZED_DTYPES,
    first_seen,
    pack_kv_pages,
    unpack_kv_pages,
    unpack_kv_scales,
)
from jaxinfer_kernels.quantize import quantize
from jaxinfer_kernels.specs import AttentionSpec
from tests.kernels.attention_cases import make_case


def attention_bound(dtype: Any, want: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """See tests/kernels/attention_cases.py: float32's 1e-5, or six roundings of a half precision q."""
    if dtype == jnp.float32:
        return 1e-5 * (1 + np.abs(want))
    return float(jnp.finfo(dtype).eps) / 2 * 6 * magnitude


def attention_work(
    spec: AttentionSpec, tiles: list[tuple[int, int]], itemsize: int, kv_itemsize: int
) -> tuple[int, int]:
    """Bytes and FLOPs of sequences with queries at positions start ... end - 1 each, the pages once."""
    num_bytes = flops = 0
    scales = 4 if kv_itemsize == 1 else 0
    for start, end in tiles:
        positions = np.arange(start, end)
        first = np.asarray(first_seen(jnp.asarray(positions), spec.sliding_window, spec.attention_chunk))
        flops += 4 * spec.num_heads * spec.head_dim * int((positions - first + 1).sum())
        row = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim * itemsize
        token = 2 * spec.num_kv_heads * (spec.head_dim * kv_itemsize + scales)
        num_bytes += (end - start) * row + (end - int(first[0])) * token
    return num_bytes, flops


def options_of(spec: AttentionSpec) -> dict[str, Any]:
    return dict(
        scale=spec.head_dim**-0.5,
        sliding_window=spec.sliding_window,
        attention_chunk=spec.attention_chunk,
        soft_cap=spec.soft_cap,
    )


def expected(q: Any, k: Any, v: Any, numbers: jax.Array, scales: Any, metadata: Any, **options: Any) -> Any:
    """The reference's outputs, numbers and scales of the cache, and the outputs with |v| for v."""
    numbers = jnp.asarray(numbers)
    want, _, cache, cache_scales = reference.paged_attention(
        q, k, v, pack_kv_pages(numbers, scales), metadata, **options
    )
    wide = numbers.astype(jnp.float32)
    positive = wide.at[:, 1::2].set(jnp.abs(wide[:, 1::2])).astype(numbers.dtype)
    magnitude = reference.paged_attention(
        q, k, np.abs(np.asarray(v, np.float32)), pack_kv_pages(positive, scales), metadata, **options
    )[0]
    return want, cache, cache_scales, magnitude


def for_cache(spec: AttentionSpec, kv_dtype: str, backend: Backend) -> AttentionSpec:
    """Quantised pages have 32 tokens at least on GPUs."""
    least = 32 if backend == "gpu" and kv_dtype in QUANTIZED_DTYPES else 1
    return replace(spec, page_size=max(spec.page_size, least))


def spec_check(spec: AttentionSpec, dtype: str, kv_dtype: str, backend: Backend) -> Check:
    """A small ragged step of decodes and prefills, NaN wherever nobody may look; the whole cache too."""
    decodes, prefills = [40, 0, 7, 300], [(0, 6), (200, 70)]

    def run() -> Outcome:
        sized = for_cache(spec, kv_dtype, backend)
        case = make_case(sized, decodes, prefills, dtype=dtype, kv_dtype=kv_dtype, backend=backend)
        attend = jax.jit(partial(paged_attention, backend=backend, **case.options()), donate_argnums=3)
        arrays = (case.q, case.k, case.v)
        pages = jax.tree.map(jnp.copy, case.kv_pages(backend))  # to donate; some are the case's own arrays
        out, pages = attend(*arrays, pages, case.metadata, sinks=case.sinks)
        got = np.asarray(out)[case.valid]
        numbers = np.asarray(unpack_kv_pages(pages, sized.num_kv_heads, sized.head_dim, backend), np.float64)
        scales = unpack_kv_scales(pages, backend)
        want, cache, cache_scales, magnitude = expected(
            *arrays, case.numbers, case.scales, case.metadata, sinks=case.sinks, **case.options()
        )
        same = np.array_equal(numbers[1:], cache[1:], equal_nan=True)
        if not same or (
            scales is not None
            and not np.array_equal(np.asarray(scales)[1:], cache_scales[1:], equal_nan=True)
        ):
            raise AssertionError("the cache after the step is not the reference's")
        want, magnitude = want[case.valid], magnitude[case.valid]
        error, bound = worst(got, want, attention_bound(case.q.dtype, want, magnitude))
        ms = launch_ms(lambda p: attend(*arrays, p, case.metadata, sinks=case.sinks)[1], pages)
        tiles = [(n - 1, n) for n in decodes if n] + [(start, start + count) for start, count in prefills]
        return Outcome(
            error, bound, ms, *attention_work(sized, tiles, case.q.dtype.itemsize, kv_itemsize(kv_dtype))
        )

    return Check("attention", f"{spec.name} mixed", cache_name(dtype, kv_dtype), backend, run)


def cache_name(dtype: str, kv_dtype: str) -> str:
    return dtype if dtype == kv_dtype else f"{dtype}/{kv_dtype}"


def kv_itemsize(kv_dtype: str) -> int:
    return jnp.dtype(kv_dtype).itemsize


def anchor_check(
    spec: AttentionSpec,
    kind: str,
    dtype: str,
    kv_dtype: str,
    backend: Backend,
    sequences: int,
    context: int,
    chunk: int,
) -> Check:
    """So many sequences of `context` tokens decode; or a chunk of prefill ends at twice as many."""
    if kind == "prefill":
        sequences, context = 1, 2 * context
    spec = for_cache(spec, kv_dtype, backend)
    width = -(-context // max(spec.page_size, 64)) * max(spec.page_size, 64) // spec.page_size

    def run() -> Outcome:
        tables = 1 + np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
        if kind == "decode":
            lens = np.full(sequences, context, np.int32)
            positions, of_rows = lens - 1, tables
            metadata = step_metadata(positions, of_rows, spec.page_size, decode=(tables, lens - 1, lens))
        else:
            tile = prefill_tile_tokens(backend)
            starts = np.arange(context - chunk, context, tile, dtype=np.int32)
            positions = np.arange(context - chunk, context, dtype=np.int32)
            of_rows, of_tiles = (np.tile(tables, (len(x), 1)) for x in (positions, starts))
            metadata = step_metadata(
                positions, of_rows, spec.page_size, prefill=(of_tiles, starts, starts + tile)
            )
        pages = jax.jit(partial(random_pages, spec, sequences * width + 1, kv_dtype, backend))()
        q, k, v = random_rows(spec, len(positions), dtype)
        attend = jax.jit(partial(paged_attention, backend=backend, **options_of(spec)), donate_argnums=3)
        out, pages = attend(q, k, v, pages, metadata)
        rows = np.unique(np.linspace(0, len(positions) - 1, SAMPLED_ROWS).astype(int))
        error, bound = sampled_error(spec, backend, out, (q, k, v), pages, rows, positions, of_rows)
        ms = launch_ms(lambda pages: attend(q, k, v, pages, metadata)[1], pages)
        tiles = [(context - 1, context)] * sequences if kind == "decode" else [(context - chunk, context)]
        work = attention_work(spec, tiles, jnp.dtype(dtype).itemsize, kv_itemsize(kv_dtype))
        return Outcome(error, bound, ms, *work)

    size = f"{sequences}x{context}" if kind == "decode" else f"{chunk} of {context}"
    shape = f"{spec.name} {size} page {spec.page_size}"
    return Check(kind, shape, cache_name(dtype, kv_dtype), backend, run)


def step_metadata(
    positions: np.ndarray, tables: np.ndarray, page_size: int, **tiles: tuple[np.ndarray, ...]
) -> AttentionMetadata:
    """`decode` or `prefill`: page tables, starts and lengths. positions and tables are of each row."""
    index = tables[np.arange(len(positions)), positions // page_size] * page_size + positions % page_size
    made = {name: QueryTiles(*map(jnp.asarray, arrays)) for name, arrays in tiles.items()}
    return AttentionMetadata(jnp.asarray(index), made.get("decode"), made.get("prefill"))


def random_pages(spec: AttentionSpec, num_pages: int, kv_dtype: str, backend: Backend) -> KVPages:
    shape = (num_pages, 2 * spec.num_kv_heads, spec.page_size, spec.head_dim)
    numbers = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    scales = None
    if kv_dtype in QUANTIZED_DTYPES:
        numbers, scales = quantize(numbers, kv_dtype)
    return pack_kv_pages(numbers.astype(kv_dtype), scales, backend)


def random_rows(spec: AttentionSpec, num_rows: int, dtype: str) -> list[jax.Array]:
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    keys = jax.random.split(jax.random.key(1), 3)
    return [
        jax.random.normal(key, (num_rows, n, spec.head_dim), dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


def sampled_error(
    spec: AttentionSpec,
    backend: Backend,
    out: jax.Array,
    qkv: tuple[jax.Array, ...],
    pages: KVPages,
    rows: np.ndarray,
    positions: np.ndarray,
    tables: np.ndarray,
) -> tuple[float, float]:
    """Of some rows, as decodes on their own pages as they are after the step."""
    used, where = np.unique(tables[rows], return_inverse=True)

    @jax.jit
    def fetch(pages: KVPages) -> tuple[jax.Array, jax.Array | None]:
        numbers = unpack_kv_pages(pages, spec.num_kv_heads, spec.head_dim, backend)
        scales = unpack_kv_scales(pages, backend)
        return numbers[used], None if scales is None else scales[used]

    numbers, scales = fetch(pages)
    table = where.reshape(len(rows), -1).astype(np.int32)
    at = positions[rows].astype(np.int32)
    metadata = step_metadata(at, table, spec.page_size, decode=(table, at, at + 1))
    q, k, v = (x[rows] for x in qkv)
    want, _, _, magnitude = expected(q, k, v, numbers, scales, metadata, **options_of(spec))
    return worst(out[rows], want, attention_bound(q.dtype, want, magnitude))
