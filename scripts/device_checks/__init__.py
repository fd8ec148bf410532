"""What scripts/check_device.py runs on a device: each kernel against the reference, and timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from device_checks.attention import anchor_check, spec_check
from device_checks.check import Check
from device_checks.latent import mla_check
from device_checks.matmuls import linear_checks, matmul_checks
from jaxinfer_kernels import Backend
from jaxinfer_kernels.layout import QUANTIZED_DTYPES
from jaxinfer_kernels.specs import ATTENTION_SPECS, LATENT_SPECS, MODEL_SPECS

ANCHORS = ("llama-3.1-8b", "qwen3-32b")


def device_checks(platform: str, kernel: Backend, *, small: bool) -> list[Check]:
    """The checks for a platform, the most important first; `kernel` is the backend of its own kernels.

    Each is checked with XLA's beside. A CPU's kernels take neither quantised caches nor latent attention.
    `small` takes fewer, of shapes that a CPU runs in seconds.
    """
    on_cpu = platform == "cpu"
    float_dtype = "float32" if on_cpu else "bfloat16"
    caches = [float_dtype, *QUANTIZED_DTYPES[: 1 if small else None]]
    backends: list[Backend] = [kernel] if kernel == "xla" else [kernel, "xla"]
    # Sequences that decode, their tokens, and a chunk of prefill; a CPU has time for less.
    sequences, context, chunk = (4, 256, 128) if small else (16, 1024, 512) if on_cpu else (64, 4096, 512)
    latent_decodes = [40, 0, 7, 300] if small else [context] * sequences
    latent_specs = LATENT_SPECS[-1:] if small else LATENT_SPECS
    specs = [spec for spec in ATTENTION_SPECS if not small or spec.name in ("chunk-48", "window-150-sinks")]

    def kernel_for(cache: str) -> Backend:
        return "xla" if kernel == "cpu" and cache in QUANTIZED_DTYPES else kernel

    def anchors(cache: str, backend: Backend, page_size: int) -> Iterator[Check]:
        for spec in MODEL_SPECS:
            for kind in ("decode", "prefill"):
                if spec.name in ANCHORS[: 1 if small else None]:
                    sized = replace(spec, page_size=page_size)
                    yield anchor_check(sized, kind, float_dtype, cache, backend, sequences, context, chunk)

    checks = [c for backend in backends for c in anchors(float_dtype, backend, 128)]
    checks += [spec_check(spec, float_dtype, float_dtype, kernel) for spec in specs]
    checks += linear_checks(backends, small) if on_cpu else []
    checks += [c for cache in caches[1:] for c in anchors(cache, kernel_for(cache), 128)]
    checks += matmul_checks(float_dtype, small)
    checks += [
        mla_check(spec, latent_decodes, float_dtype, b)
        for b in backends
        if b != "cpu"
        for spec in latent_specs
    ]
    checks += [] if small else anchors(float_dtype, kernel, 16)
    checks += [
        spec_check(spec, float_dtype, cache, kernel_for(cache)) for cache in caches[1:] for spec in specs
    ]
    others = {"tpu": "float32", "gpu": "float16"}
    checks += [spec_check(spec, others[kernel], others[kernel], kernel) for spec in specs if kernel in others]
    beside = [cache for cache in caches if kernel_for(cache) != "xla"]
    checks += [spec_check(spec, float_dtype, cache, "xla") for cache in beside for spec in specs]
    return checks
