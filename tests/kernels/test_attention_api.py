"""What paged attention refuses, by name; and that its XLA path never converts or copies the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer_kernels import (
    AttentionMetadata,
    KVPages,
    QueryTiles,
    create_kv_pages,
    kv_pages_shape,
    kv_tile_tokens,
    paged_attention,
    prefill_tile_tokens,
    reference,
)
from jaxinfer_kernels.layout import KV_DTYPES
from jaxinfer_kernels.quantize import quantize

T, N, K, H = 4, 4, 2, 64


def tiles(count: int, width: int = 8) -> QueryTiles:
    return QueryTiles(
        jnp.zeros((count, width), jnp.int32), jnp.zeros(count, jnp.int32), jnp.ones(count, jnp.int32)
    )


def arguments(kv_dtype: str = "float32") -> dict[str, Any]:
    return dict(
        q=jnp.zeros((T, N, H)),
        k=jnp.zeros((T, K, H)),
        v=jnp.zeros((T, K, H)),
        kv_pages=create_kv_pages(8, 16, K, H, kv_dtype),
        metadata=AttentionMetadata(jnp.zeros(T, jnp.int32), tiles(T), None),
        scale=1.0,
    )


PAGES = create_kv_pages(8, 16, K, H, "float32")
QUANTIZED = create_kv_pages(8, 16, K, H, "int8")
METADATA = AttentionMetadata(jnp.zeros(T, jnp.int32), tiles(T), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(k=jnp.zeros((T, K, 32))), r"k\(4, 2, 32\)"),
        (dict(q=jnp.zeros((T, 3, H))), r"q\(4, 3, 64\) must have a multiple of k's heads"),
        (dict(q=jnp.zeros((T, N, H), jnp.bfloat16)), r"q \(bfloat16\)"),
        (dict(kv_pages=create_kv_pages(8, 16, 3, H, "float32")), r"kv_pages.data\(8, 6, 16, 64\)"),
        (dict(kv_pages=create_kv_pages(8, 48, K, H, "float32")), "page_size=48"),
        (dict(kv_pages=KVPages(PAGES.data.astype(jnp.int32), None)), r"kv_pages.data \(int32\)"),
        (dict(kv_pages=KVPages(QUANTIZED.data, None)), "kv_pages.scales is None"),
        (dict(kv_pages=KVPages(PAGES.data, QUANTIZED.scales)), "kv_pages.scales must be None"),
        (dict(metadata=replace(METADATA, kv_write_index=jnp.zeros(3, jnp.int32))), r"kv_write_index\(3,\)"),
        (dict(metadata=replace(METADATA, decode=None)), "metadata.decode and metadata.prefill"),
        (dict(metadata=replace(METADATA, decode=tiles(3))), r"metadata.decode.start has 3 rows and q 4"),
        (dict(metadata=replace(METADATA, decode=tiles(4, 6))), r"metadata.decode.page_table\(4, 6\)"),
        (dict(metadata=AttentionMetadata(METADATA.kv_write_index, tiles(1), tiles(2))), "divide the 3 rows"),
        (
            dict(metadata=AttentionMetadata(METADATA.kv_write_index, None, tiles(0))),
            "metadata.prefill has no",
        ),
        (dict(sliding_window=0), "sliding_window=0"),
        (dict(attention_chunk=-1), "attention_chunk=-1"),
        (dict(sliding_window=3, attention_chunk=3), "one must be None"),
        (dict(soft_cap=0.0), "soft_cap=0.0"),
        (dict(sinks=jnp.zeros(K)), r"sinks\(2,\)"),
        (dict(backend="mps"), "backend='mps'"),
        (dict(interpret=True), "interpret=True"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments() | changes))


def tpu_pages(page_size: int, kv_dtype: str) -> dict[str, Any]:
    """With page tables of whole tiles."""
    metadata = AttentionMetadata(METADATA.kv_write_index, tiles(T, max(1, 64 // page_size)), None)
    return dict(kv_pages=create_kv_pages(8, page_size, K, H, kv_dtype, "tpu"), metadata=metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({name: jnp.zeros((T, n, H), jnp.float16) for name, n in (("q", N), ("k", K), ("v", K))}, "float16"),
        (tpu_pages(16, "float16"), r"kv_pages.data \(float16\)"),
        (tpu_pages(8, "float32"), "page_size=8 must be at least 16"),
        (tpu_pages(192, "int8"), "page_size=192 must divide 128"),
        (dict(metadata=replace(METADATA, decode=None, prefill=tiles(1))), "tiles of 4 rows"),
        (dict(kv_pages=PAGES), "layout of backend='tpu'"),
    ],
)
def test_what_the_tpus_kernels_lack_is_refused(changes: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = dict(kv_pages=create_kv_pages(8, 16, K, H, "float32", "tpu"), backend="tpu")
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments() | args | changes))


def test_layouts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype='int16'"):
        create_kv_pages(8, 16, K, H, "int16")
    with pytest.raises(ValueError, match="page_size=48"):
        kv_tile_tokens(48)
    assert kv_pages_shape(8, 16, K, H, "xla") == (8, 2 * K, 16, H)
    assert prefill_tile_tokens("xla") == 32


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_cache_is_neither_copied_nor_converted(kv_dtype: str, rows: int) -> None:
    """A bitcast of the whole cache would show as temporaries of its size, a float32 copy as more."""
    abstract = jax.eval_shape(lambda: create_kv_pages(8192, 16, K, H, kv_dtype))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    args = arguments()
    q, k, v = (args[name][:rows] for name in "qkv")
    metadata = AttentionMetadata(jnp.zeros(rows, jnp.int32), tiles(rows), None)
    step = jax.jit(lambda *args: paged_attention(*args, scale=1.0), donate_argnums=3)
    memory = step.lower(q, k, v, abstract, metadata).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 20


def test_quantised_values_are_near_and_zeros_stay() -> None:
    """Half a step of the scale for int8; for e4m3 (3 bits of mantissa) a sixteenth of the value."""
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    x[7] = 0
    values, scales = quantize(jnp.asarray(x), "int8")
    np.testing.assert_allclose(scales, np.abs(x).max(1) / 127, rtol=1e-6)
    assert (np.abs(values * scales[:, None] - x) <= 0.501 * scales[:, None]).all()
    values, scales = quantize(jnp.asarray(x), "float8_e4m3fn")
    np.testing.assert_allclose(scales, np.abs(x).max(1) / 448, rtol=1e-6)
    error = np.abs(values.astype(jnp.float32) * scales[:, None] - x)
    assert (error <= np.abs(x) / 16 + scales[:, None] * 2**-10).all()
    assert not values[7].any()
    assert scales[7] == 0


@pytest.mark.parametrize("options", [{}, dict(sliding_window=5), dict(soft_cap=2.0)])
def test_the_reference_equals_dense_attention(options: dict[str, Any]) -> None:
    """On one whole sequence, whose cache is in order."""
    rng = np.random.default_rng(3)
    num_tokens = 32
    q, k, v = (jnp.asarray(rng.standard_normal((num_tokens, n, 16)), jnp.float32) for n in (4, 2, 2))
    table = QueryTiles(jnp.arange(4)[None], jnp.zeros(1, jnp.int32), jnp.asarray([num_tokens]))
    metadata = AttentionMetadata(jnp.arange(num_tokens), None, table)
    out, *_ = reference.paged_attention(
        q, k, v, create_kv_pages(4, 16, 2, 16, "float32"), metadata, scale=0.25, **options
    )
    want = reference.dense_attention(q, k, v, scale=0.25, **options)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def test_a_window_or_chunk_that_holds_all_changes_nothing() -> None:
    rng = np.random.default_rng(4)
    args = arguments()
    for name, heads in (("q", N), ("k", K), ("v", K)):
        args[name] = jnp.asarray(rng.standard_normal((T, heads, H)), jnp.float32)
    index = jnp.arange(16, 20, dtype=jnp.int32)
    one_tile = QueryTiles(jnp.ones((1, 4), jnp.int32), jnp.zeros(1, jnp.int32), jnp.asarray([4], jnp.int32))
    args["metadata"] = AttentionMetadata(index, None, one_tile)

    def attend(**options: Any) -> Any:
        return jax.jit(lambda: paged_attention(**args, **options))()

    want, _ = attend()
    for options in (dict(sliding_window=4), dict(attention_chunk=4)):
        np.testing.assert_array_equal(attend(**options)[0], want)
    out, lse, _ = attend(sinks=jnp.zeros(N), return_lse=True)
    # The sink's logit of 0 adds 1 to each sum of exponentials.
    np.testing.assert_allclose(out, want * (1 - np.exp(-lse))[..., None], rtol=1e-5, atol=1e-6)
