"""Random ragged steps of paged attention, and their comparison with the reference, for any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer_kernels import (
    AttentionMetadata,
    Backend,
    KVPages,
    QueryTiles,
    kv_tile_tokens,
    paged_attention,
    prefill_tile_tokens,
    reference,
)
from jaxinfer_kernels.layout import QUANTIZED_DTYPES, pack_kv_pages, unpack_kv_pages, unpack_kv_scales
from jaxinfer_kernels.quantize import quantize
from jaxinfer_kernels.specs import AttentionSpec
from tests.cpu_kernels import load_cpu_kernels

# A backend's kernel joins all the tests with its name here.
BACKENDS: tuple[Backend, ...] = ("xla", "cpu", "tpu")
# How programs are compiled whose kernels are interpreted: that takes longer than to run them.
UNOPTIMISED: dict[str, Any] = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Case:
    """One step. Whatever no sequence owns is NaN: unused pages, the ends of pages, padding rows."""

    spec: AttentionSpec
    backend: Backend
    q: jax.Array
    k: jax.Array
    v: jax.Array
    numbers: jax.Array  # [num_pages, 2K, page_size, H]
    scales: jax.Array | None
    sinks: jax.Array | None
    metadata: AttentionMetadata
    valid: np.ndarray  # [T] bool: rows that are not padding

    def kv_pages(self, backend: Backend) -> KVPages:
        return pack_kv_pages(self.numbers, self.scales, backend)

    def options(self) -> dict[str, Any]:
        return dict(
            scale=self.spec.head_dim**-0.5,
            sliding_window=self.spec.sliding_window,
            attention_chunk=self.spec.attention_chunk,
            soft_cap=self.spec.soft_cap,
        )


@dataclass(frozen=True)
class Room:
    """Sizes of a step, where they are more than its sequences need."""

    decodes: int = 0
    tiles: int = 0
    pages_a_seq: int = 0
    pages: int = 0


def make_case(
    spec: AttentionSpec,
    decodes: list[int],
    prefills: list[tuple[int, int]],
    *,
    dtype: str = "float32",
    kv_dtype: str = "float32",
    backend: Backend = "xla",
    room: Room = Room(),
    seed: int = 0,
    tile: int | None = None,
) -> Case:
    """decodes: the length of each, its new token included (0 is padding); prefills: (start, tokens).

    `tile` is the rows of a prefill tile, where they are not the backend's own.
    """
    rng = np.random.default_rng(seed)
    page_size, tile = spec.page_size, tile or prefill_tile_tokens(backend)
    lens = [*decodes, *(start + count for start, count in prefills)]
    tables, num_pages = _page_tables(rng, lens, page_size, room)
    kv_rows = (2 * spec.num_kv_heads, spec.head_dim)
    written = np.full((num_pages, kv_rows[0], page_size, kv_rows[1]), np.nan, np.float32)

    def write_index(seq: int, position: int) -> int:
        return int(tables[seq][position // page_size]) * page_size + position % page_size

    known = [max(length - 1, 0) for length in decodes] + [start for start, _ in prefills]
    for table, count in zip(tables, known, strict=True):
        at = np.arange(count)
        written[table[at // page_size], :, at % page_size] = rng.standard_normal((count, *kv_rows))

    index = [write_index(seq, length - 1) if length else 0 for seq, length in enumerate(decodes)]
    valid = [length > 0 for length in decodes]
    padding = max(room.decodes - len(decodes), 0)
    index += [0] * padding
    valid += [False] * padding
    starts, ends, tile_seqs = [], [], []
    for seq, (start, count) in enumerate(prefills, len(decodes)):
        for first in range(start, start + count, tile):
            end = min(first + tile, start + count)
            starts.append(first)
            ends.append(end)
            tile_seqs.append(seq)
            index += [write_index(seq, p) if p < end else 0 for p in range(first, first + tile)]
            valid += [p < end for p in range(first, first + tile)]
    padding = max(room.tiles - len(starts), 0)
    index += [0] * (padding * tile)
    valid += [False] * (padding * tile)

    metadata = AttentionMetadata(
        kv_write_index=jnp.asarray(index, jnp.int32),
        decode=_tiles(tables, range(len(decodes)), [max(n - 1, 0) for n in decodes], decodes, room.decodes),
        prefill=_tiles(tables, tile_seqs, starts, ends, room.tiles),
    )
    draw = lambda heads: rng.standard_normal((len(index), heads, spec.head_dim))  # noqa: E731
    q, k, v = (
        jnp.asarray(np.where(np.asarray(valid)[:, None, None], draw(heads), np.nan), dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    numbers, scales = jnp.asarray(written), None
    if kv_dtype in QUANTIZED_DTYPES:
        numbers, scales = quantize(numbers, kv_dtype)
    sinks = jnp.asarray(rng.standard_normal(spec.num_heads), jnp.float32) if spec.sinks else None
    return Case(spec, backend, q, k, v, numbers.astype(kv_dtype), scales, sinks, metadata, np.asarray(valid))


def _page_tables(
    rng: np.random.Generator, lens: list[int], page_size: int, room: Room
) -> tuple[np.ndarray, int]:
    """[num_seqs, P] tables, a sequence's scattered pages and then the null page; the pool's size."""
    tile = kv_tile_tokens(page_size)
    width = max(-(-max([*lens, 1]) // tile) * (tile // page_size), room.pages_a_seq)
    needed = [-(-length // page_size) for length in lens]
    num_pages = max(sum(needed) + 1, room.pages)
    free = iter(rng.permutation(np.arange(1, num_pages)).tolist())
    tables = np.zeros((len(lens), width), np.int32)
    for table, count in zip(tables, needed, strict=True):
        table[:count] = [next(free) for _ in range(count)]
    return tables, num_pages


def _tiles(
    tables: np.ndarray, seqs: Sequence[int], start: list[int], kv_len: list[int], at_least: int
) -> QueryTiles | None:
    """The tiles of these sequences and then padding."""
    if not start and not at_least:
        return None
    padding = max(at_least - len(start), 0)
    table = np.zeros((len(start) + padding, tables.shape[1]), np.int32)
    table[: len(start)] = tables[list(seqs)]
    as_array = lambda x: jnp.asarray([*x, *[0] * padding], jnp.int32)  # noqa: E731
    return QueryTiles(jnp.asarray(table), as_array(start), as_array(kv_len))


@cache
def _jitted(**options: Any) -> Any:
    def run(q: Any, k: Any, v: Any, kv_pages: Any, metadata: Any, sinks: Any) -> Any:
        return paged_attention(q, k, v, kv_pages, metadata, sinks=sinks, return_lse=True, **options)

    return jax.jit(run, compiler_options=UNOPTIMISED if options["interpret"] else None)


def run(case: Case) -> tuple[np.ndarray, np.ndarray, KVPages]:
    """Outputs and log-sum-exps of the rows that are not padding, and the pages in the backend's layout."""
    if case.backend == "cpu":
        load_cpu_kernels()
    function = _jitted(backend=case.backend, interpret=case.backend in ("tpu", "gpu"), **case.options())
    out, lse, kv_pages = function(
        case.q, case.k, case.v, case.kv_pages(case.backend), case.metadata, case.sinks
    )
    return np.asarray(out)[case.valid], np.asarray(lse)[case.valid], kv_pages


