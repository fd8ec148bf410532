"""The XLA path against the plain reference, over random ragged steps."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer_kernels import (
    AttentionMetadata,
    QueryTiles,
    kv_pages_shape,
    kv_tile_tokens,
    paged_attention,
    reference,
)


@dataclass(frozen=True)
class Case:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pages: np.ndarray
    metadata: AttentionMetadata
    valid: np.ndarray  # [T] bool: rows that are not padding


def make_case(
    decodes: list[int],
    prefills: list[tuple[int, int]],
    *,
    tile: int = 4,
    page_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
) -> Case:
    """decodes: the length of each, its new token included (0 is padding); prefills: (start, tokens)."""
    rng = np.random.default_rng(seed)
    longest = max([*decodes, *(start + n for start, n in prefills), 1])
    kv_tile = kv_tile_tokens(page_size)
    pages_a_seq = -(-longest // kv_tile) * (kv_tile // page_size)
    num_seqs = len(decodes) + len(prefills)
    num_pages = num_seqs * pages_a_seq + 1
    tables = rng.permutation(np.arange(1, num_pages)).reshape(num_seqs, pages_a_seq).astype(np.int32)
    pages = np.full(kv_pages_shape(num_pages, page_size, num_kv_heads, head_dim), np.nan, np.float32)

    def fill(seq: int, count: int) -> None:
        at = np.arange(count)
        pages[tables[seq][at // page_size], :, at % page_size] = rng.standard_normal(
            (count, 2 * num_kv_heads, head_dim)
        )

    def write_index(seq: int, position: int) -> int:
        return int(tables[seq][position // page_size]) * page_size + position % page_size

    index, valid = [], []
    for seq, length in enumerate(decodes):
        fill(seq, max(length - 1, 0))
        index.append(write_index(seq, length - 1) if length else 0)
        valid.append(length > 0)
    starts, lens, tile_tables = [], [], []
    for seq, (start, count) in enumerate(prefills, len(decodes)):
        fill(seq, start)
        for first in range(start, start + count, tile):
            end = min(first + tile, start + count)
            starts.append(first)
            lens.append(end)
            tile_tables.append(tables[seq])
            index += [write_index(seq, p) if p < end else 0 for p in range(first, first + tile)]
            valid += [p < end for p in range(first, first + tile)]

    def tiles(table: np.ndarray, start: list[int], kv_len: list[int]) -> QueryTiles | None:
        if not start:
            return None
        return QueryTiles(jnp.asarray(table), jnp.asarray(start, jnp.int32), jnp.asarray(kv_len, jnp.int32))

    rows = len(index)
    draw = lambda heads: rng.standard_normal((rows, heads, head_dim), dtype=np.float32)  # noqa: E731
    metadata = AttentionMetadata(
        kv_write_index=jnp.asarray(index, jnp.int32),
        decode=tiles(tables[: len(decodes)], [max(n - 1, 0) for n in decodes], decodes),
        prefill=tiles(np.stack(tile_tables) if tile_tables else tables[:0], starts, lens),
    )
    return Case(draw(num_heads), draw(num_kv_heads), draw(num_kv_heads), pages, metadata, np.asarray(valid))


def check(case: Case, **options: float | int | None) -> None:
    """Outputs and the whole cache but the null page, as the reference; padding and unused pages are NaN."""
    q, k, v = (np.where(case.valid[:, None, None], x, np.nan) for x in (case.q, case.k, case.v))
    args = (jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(case.pages), case.metadata)
    out, pages = jax.jit(lambda *a: paged_attention(*a, scale=0.25, **options))(*args)  # type: ignore[arg-type]
    want, want_pages = reference.paged_attention(*args, scale=0.25, **options)  # type: ignore[arg-type]
    np.testing.assert_allclose(np.asarray(out)[case.valid], want[case.valid], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(pages)[1:], want_pages[1:].astype(np.float32))


CASES = {
    "one token": ([1], []),
    "decodes": ([5, 16, 17, 129, 0, 300], []),
    "a prompt": ([], [(0, 19)]),
    "chunk after a prefix": ([], [(128, 5), (16, 9), (0, 1)]),
    "mixed": ([40, 0, 7], [(0, 6), (200, 30)]),
    "a page exactly full": ([16, 32], [(0, 16)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sliding_window", [None, 20, 150])
def test_equals_reference(name: str, sliding_window: int | None) -> None:
    check(make_case(*CASES[name]), sliding_window=sliding_window)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("page_size", [8, 128, 256])
def test_heads_and_pages(num_kv_heads: int, page_size: int) -> None:
    check(
        make_case(
            [70, 3], [(130, 9)], num_heads=6, num_kv_heads=num_kv_heads, head_dim=80, page_size=page_size
        ),
        soft_cap=3.0,
    )


lengths = st.lists(st.integers(0, 280), max_size=4)
chunks = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=3)


@given(lengths, chunks, st.sampled_from([None, 1, 33]), st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_random_ragged_steps(
    decodes: list[int], prefills: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    if decodes or prefills:
        check(make_case(decodes, prefills, seed=seed), sliding_window=window)


def test_output_does_not_depend_on_the_batch() -> None:
    """Bit for bit: a row's tiles are its own, however many the longest row of the step needs."""
    alone, beside = make_case([70], []), make_case([70, 500, 3, 260], [])
    pages = np.array(beside.pages)
    used = np.asarray(alone.metadata.decode.page_table)[0][: -(-70 // 16)]  # type: ignore[union-attr]
    target = np.asarray(beside.metadata.decode.page_table)[0][: len(used)]  # type: ignore[union-attr]
    pages[target] = alone.pages[used]
    q, k, v = (np.array(x) for x in (beside.q, beside.k, beside.v))
    q[0], k[0], v[0] = alone.q[0], alone.k[0], alone.v[0]
    run = jax.jit(lambda *a: paged_attention(*a, scale=0.25)[0][0])
    want = run(alone.q, alone.k, alone.v, alone.pages, alone.metadata)
    np.testing.assert_array_equal(run(q, k, v, pages, beside.metadata), want)


def test_a_shape_that_does_not_fit_is_named() -> None:
    case = make_case([3], [])
    with pytest.raises(ValueError, match="kv_pages"):
        paged_attention(
            jnp.asarray(case.q),
            jnp.asarray(case.k),
            jnp.asarray(case.v),
            jnp.zeros((2, 3, 16, 8)),
            case.metadata,
            scale=1.0,
        )
    with pytest.raises(ValueError, match="page_size=48"):
        kv_tile_tokens(48)
