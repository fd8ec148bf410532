"""The Hopper kernels, interpreted on the CPU: TMA copies, barriers and wgmma as jax simulates them.

Interpreted blocks run one after the other, and each takes a while: few heads, and the shapes at
which something changes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer_kernels import (
    AttentionMetadata,
    KVPages,
    QueryTiles,
    create_kv_pages,
    kv_pages_shape,
    paged_attention,
    prefill_tile_tokens,
)
from jaxinfer_kernels.gpu import attention, splits
from jaxinfer_kernels.gpu.common import Visibility
from jaxinfer_kernels.gpu.targets import TARGETS, Target
from jaxinfer_kernels.specs import ATTENTION_SPECS, MODEL_SPECS, ODD_SPECS, AttentionSpec
from tests.kernels import test_attention_invariance as invariance
from tests.kernels.attention_cases import Case, check, make_case, run

interpreted = [
    pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="needs jax 0.11: InterpretGPUParams"),
    # The keys of positions that nobody wrote are NaN here; what is made of them is masked.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]
HALF: dict[str, Any] = dict(backend="gpu", dtype="bfloat16", kv_dtype="bfloat16")
FLOAT16: dict[str, Any] = HALF | dict(dtype="float16", kv_dtype="float16")


FAST_SPECS = ("window-33", "chunk-128-everything")


def _slow_but(name: str, fast: tuple[str, ...]) -> Any:
    return name if name in fast else pytest.param(name, marks=pytest.mark.slow)


def shard(spec: AttentionSpec) -> AttentionSpec:
    """One kv head of a model and its group: what a device of a large mesh has."""
    return replace(spec, num_heads=spec.num_heads // spec.num_kv_heads, num_kv_heads=1)


class TestAgainstReference:
    pytestmark = interpreted

    @pytest.mark.parametrize("name", [_slow_but(spec.name, FAST_SPECS) for spec in ODD_SPECS])
    def test_odd_specs(self, name: str) -> None:
        spec = next(spec for spec in ODD_SPECS if spec.name == name)
        check(make_case(spec, [40, 0, 7], [(0, 6), (100, 70)], **HALF))

    @pytest.mark.long
    @pytest.mark.parametrize("name", [spec.name for spec in MODEL_SPECS])
    def test_model_specs(self, name: str) -> None:
        spec = shard(next(spec for spec in MODEL_SPECS if spec.name == name))
        check(make_case(spec, [300, 1], [(130, 140)], **HALF))

    @pytest.mark.parametrize(
        ("decodes", "prefills"),
        [
            pytest.param([1], [], marks=pytest.mark.slow),
            ([1100, 256, 257, 0, 320], []),  # splits full, by one position too long, of a tile
            pytest.param([], [(0, 128), (0, 1)], marks=pytest.mark.slow),
            ([], [(127, 130)]),
            pytest.param([16, 64], [(0, 64), (64, 64)], marks=pytest.mark.slow),
        ],
    )
    def test_borders(self, decodes: list[int], prefills: list[tuple[int, int]]) -> None:
        check(make_case(AttentionSpec("two-heads", 2, 1, 64), decodes, prefills, **HALF))

    @pytest.mark.slow
    def test_long_sequences_have_larger_splits(self) -> None:
        length = splits.MAX_SPLITS * splits.MIN_SPLIT_TOKENS + 70
        check(make_case(AttentionSpec("one-head", 1, 1, 64, page_size=64), [length], [], **HALF))

    @pytest.mark.slow
    def test_float16(self) -> None:
        spec = AttentionSpec("two-heads", 2, 1, 64, sliding_window=90)
        check(make_case(spec, [200], [(70, 100)], **FLOAT16))

    @pytest.mark.slow
    @pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_quantised_pages(self, kv_dtype: str, dtype: str) -> None:
        spec = AttentionSpec("window", 2, 1, 64, sliding_window=90, page_size=32)
        check(make_case(spec, [140, 0, 7], [(60, 70)], backend="gpu", dtype=dtype, kv_dtype=kv_dtype))


class TestInvariance:
    """Bit for bit: what a sequence gets does not depend on its company, its chunks or its pages."""

    pytestmark = interpreted
    SPEC = AttentionSpec("window-sinks", 2, 1, 64, sliding_window=200, sinks=True)

    @pytest.mark.slow
    def test_alone_or_in_a_batch(self) -> None:
        lens = [70, 600, 0, 260]
        case = make_case(self.SPEC, lens, [(100, 128)], **HALF)
        out, lse, _ = run(case)
        for row, decode_row in enumerate((0, 1, 3)):
            alone = run(_rows(case, np.asarray([decode_row]), decodes=slice(decode_row, decode_row + 1)))
            np.testing.assert_array_equal(alone[0], out[row : row + 1])
            np.testing.assert_array_equal(alone[1], lse[row : row + 1])
        alone = run(_rows(case, np.arange(4, 132), prefills=slice(0, 1)))
        np.testing.assert_array_equal(alone[0], out[3:])

    @pytest.mark.slow
    def test_pages_moved(self) -> None:
        invariance.test_pages_moved("gpu", "window", "bfloat16", "bfloat16")

    @pytest.mark.long
    def test_in_chunks_or_at_once(self) -> None:
        invariance.test_in_chunks_or_at_once("gpu", "window", "bfloat16", "bfloat16")

    @pytest.mark.slow
    def test_wherever_the_chunk_starts(self) -> None:
        """The same queries in tiles that begin elsewhere, after a prefix that the pages hold.

        By a warpgroup's rows: numpy, which multiplies here, rounds by a row's place in its matrix.
        """
        tile = prefill_tile_tokens("gpu")
        case = make_case(self.SPEC, [], [(0, 2 * tile)], **HALF)
        out, lse, pages = run(case)
        numbers = jax.jit(lambda pages: pages.data)(pages)
        # A chunk of 100 positions from 64 on, whose keys the pages hold now.
        first, count = 64, 100
        metadata = case.metadata
        assert metadata.prefill is not None
        rows = np.arange(first, first + tile)
        part = replace(
            case,
            q=case.q[rows],
            k=case.k[rows],
            v=case.v[rows],
            valid=np.arange(tile) < count,
            metadata=AttentionMetadata(
                metadata.kv_write_index[rows],
                None,
                QueryTiles(
                    metadata.prefill.page_table[:1],
                    jnp.asarray([first], jnp.int32),
                    jnp.asarray([first + count], jnp.int32),
                ),
            ),
        )
        got, got_lse, _ = paged_attention(
            part.q,
            part.k,
            part.v,
            KVPages(numbers, None),
            part.metadata,
            sinks=case.sinks,
            return_lse=True,
            backend="gpu",
            interpret=True,
            **case.options(),
        )
        np.testing.assert_array_equal(np.asarray(got)[:count], out[first : first + count])
        np.testing.assert_array_equal(np.asarray(got_lse)[:count], lse[first : first + count])


def _rows(case: Case, kept: np.ndarray, *, decodes: slice = slice(0), prefills: slice = slice(0)) -> Case:
    def part(tiles: QueryTiles | None, which: slice) -> QueryTiles | None:
        tiles = jax.tree.map(lambda leaf: leaf[which], tiles)
        return tiles if tiles is not None and len(tiles.start) else None

    metadata = AttentionMetadata(
        case.metadata.kv_write_index[kept],
        part(case.metadata.decode, decodes),
        part(case.metadata.prefill, prefills),
    )
    return replace(
        case, q=case.q[kept], k=case.k[kept], v=case.v[kept], valid=case.valid[kept], metadata=metadata
    )


@pytest.mark.parametrize("tile", {target.rows for target in TARGETS})
@pytest.mark.parametrize("window", [None, 100, 5000])
def test_the_work_list_covers_each_visible_position_once(window: int | None, tile: int) -> None:
    max_tokens = 40_000
    lens = [0, 1, 63, 64, 65, 512, 513, 8192, 8193, max_tokens, 5077]
    visibility = Visibility(window, None)

    def make(lens: list[int]) -> splits.WorkList:
        work = jax.jit(lambda x: splits.make_work_list(x, max_tokens, visibility, tile))(jnp.asarray(lens))
        return jax.tree.map(np.asarray, work)

    work = make(lens)
    seen = [np.zeros(length, int) for length in lens]
    for row, begin, end in list(zip(work.row, work.begin, work.end, strict=True))[: work.num_items[0]]:
        assert begin % tile == 0
        assert begin < end
        seen[row][begin:end] += 1
    for row, length in enumerate(lens):
        first = 0 if window is None else max(length - window, 0)
        covered = np.arange(length) >= first // tile * tile
        np.testing.assert_array_equal(seen[row], covered)
        assert work.num_splits[row] <= splits.MAX_SPLITS
        alone = make([length])
        items = slice(work.first_item[row], work.first_item[row] + alone.num_items[0])
        np.testing.assert_array_equal(work.begin[items], alone.begin[: alone.num_items[0]])
        np.testing.assert_array_equal(work.end[items], alone.end[: alone.num_items[0]])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("spec", ATTENTION_SPECS, ids=lambda spec: spec.name)
def test_the_stages_fit_the_shared_memory(spec: AttentionSpec, target: Target) -> None:
    head_dim = kv_pages_shape(1, 8, 1, spec.head_dim, "gpu")[-1]
    blocks, stages = attention.decode_launch(target, head_dim, spec.num_heads // spec.num_kv_heads)
    # A stage of Blackwell's is twice Hopper's, of which wide heads leave room for one.
    least = 3 if target.rows == 64 else (1 if head_dim > 128 else 3)
    assert least <= stages <= 4
    assert blocks in (target.num_sms, 2 * target.num_sms)
    visibility = Visibility(spec.sliding_window, spec.attention_chunk)
    kv_tile, stages = attention.prefill_launch(target, head_dim, spec.page_size, visibility)
    assert stages >= (2 if head_dim == 256 else 3)
    assert spec.page_size % kv_tile == 0 or kv_tile % spec.page_size == 0


T, N, K, H = 2, 4, 2, 64


def arguments() -> dict[str, Any]:
    tiles = QueryTiles(jnp.zeros((T, 16), jnp.int32), jnp.zeros(T, jnp.int32), jnp.ones(T, jnp.int32))
    heads = [jnp.zeros((T, heads, H), jnp.bfloat16) for heads in (N, K, K)]
    return dict(
        zip("qkv", heads, strict=True),
        kv_pages=create_kv_pages(8, 16, K, H, "bfloat16", "gpu"),
        metadata=AttentionMetadata(jnp.zeros(T, jnp.int32), tiles, None),
        scale=1.0,
        backend="gpu",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({name: jnp.zeros((T, n, H)) for name, n in (("q", N), ("k", K), ("v", K))}, r"q \(float32\)"),
        (dict(kv_pages=create_kv_pages(8, 16, K, H, "float16", "gpu")), r"kv_pages.data \(float16\)"),
        (dict(kv_pages=create_kv_pages(8, 4, K, H, "bfloat16", "gpu")), "page_size=4"),
        (dict(kv_pages=create_kv_pages(8, 16, K, H, "int8", "gpu")), "page_size=16"),
        (dict(kv_pages=create_kv_pages(8, 16, K, H, "bfloat16", "xla")), "layout of backend='gpu'"),
        (
            dict(metadata=AttentionMetadata(jnp.zeros(T, jnp.int32), None, arguments()["metadata"].decode)),
            "tiles of 1 rows",
        ),
    ],
)
def test_what_the_kernels_lack_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments() | changes))


def test_wide_heads_are_refused() -> None:
    wide = arguments()
    wide |= {name: jnp.zeros((T, n, 320), jnp.bfloat16) for name, n in (("q", N), ("k", K), ("v", K))}
    wide["kv_pages"] = create_kv_pages(8, 16, K, 320, "bfloat16", "gpu")
    with pytest.raises(ValueError, match="head_dim of 256"):
        paged_attention(**wide)


def test_layout() -> None:
    assert kv_pages_shape(8, 16, 2, 80, "gpu") == (8, 2, 16, 2, 128)
    assert prefill_tile_tokens("gpu") == 128


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_every_jax_lowers_the_kernels(kv_dtype: str) -> None:
    """A decode and a prefill kernel, also by a jax that cannot interpret them."""
    spec = AttentionSpec("two-heads", 2, 1, 64, page_size=64)
    case = make_case(spec, [70], [(0, 6)], dtype="bfloat16", kv_dtype=kv_dtype, backend="gpu")
    attend = jax.jit(partial(paged_attention, backend="gpu", **case.options()))
    traced = attend.trace(case.q, case.k, case.v, case.kv_pages("gpu"), case.metadata)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2, text.count("custom_call")