def check(case: Case) -> None:
    """Outputs, log-sum-exps and the whole cache but the null page equal the reference's."""
    out, lse, kv_pages = run(case)

    def expect(v: jax.Array, numbers: jax.Array) -> tuple[Any, ...]:
        pages = pack_kv_pages(numbers, case.scales, "xla")
        args = (case.q, case.k, v, pages, case.metadata)
        return reference.paged_attention(*args, sinks=case.sinks, **case.options())

    want, want_lse, want_numbers, want_scales = expect(case.v, case.numbers)
    want, want_lse = want[case.valid], want_lse[case.valid]
    if case.q.dtype == jnp.float32:
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    else:
        values = case.numbers.at[:, 1::2].set(jnp.abs(case.numbers[:, 1::2]))
        magnitude = expect(jnp.abs(case.v), values)[0][case.valid]
        assert_within_rounding(case, out, want, magnitude)
    numbers = unpack_kv_pages(kv_pages, case.spec.num_kv_heads, case.spec.head_dim, case.backend)
    np.testing.assert_array_equal(np.asarray(numbers, np.float64)[1:], want_numbers[1:])
    scales = unpack_kv_scales(kv_pages, case.backend)
    assert (scales is None) == (want_scales is None)
    if want_scales is not None and scales is not None:
        np.testing.assert_array_equal(np.asarray(scales)[1:], want_scales[1:])


def assert_within_rounding(case: Case, out: np.ndarray, want: np.ndarray, magnitude: np.ndarray) -> None:
    """The bound that a half precision q gives, `magnitude` being the outputs with |v| for v.

    Rounded once each, by u at most: the weights, and the output. The scaled query too, each element
    by itself, so that a logit is off by u * scale * |q o k| (the norm of the elementwise product, near
    1 for normal numbers and for logits of unit variance), four times that at the very most.
    """
    u = float(jnp.finfo(case.q.dtype).eps) / 2
    assert (np.abs(np.asarray(out, np.float64) - want) <= u * (1 + 1 + 4) * magnitude).all()
