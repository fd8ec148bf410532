"""Checks of latent attention on a device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from device_checks.check import Check, Outcome, launch_ms, worst
from jaxinfer_kernels import Backend, mla_paged_attention, reference
from jaxinfer_kernels.layout import pack_mla_pages
from jaxinfer_kernels.specs import AttentionSpec, LatentSpec
from tests.kernels.attention_cases import make_case


def mla_check(spec: LatentSpec, decodes: list[int], dtype: str, backend: Backend) -> Check:
    """Decodes of so many tokens each, and two short prompts."""
    width = spec.latent_dim + spec.rope_dim

    def run() -> Outcome:
        plain = AttentionSpec("as one head", spec.num_heads, 1, width, page_size=spec.page_size)
        prefills = [(0, 6), (200, 70)]
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
