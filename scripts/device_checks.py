"""What scripts/check_device.py runs on a device: each kernel against the reference, and timed.

Attention's random steps and the bounds are those of tests/kernels. The anchors are too large for the
reference as a whole: some of their rows are compared, each as a decode on the pages that the step left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer_kernels import (
    AttentionMetadata,
    Backend,
    KVPages,
    QueryTiles,
    grouped_matmul,
    mla_paged_attention,
    paged_attention,
    prefill_tile_tokens,
    quantized_matmul,
    reference,
)
from jaxinfer_kernels.layout import (
    QUANTIZED_DTYPES,
    first_seen,
    pack_kv_pages,
    pack_mla_pages,
    unpack_kv_pages,
    unpack_kv_scales,
)
from jaxinfer_kernels.quantize import quantize, quantize_weight
from jaxinfer_kernels.specs import ATTENTION_SPECS, LATENT_SPECS, MODEL_SPECS, AttentionSpec, LatentSpec
from tests.kernels.attention_cases import make_case

ANCHORS = ("llama-3.1-8b", "qwen3-32b")
SAMPLED_ROWS = 4  # of an anchor that the reference computes
RUNS, RUN_S, MAX_LAUNCHES = 5, 0.02, 100


@dataclass(frozen=True)
class Outcome:
    """What one check found.

    Attributes:
      error, bound: at the place where the error is the largest part of its bound.
      ms: of one launch, the median of several runs.
      num_bytes, flops: that the op has to move and to compute, whatever it does.
      rate: the arithmetic's, as chips.py names it.
    """

    error: float
    bound: float
    ms: float
    num_bytes: int
    flops: int
    rate: str = "bf16"


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    op: str
    shape: str
    dtype: str
    backend: Backend
    run: Callable[[], Outcome]


def device_checks(platform: str, kernel: Backend, *, small: bool) -> list[Check]:
    """The checks for a platform, the most important first; `kernel` is the backend of its own kernels.

    `small` takes fewer, of shapes that a CPU runs in seconds.
    """
    float_dtype = "float32" if platform == "cpu" else "bfloat16"
    caches = [float_dtype, "int8", "float8_e4m3fn"][: 2 if small else None]
    backends: list[Backend] = [kernel] if kernel == "xla" else [kernel, "xla"]
    latent_specs = LATENT_SPECS[-1:] if small else LATENT_SPECS
    specs = [spec for spec in ATTENTION_SPECS if not small or spec.name in ("chunk-48", "window-150-sinks")]

    def anchors(cache: str, backend: Backend, page_size: int) -> Iterator[Check]:
        for spec in MODEL_SPECS:
            for kind in ("decode", "prefill"):
                if spec.name in ANCHORS[: 1 if small else None]:
                    sized = replace(spec, page_size=page_size)
                    yield anchor_check(sized, kind, float_dtype, cache, backend, small)

    checks = [c for backend in backends for c in anchors(float_dtype, backend, 128)]
    checks += [spec_check(spec, float_dtype, float_dtype, kernel) for spec in specs]
    checks += [c for cache in caches[1:] for c in anchors(cache, kernel, 128)]
    checks += matmul_checks(float_dtype, small)
    checks += [mla_check(spec, float_dtype, b, small) for b in backends for spec in latent_specs]
    checks += [] if small else anchors(float_dtype, kernel, 16)
    checks += [spec_check(spec, float_dtype, cache, kernel) for cache in caches[1:] for spec in specs]
    others = {"tpu": "float32", "gpu": "float16"}
    checks += [spec_check(spec, others[kernel], others[kernel], kernel) for spec in specs if kernel in others]
    if kernel != "xla":
        checks += [spec_check(spec, float_dtype, cache, "xla") for cache in caches for spec in specs]
    return checks


# --- Time, and the worst place --------------------------------------------------------------------


def launch_ms(launch: Callable[[Any], Any], state: Any) -> float:
    """Of `launch`, which takes what the last one gave. Only the end of a run of launches waits."""
    state = jax.block_until_ready(launch(state))

    def run(launches: int, state: Any) -> tuple[float, Any]:
        start_s = time.perf_counter()
        for _ in range(launches):
            state = launch(state)
        jax.block_until_ready(state)
        return (time.perf_counter() - start_s) / launches, state

    once_s, state = run(1, state)
    launches = min(max(1, round(RUN_S / once_s)), MAX_LAUNCHES)
    times = []
    for _ in range(RUNS):
        seconds, state = run(launches, state)
        times.append(seconds)
    return statistics.median(times) * 1e3


def worst(out: Any, want: np.ndarray, bound: np.ndarray) -> tuple[float, float]:
    """Error and bound where they are the furthest apart; what is no number is infinitely wrong."""
    error = np.abs(np.asarray(out, np.float64) - want)
    error = np.where(np.isnan(error), np.inf, error)
    bound = np.maximum(np.broadcast_to(bound, error.shape), np.finfo(np.float64).tiny)
    index = np.unravel_index(np.argmax(error / bound), error.shape)
    return float(error[index]), float(bound[index])


def attention_bound(dtype: Any, want: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """See tests/kernels/attention_cases.py: float32's 1e-5, or six roundings of a half precision q."""
    if dtype == jnp.float32:
        return 1e-5 * (1 + np.abs(want))
    return float(jnp.finfo(dtype).eps) / 2 * 6 * magnitude


