"""A sequence's attention is bit for bit the same whatever else the step holds and wherever its pages lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer_kernels import AttentionMetadata, Backend, QueryTiles, prefill_tile_tokens
from jaxinfer_kernels.layout import unpack_kv_pages, unpack_kv_scales
from jaxinfer_kernels.specs import AttentionSpec
from tests.kernels.attention_cases import Case, make_case, run

SPECS = {
    "plain": AttentionSpec("plain", 4, 2, 64),
    "window": AttentionSpec("window", 4, 2, 64, sliding_window=70, sinks=True),
    "chunk": AttentionSpec("chunk", 4, 2, 64, attention_chunk=96, page_size=32),
}
CASES = [
    ("plain", "float32", "float32"),
    ("window", "float32", "int8"),
    ("plain", "bfloat16", "bfloat16"),
    ("chunk", "float32", "float8_e4m3fn"),
]


def _mark(backend: Backend, index: int) -> pytest.MarkDecorator | tuple[()]:
    """Interpreted kernels take seconds to compile: all of a kind are `long` but for one without rounding and
    the one with most features.
    """
    if backend == "xla":
        return pytest.mark.slow if index else ()
    return pytest.mark.long if index > 1 else pytest.mark.slow


cases = pytest.mark.parametrize(
    ("backend", "name", "dtype", "kv_dtype"),
    [
        *(("cpu", name, "float32", "float32") for name in SPECS),
        *(
            pytest.param(backend, *case, marks=_mark(backend, index))
            for backend in ("xla", "tpu")
            for index, case in enumerate(CASES)
        ),
    ],
)


def take(case: Case, decodes: slice, tiles: slice) -> Case:
    """A step of some of a step's decodes and tiles, on the same pages."""
    num_decodes = len(case.metadata.decode.start)  # type: ignore[union-attr]
    block = prefill_tile_tokens(case.backend)
    rows = np.arange(len(case.valid))
    kept = np.concatenate([rows[:num_decodes][decodes], rows[num_decodes:].reshape(-1, block)[tiles].ravel()])

    def part(x: QueryTiles | None, which: slice) -> QueryTiles | None:
        x = jax.tree.map(lambda leaf: leaf[which], x)
        return x if x is not None and len(x.start) else None

    metadata = AttentionMetadata(
        case.metadata.kv_write_index[kept],
        part(case.metadata.decode, decodes),
        part(case.metadata.prefill, tiles),
    )
    return replace(
        case, q=case.q[kept], k=case.k[kept], v=case.v[kept], metadata=metadata, valid=case.valid[kept]
    )


def same(one: Sequence[Any], other: Sequence[Any]) -> None:
    for x, y in zip(one, other, strict=True):
        # float64 holds them all exactly; numpy does not take a bfloat16's NaN as equal to itself.
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


@cases
def test_alone_or_in_a_batch(backend: Backend, name: str, dtype: str, kv_dtype: str) -> None:
    tile = prefill_tile_tokens(backend)
    case = make_case(
        SPECS[name],
        [70, 500, 0, 260],
        [(64, tile), (128, 2 * tile)],
        dtype=dtype,
        kv_dtype=kv_dtype,
        backend=backend,
    )
    out, lse, _ = run(case)
    nothing = slice(0)
    for decode, row in ((0, 0), (1, 1), (3, 2)):
        alone = run(take(case, slice(decode, decode + 1), nothing))
        same(alone[:2], (out[row : row + 1], lse[row : row + 1]))
    for tiles, first in ((slice(0, 1), 3), (slice(1, 3), 3 + tile)):
        rows = slice(first, first + tile * (tiles.stop - tiles.start))
        same(run(take(case, nothing, tiles))[:2], (out[rows], lse[rows]))


@cases
def test_in_chunks_or_at_once(backend: Backend, name: str, dtype: str, kv_dtype: str) -> None:
    """Chunks that end at multiples of the prefill tile, the last of which ends where the prompt does."""
    tile = prefill_tile_tokens(backend)
    case = make_case(SPECS[name], [0], [(0, 5 * tile - 3)], dtype=dtype, kv_dtype=kv_dtype, backend=backend)
    out, lse, pages = run(case)
    parts, after = [], pages
    for tiles in (slice(0, 2), slice(2, 3), slice(3, 5)):
        part = take(case, slice(0), tiles)
        *results, after = run(part)
        parts.append(results)
        numbers = unpack_kv_pages(after, part.spec.num_kv_heads, part.spec.head_dim, backend)
        case = replace(case, numbers=numbers, scales=unpack_kv_scales(after, backend))
    same(tuple(np.concatenate(x) for x in zip(*parts, strict=True)), (out, lse))
    same(
        jax.tree.leaves(jax.tree.map(lambda x: x[1:], after)),
        jax.tree.leaves(jax.tree.map(lambda x: x[1:], pages)),
    )


@cases
def test_after_a_prefix(backend: Backend, name: str, dtype: str, kv_dtype: str) -> None:
    """Of some pages: tiles begin elsewhere, so that a row has other company in its tile."""
    tile, start = prefill_tile_tokens(backend), 16
    case = make_case(SPECS[name], [], [(0, 3 * tile - 3)], dtype=dtype, kv_dtype=kv_dtype, backend=backend)
    out, lse, pages = run(case)
    numbers = unpack_kv_pages(pages, case.spec.num_kv_heads, case.spec.head_dim, backend)
    prefill = case.metadata.prefill
    assert prefill is not None
    starts = prefill.start + start
    tiles = replace(prefill, start=starts, kv_len=jnp.clip(starts + tile, max=prefill.kv_len.max()))
    rows = slice(start, None)
    later = [jnp.pad(x[rows], [(0, start), (0, 0), (0, 0)]) for x in (case.q, case.k, case.v)]
    index = jnp.pad(case.metadata.kv_write_index[rows], (0, start))
    part = replace(
        case,
        **dict(zip("qkv", later, strict=True)),
        numbers=numbers,
        scales=unpack_kv_scales(pages, backend),
        metadata=AttentionMetadata(index, None, tiles),
        valid=np.pad(case.valid[rows], (0, start)),
    )
    same(run(part)[:2], (out[rows], lse[rows]))


@cases
def test_pages_moved(backend: Backend, name: str, dtype: str, kv_dtype: str) -> None:
    case = make_case(SPECS[name], [70, 300], [(40, 50)], dtype=dtype, kv_dtype=kv_dtype, backend=backend)
    moved_to = np.random.default_rng(1).permutation(len(case.numbers) - 1) + 1
    moved_to = np.concatenate([[0], moved_to])
    came_from = np.argsort(moved_to)
    page_size = case.spec.page_size

    def move(tiles: QueryTiles | None) -> QueryTiles | None:
        return tiles and replace(tiles, page_table=jnp.asarray(moved_to.astype(np.int32)[tiles.page_table]))

    index = np.asarray(case.metadata.kv_write_index)
    moved_index = jnp.asarray(moved_to[index // page_size] * page_size + index % page_size, jnp.int32)
    moved = replace(
        case,
        numbers=case.numbers[came_from],
        scales=None if case.scales is None else case.scales[came_from],
        metadata=AttentionMetadata(moved_index, move(case.metadata.decode), move(case.metadata.prefill)),
    )
    same(run(moved)[:2], run(case)[:2])
