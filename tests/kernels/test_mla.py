"""Latent attention: the op against the reference, and the reference's terms against attention by heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels import (
    AttentionMetadata,
    Backend,
    QueryTiles,
    create_kv_pages,
    create_mla_pages,
    mla_paged_attention,
    reference,
)
from jaxinfer_kernels.layout import KVPages
from jaxinfer_kernels.specs import LATENT_SPECS, AttentionSpec, LatentSpec
from jaxinfer_kernels.tpu import attention
from tests.kernels.attention_cases import make_case

SPECS = {spec.name: spec for spec in LATENT_SPECS}
SMALL = SPECS["small"]


def make_mla_case(
    spec: LatentSpec, dtype: str, kv_dtype: str, backend: Backend = "xla", **changes: Any
) -> tuple[dict[str, Any], np.ndarray]:
    """A mixed step, NaN wherever no sequence owns it; the rows that are not padding."""
    width = spec.latent_dim + spec.rope_dim
    plain = AttentionSpec("as one head", spec.num_heads, 1, width, page_size=spec.page_size)
    sizes: dict[str, Any] = dict(decodes=[40, 0, 7, 130], prefills=[(0, 6), (100, 50)])
    case = make_case(plain, **(sizes | changes), dtype=dtype, backend=backend)
    numbers = case.numbers[:, :1].astype(kv_dtype)
    pages = create_mla_pages(1, spec.page_size, spec.latent_dim, spec.rope_dim, kv_dtype, backend).data
    data = jax.lax.bitcast_convert_type(numbers, pages.dtype)
    data = jnp.pad(data, [*[(0, 0)] * 3, (0, pages.shape[3] - width)])
    q_latent, q_rope = jnp.split(case.q, [spec.latent_dim], axis=2)
    latent, k_rope = jnp.split(case.k[:, 0], [spec.latent_dim], axis=1)
    args = dict(q_latent=q_latent, q_rope=q_rope, latent=latent, k_rope=k_rope)
    scale = (spec.nope_dim + spec.rope_dim) ** -0.5
    return args | dict(kv_pages=KVPages(data, None), metadata=case.metadata, scale=scale / 2), case.valid


def run(args: dict[str, Any], **options: Any) -> tuple[jax.Array, KVPages]:
    arrays = {name: x for name, x in args.items() if name != "scale"}
    return jax.jit(partial(mla_paged_attention, scale=args["scale"], **options))(**arrays)


# An interpreted kernel takes seconds to compile.
@pytest.mark.parametrize("backend", ["xla", pytest.param("tpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        ("small", "float32", "float32"),
        ("small", "float32", "bfloat16"),
        ("small", "bfloat16", "bfloat16"),
        ("deepseek-v2-lite", "float32", "float32"),
        pytest.param("deepseek-v3-a-shard", "float32", "float32", marks=pytest.mark.slow),
        pytest.param("deepseek-v2-lite", "bfloat16", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_equals_reference(name: str, dtype: str, kv_dtype: str, backend: Backend) -> None:
    args, valid = make_mla_case(SPECS[name], dtype, kv_dtype, backend)
    out, pages = run(args, backend=backend, interpret=backend == "tpu")
    check(args, valid, out, pages)


def check(args: dict[str, Any], valid: np.ndarray, out: jax.Array, pages: KVPages) -> None:
    """Outputs and the whole cache but the null page equal the reference's."""
    width = args["latent"].shape[1] + args["k_rope"].shape[1]
    given = args["kv_pages"]
    plain: dict[str, Any] = dict(kv_pages=KVPages(given.data[..., :width], None))
    want, want_data = reference.mla_paged_attention(**(args | plain))
    dtype = args["latent"].dtype.name
    got, want = np.asarray(out, np.float64)[valid], want[valid]
    if dtype == "float32":
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    else:
        # Weights, output and each element of the scaled query are rounded once, by 2^-8 at most: see
        # attention_cases.assert_within_rounding. Values are normal numbers, here at most 5.
        logit_error = 4 * args["scale"] * np.sqrt(args["q_latent"].shape[2])
        assert np.abs(got - want).max() <= 2**-8 * (2 + logit_error) * 5
    np.testing.assert_array_equal(
        np.asarray(pages.data).view(pages.dtype).astype(np.float64)[1:, ..., :width], want_data[1:]
    )


@pytest.mark.parametrize("copies", ["eager", pytest.param("on_wait", marks=pytest.mark.slow)])
def test_no_races(copies: Any) -> None:
    """The kernel as a simulated TPU takes it: 2 heads, tiles of 16 rows."""
    steps: dict[str, Any] = dict(decodes=[70, 0, 1], prefills=[(0, 26), (37, 11)], tile=16)
    args, valid = make_mla_case(replace(SMALL, num_heads=2), "float32", "float32", "tpu", **steps)
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=copies)
    out, pages = jax.jit(
        lambda **arrays: attention.mla_paged_attention(scale=args["scale"], interpret=params, **arrays)
    )(**{name: x for name, x in args.items() if name != "scale"})
    check(args, valid, *jax.block_until_ready((out, pages)))