# --- Attention ------------------------------------------------------------------------------------


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
        got = np.asarray(out, np.float64)[case.valid]
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
    spec: AttentionSpec, kind: str, dtype: str, kv_dtype: str, backend: Backend, small: bool
) -> Check:
    """64 sequences of 4096 tokens decode; or a chunk of 512 that ends at 8192."""
    sequences, context, chunk = (4, 256, 128) if small else (64, 4096, 512)
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


# --- Latent attention -----------------------------------------------------------------------------


def mla_check(spec: LatentSpec, dtype: str, backend: Backend, small: bool) -> Check:
    """64 decodes of 4096 tokens, and a short prompt."""
    width = spec.latent_dim + spec.rope_dim

    def run() -> Outcome:
        plain = AttentionSpec("as one head", spec.num_heads, 1, width, page_size=spec.page_size)
        decodes, prefills = [40, 0, 7, 300] if small else [4096] * 64, [(0, 6), (200, 70)]
        case = make_case(plain, decodes, prefills, dtype=dtype)
        numbers = case.numbers[:, :1].astype(dtype)
        q_latent, q_rope = jnp.split(case.q, [spec.latent_dim], axis=2)
        latent, k_rope = jnp.split(case.k[:, 0], [spec.latent_dim], axis=1)
        scale = (spec.nope_dim + spec.rope_dim) ** -0.5 / 2
        arrays = (q_latent, q_rope, latent, k_rope)
        pages = pack_mla_pages(numbers, spec.latent_dim)
        want, _ = reference.mla_paged_attention(*arrays, pages, case.metadata, scale=scale)
        want = want[case.valid]
        # See tests/kernels/test_mla.py: values are normal numbers, here at most 5.
        bound = 2**-8 * (2 + 4 * scale * np.sqrt(spec.latent_dim)) * 5
        bound = 1e-5 * (1 + np.abs(want)) if dtype == "float32" else np.asarray(bound)
        attend = jax.jit(partial(mla_paged_attention, scale=scale, backend=backend), donate_argnums=4)
        pages = pack_mla_pages(numbers, spec.latent_dim, backend)
        out, pages = attend(*arrays, jax.tree.map(jnp.copy, pages), case.metadata)
        error, bound = worst(np.asarray(out, np.float64)[case.valid], want, bound)
        ms = launch_ms(lambda pages: attend(*arrays, pages, case.metadata)[1], pages)
        lens = [(n - 1, n) for n in decodes if n] + [(start, start + count) for start, count in prefills]
        seen = sum(int(np.arange(start + 1, end + 1).sum()) for start, end in lens)
        itemsize = jnp.dtype(dtype).itemsize
        num_bytes = itemsize * (
            sum(end for _, end in lens) * width + int(case.valid.sum()) * width * spec.num_heads
        )
        flops = 2 * spec.num_heads * seen * (width + spec.latent_dim)
        return Outcome(error, bound, ms, num_bytes, flops)

    return Check("mla", f"{spec.name} mixed", dtype, backend, run)


# --- Matmuls --------------------------------------------------------------------------------------


def matmul_checks(dtype: str, small: bool) -> list[Check]:
    """Llama-3.1-8B's gate by quantised weights; Mixtral's and Qwen3-30B-A3B's experts."""
    num_inputs, num_outputs = (512, 256) if small else (4096, 14336)
    formats = [
        ("int8", None, False),
        ("int4", None, False),
        ("float8_e4m3fn", None, False),
        ("int8", None, True),
        ("float8_e4m3fn", None, True),
        ("int4", 128, False),
        ("int4", 32, False),
    ]
    checks = [
        quantized_check(rows, num_inputs, num_outputs, dtype, *form)
        for form in formats
        for rows in ((16,) if small else (16, 512))
    ]
    experts = (
        [(40, 6, 128, 256)]
        if small
        else [(1024, 8, 4096, 14336), (4096, 128, 2048, 768), (128, 128, 2048, 768)]
    )
    return checks + [grouped_check(*sizes, dtype) for sizes in experts]


