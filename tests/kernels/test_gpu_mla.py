"""Latent attention on Hopper, interpreted, against the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer_kernels import create_mla_pages, mla_paged_attention, reference
from jaxinfer_kernels.gpu import mla
from jaxinfer_kernels.layout import pack_mla_pages
from jaxinfer_kernels.specs import LATENT_SPECS, LatentSpec
from tests.kernels.test_mla import make_mla_case

SPECS = {spec.name: spec for spec in LATENT_SPECS}
SMALL = SPECS["small"]
interpreted = [
    pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="needs jax 0.11: InterpretGPUParams"),
    # The keys of positions that nobody wrote are NaN here; what is made of them is masked.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]


def make_gpu_case(spec: LatentSpec) -> tuple[dict[str, Any], dict[str, Any], np.ndarray]:
    """Arguments for the reference, and with the kernel's pages; the rows that are not padding."""
    args, valid = make_mla_case(spec, "bfloat16", "bfloat16")
    numbers = jax.lax.bitcast_convert_type(args["kv_pages"].data, jnp.bfloat16)
    return args, args | dict(kv_pages=pack_mla_pages(numbers, spec.latent_dim, "gpu")), valid


class TestInterpreted:
    pytestmark = interpreted

    @pytest.mark.slow
    @pytest.mark.parametrize("name", SPECS)
    def test_equals_reference(self, name: str) -> None:
        """With heads that fill a block and that do not; the whole cache but the null page."""
        plain, args, valid = make_gpu_case(SPECS[name])
        scale = args.pop("scale")
        step = jax.jit(partial(mla_paged_attention, scale=scale, backend="gpu", interpret=True))
        out, pages = step(**args)
        want, want_data = reference.mla_paged_attention(**plain)
        # Weights, output and each element of the scaled query are rounded once, by 2^-8 at most: see
        # attention_cases.assert_within_rounding. Values are normal numbers, here at most 5.
        bound = 2**-8 * (2 + 4 * scale * np.sqrt(SPECS[name].latent_dim)) * 5
        assert np.abs(np.asarray(out, np.float64)[valid] - want[valid]).max() <= bound
        data = np.asarray(pages.data[:, :, :, 0, : want_data.shape[3]], np.float64)
        np.testing.assert_array_equal(data[1:], want_data[1:])

    @pytest.mark.slow
    def test_no_races(self) -> None:
        _, args, _ = make_gpu_case(SMALL)
        params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=32)
        step = jax.jit(partial(mla.mla_paged_attention, scale=args.pop("scale"), interpret=params))
        jax.block_until_ready(step(**args))


def test_what_the_kernel_lacks_is_refused() -> None:
    args, _ = make_mla_case(SMALL, "float32", "float32")
    args["kv_pages"] = create_mla_pages(4, 16, SMALL.latent_dim, SMALL.rope_dim, "float32", "gpu")
    with pytest.raises(ValueError, match=r"q_latent \(float32\)"):
        mla_paged_attention(**args)
    with pytest.raises(ValueError, match="layout of backend='xla'"):
        mla_paged_attention(**args, backend="xla")