def test_tiles_of_many_heads_are_cut() -> None:
    """Two of 24 rows, of which one has 13 of a sequence, from its position 5 on."""
    tiles = QueryTiles(jnp.asarray([[3], [4]]), jnp.asarray([5, 0]), jnp.asarray([18, 0]))
    cut = attention._cut_tiles(tiles, 8, 3)
    np.testing.assert_array_equal(cut.page_table[:, 0], [3, 3, 3, 4, 4, 4])
    np.testing.assert_array_equal(cut.kv_len, [13, 18, 0, 0, 0, 0])
    np.testing.assert_array_equal(cut.start[:2], [5, 13])


def test_absorbed_equals_attention_by_heads() -> None:
    """One prompt, with random W_uk and W_uv: keys and values of each head, and dense attention."""
    rng = np.random.default_rng(0)
    spec, num_tokens = SMALL, 32
    draw = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    w_uk = draw(spec.num_heads, spec.nope_dim, spec.latent_dim) / 6
    w_uv = draw(spec.num_heads, spec.value_dim, spec.latent_dim) / 6
    q_nope, q_rope = (draw(num_tokens, spec.num_heads, dim) for dim in (spec.nope_dim, spec.rope_dim))
    latent, k_rope = draw(num_tokens, spec.latent_dim), draw(num_tokens, spec.rope_dim)
    scale = (spec.nope_dim + spec.rope_dim) ** -0.5

    k_nope = np.einsum("nhr,tr->tnh", w_uk, latent)
    logits = np.einsum("tnh,snh->nts", q_nope, k_nope) + np.einsum("tnh,sh->nts", q_rope, k_rope)
    logits = np.where(np.tri(num_tokens, dtype=bool), logits * scale, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("nts,nhr,sr->tnh", weights, w_uv, latent)

    tiles = QueryTiles(jnp.arange(1, 5)[None], jnp.zeros(1, jnp.int32), jnp.asarray([num_tokens]))
    args = dict(q_latent=np.einsum("tnh,nhr->tnr", q_nope, w_uk), q_rope=q_rope, latent=latent, k_rope=k_rope)
    out, _ = run(
        {name: jnp.asarray(x, jnp.float32) for name, x in args.items()}
        | dict(
            kv_pages=create_mla_pages(5, spec.page_size, spec.latent_dim, spec.rope_dim, "float32"),
            metadata=AttentionMetadata(jnp.arange(16, 16 + num_tokens), None, tiles),
            scale=scale,
        )
    )
    np.testing.assert_allclose(np.einsum("tnr,nhr->tnh", out, w_uv), want, rtol=1e-5, atol=1e-5)


def test_bits_of_bfloat16_are_no_pages_of_a_tpu() -> None:
    """Rows of 128 have one shape in both layouts, but XLA's bfloat16 pages hold uint16."""
    args, _ = make_mla_case(LatentSpec("128", 2, 64, 64, 16, 16), "bfloat16", "bfloat16")
    assert args["kv_pages"].data.dtype == jnp.uint16
    with pytest.raises(ValueError, match=r"\(uint16\) is not in the layout of backend='tpu'"):
        mla_paged_attention(**args, backend="tpu", interpret=True)
    arrays = {name: x for name, x in args.items() if name != "scale"}
    step = jax.jit(partial(mla_paged_attention, scale=args["scale"])).trace(**arrays)
    assert "tpu_custom_call" not in step.lower(lowering_platforms=("tpu",)).as_text()


def test_the_cache_is_written_in_place() -> None:
    args, _ = make_mla_case(SMALL, "float32", "float32")
    arrays = {name: x for name, x in args.items() if name not in ("scale", "kv_pages")}
    pages = jax.eval_shape(lambda: create_mla_pages(8192, 16, SMALL.latent_dim, SMALL.rope_dim, "bfloat16"))
    step = jax.jit(
        lambda kv_pages, **arrays: mla_paged_attention(kv_pages=kv_pages, scale=1.0, **arrays),
        donate_argnums=0,
    )
    memory = step.lower(pages, **arrays).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pages.data.size * 2
    assert memory.temp_size_in_bytes < pages.data.size * 2 / 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(latent=jnp.zeros((1, 40))), r"latent\(1, 40\)"),
        (dict(q_rope=jnp.zeros((1, 2, 8))), r"q_rope\(1, 2, 8\)"),
        (dict(kv_pages=create_kv_pages(4, 16, 1, 48, "float32")), r"kv_pages.data\(4, 2, 16, 48\)"),
        (dict(kv_pages=KVPages(jnp.zeros((4, 1, 16, 48), jnp.int8), None)), r"kv_pages.data \(int8\)"),
        (
            dict(backend="tpu"),
            r"kv_pages.data\(\d+, 1, 16, 48\) \(float32\) is not in the layout of backend='tpu'",
        ),
        (dict(backend="gpu"), "backend='gpu'"),
        (dict(interpret=True), "interpret=True"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    args, _ = make_mla_case(SMALL, "float32", "float32")
    with pytest.raises(ValueError, match=message):
        mla_paged_attention(**(args | changes))
    with pytest.raises(ValueError, match="dtype='int8'"):
        create_mla_pages(4, 16, 40, 8, "int8")