def quantized_check(
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    dtype: str,
    weight_dtype: str,
    group_size: int | None,
    quantize_lhs: bool,
) -> Check:
    def run() -> Outcome:
        keys = jax.random.split(jax.random.key(0))
        lhs = jax.random.normal(keys[0], (num_rows, num_inputs), dtype)
        weight = jax.random.normal(keys[1], (num_outputs, num_inputs))
        weights, scales = jax.jit(
            lambda w: quantize_weight(w, weight_dtype, group_size=group_size)  # type: ignore[arg-type]
        )(weight)
        multiply = jax.jit(partial(quantized_matmul, quantize_lhs=quantize_lhs))
        rows = np.unique(np.linspace(0, num_rows - 1, SAMPLED_ROWS).astype(int))
        wide = weights.astype(jnp.float32)
        want = reference.quantized_matmul(lhs[rows], weights, scales, quantize_lhs=quantize_lhs)
        magnitude = reference.quantized_matmul(jnp.abs(lhs[rows]), jnp.abs(wide), scales)
        # See tests/kernels/test_quantized_matmul.py: in groups, the weights are rounded too.
        rounding = 1e-5 if dtype == "float32" else (1 if group_size is None else 2) * 2**-8
        error, bound = worst(multiply(lhs, weights, scales)[rows], want, rounding * magnitude)
        ms = launch_ms(lambda _: multiply(lhs, weights, scales), None)
        bits = 4 if weight_dtype == "int4" else 8
        num_bytes = (
            weights.size * bits // 8 + scales.size * 4 + lhs.nbytes + num_rows * num_outputs * lhs.itemsize
        )
        rate = {"int8": "int8", "float8_e4m3fn": "fp8"}[weight_dtype] if quantize_lhs else "bf16"
        return Outcome(error, bound, ms, num_bytes, 2 * num_rows * num_inputs * num_outputs, rate)

    name = (
        weight_dtype + (f" groups of {group_size}" if group_size else "") + (" w8a8" if quantize_lhs else "")
    )
    shape = f"{num_rows}x{num_inputs}x{num_outputs}"
    return Check("quantized_matmul", shape, f"{dtype}/{name}", "auto", run)  # type: ignore[arg-type]


def grouped_check(num_rows: int, num_groups: int, num_inputs: int, num_outputs: int, dtype: str) -> Check:
    def run() -> Outcome:
        keys = jax.random.split(jax.random.key(0))
        lhs = jax.random.normal(keys[0], (num_rows, num_inputs), dtype)
        rhs = jax.random.normal(keys[1], (num_groups, num_outputs, num_inputs), dtype) / num_inputs**0.5
        group_of = np.sort(np.random.default_rng(0).integers(0, num_groups, num_rows))
        sizes = np.bincount(group_of, minlength=num_groups).astype(np.int32)
        multiply = jax.jit(grouped_matmul)
        rows = np.unique(np.linspace(0, num_rows - 1, SAMPLED_ROWS).astype(int))
        groups, counts = np.unique(group_of[rows], return_counts=True)
        want, magnitude = (
            reference.grouped_matmul(
                *(jnp.asarray(f(x), jnp.float32) for x in (lhs[rows], rhs[groups])), counts
            )
            for f in (jnp.asarray, jnp.abs)
        )
        rounding = 1e-5 if dtype == "float32" else 2**-8
        error, bound = worst(multiply(lhs, rhs, jnp.asarray(sizes))[rows], want, rounding * magnitude)
        ms = launch_ms(lambda _: multiply(lhs, rhs, jnp.asarray(sizes)), None)
        used = int(np.count_nonzero(sizes)) * num_inputs * num_outputs
        num_bytes = lhs.itemsize * (used + num_rows * (num_inputs + num_outputs))
        return Outcome(error, bound, ms, num_bytes, 2 * num_rows * num_inputs * num_outputs)

    shape = f"{num_rows}x{num_groups}x{num_inputs}x{num_outputs}"
    return Check("grouped_matmul", shape, dtype, "auto", run)  # type: ignore[arg-type]
