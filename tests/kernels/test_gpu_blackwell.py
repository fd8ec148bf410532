"""The GPU kernels with Blackwell's products, interpreted on the CPU: tcgen05 and tensor memory.

What differs from Hopper's is exercised: each width of head, quantised pages, latent attention, waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer_kernels import mla_paged_attention
from jaxinfer_kernels.gpu import attention, mla, targets
from jaxinfer_kernels.specs import AttentionSpec, LatentSpec
from tests.kernels import attention_cases, test_gpu_mla, test_gpu_races
from tests.kernels import test_attention_invariance as invariance
from tests.kernels.attention_cases import check, make_case

HALF: dict[str, Any] = dict(backend="gpu", dtype="bfloat16", kv_dtype="bfloat16")
interpreted = [
    pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="needs jax 0.11: InterpretGPUParams"),
    # The keys of positions that nobody wrote are NaN here; what is made of them is masked.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]


def device(capability: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", device_kind="NVIDIA X", compute_capability=capability)


class TestInterpreted:
    pytestmark = interpreted

    @pytest.fixture(autouse=True)
    def blackwell(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for module in (attention, mla):
            monkeypatch.setattr(module, "current_target", targets.Blackwell)
        attention_cases._jitted.cache_clear()
        yield
        attention_cases._jitted.cache_clear()

    @pytest.mark.parametrize(
        "head_dim", [64, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (80, 192, 256))]
    )
    def test_heads(self, head_dim: int) -> None:
        """Of 64 and 192, products of values are wider than the values."""
        spec = AttentionSpec("heads", 6, 2, head_dim, sliding_window=100, soft_cap=20.0, sinks=True)
        check(make_case(spec, [140, 0, 7], [(60, 70)], **HALF))

    @pytest.mark.slow
    def test_splits_and_borders_of_tiles(self) -> None:
        spec = AttentionSpec("one-head", 1, 1, 128, page_size=64)
        check(make_case(spec, [1100, 128, 129, 0, 512], [(0, 128), (0, 1), (127, 130)], **HALF))

    @pytest.mark.slow
    @pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
    def test_quantised_pages(self, kv_dtype: str) -> None:
        spec = AttentionSpec("window", 2, 1, 64, sliding_window=90, page_size=32)
        check(make_case(spec, [140, 0, 7], [(60, 70)], **{**HALF, "kv_dtype": kv_dtype}))

    @pytest.mark.slow
    def test_pages_moved(self) -> None:
        invariance.test_pages_moved("gpu", "window", "bfloat16", "bfloat16")

    @pytest.mark.slow
    def test_latent_attention(self) -> None:
        spec = LatentSpec("two-parts", 18, 200, 40, 24, 16)
        plain, args, valid = test_gpu_mla.make_gpu_case(spec)
        scale = args.pop("scale")
        out, _ = jax.jit(partial(mla_paged_attention, scale=scale, backend="gpu", interpret=True))(**args)
        want, _ = test_gpu_mla.reference.mla_paged_attention(**plain)
        bound = 2**-8 * (2 + 4 * scale * np.sqrt(spec.latent_dim)) * 5  # as in test_gpu_mla.py
        assert np.abs(np.asarray(out, np.float64)[valid] - want[valid]).max() <= bound

    @pytest.mark.parametrize("kv_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow)])
    def test_no_races(self, kv_dtype: str) -> None:
        test_gpu_races.simulate([140, 0, 7], [(60, 70)], kv_dtype)

    def test_what_does_not_fit_is_refused(self) -> None:
        spec = AttentionSpec("wide", 2, 1, 256, page_size=32)
        case = make_case(spec, [40], [], **{**HALF, "kv_dtype": "int8"})
        with pytest.raises(ValueError, match=r"\(int8\) does not fit the shared memory of Blackwell"):
            attention_cases.run(case)


@pytest.mark.parametrize(("capability", "name"), [("9.0", "Hopper"), ("10.0", "Blackwell")])
def test_the_products_follow_the_device(capability: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [device(capability)])
    assert targets.current_target().name == name


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H100 80GB HBM3", "Hopper"), ("NVIDIA GB200", "Blackwell"), ("TPU v5e", "Hopper")],
)
def test_or_the_device_that_is_described(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = SimpleNamespace(device_kind=kind, platform="gpu" if "NVIDIA" in kind else "tpu")
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: SimpleNamespace(abstract_device=described))
    assert targets.current_target().name == name


@pytest.mark.parametrize("capability", ["8.0", "12.0"])
def test_other_generations_are_refused(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [device(capability)])
    with pytest.raises(ValueError, match=rf"NVIDIA X is of compute capability {capability}: use"):
        targets.current_target()
