"""Which engines run the C++ kernels, and what is said where they cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.config import ConfigError, EngineConfig, LayerConfig, ModelConfig, RopeConfig
from jaxinfer.engine import cpu_kernels
from jaxinfer.engine.resolve import resolve
from jaxinfer_kernels.cpu import CompilerError

CPU: Any = SimpleNamespace(platform="cpu")
TPU: Any = SimpleNamespace(platform="tpu", memory_stats=lambda: {"bytes_limit": 2**30})
MODEL = ModelConfig("Tiny", 64, 32, 64, 4, 2, 8, (LayerConfig(RopeConfig()),), 1e-6, 128, True)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    lines: list[str] = []

    def load(directory: object) -> None:
        raise CompilerError("no C++ compiler is on the PATH")

    monkeypatch.setattr(cpu_kernels, "load", load)
    monkeypatch.setattr(cpu_kernels.logging, "warning", lambda text, *args: lines.append(text % args))
    return lines


def test_without_a_compiler_auto_is_xla_and_says_so(no_compiler: list[str]) -> None:
    assert not cpu_kernels.load_cpu_kernels(EngineConfig("m"), CPU)
    assert no_compiler == ["attention and matmul are xla, the slower ones: no C++ compiler is on the PATH"]


@pytest.mark.parametrize("flag", ["attention", "matmul"])
def test_without_a_compiler_cpu_is_refused(no_compiler: list[str], flag: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{flag}=cpu: no C.. compiler is on the PATH; install one, or use "
    ):
        cpu_kernels.load_cpu_kernels(EngineConfig("m").replace(**{flag: "cpu"}), CPU)


@pytest.mark.parametrize(
    ("device", "flags"), [(TPU, {}), (CPU, {"attention": "xla", "matmul": "xla"})], ids=["tpu", "xla"]
)
def test_nothing_is_compiled_for_nothing(no_compiler: list[str], device: Any, flags: dict[str, str]) -> None:
    assert not cpu_kernels.load_cpu_kernels(EngineConfig("m").replace(**flags), device)
    assert no_compiler == []


@pytest.mark.parametrize(
    ("flags", "backend", "matmul"),
    [
        ({}, "cpu", "cpu"),
        ({"mesh": "2x1"}, "cpu", "cpu"),
        ({"mesh": "1x2"}, "cpu", "xla"),
        ({"dtype": "bfloat16"}, "xla", "xla"),
        ({"kv_cache_dtype": "float16"}, "xla", "cpu"),
        ({"attention": "xla"}, "xla", "cpu"),
        ({"matmul": "xla"}, "cpu", "xla"),
    ],
)
def test_what_auto_chooses(flags: dict[str, str], backend: str, matmul: str) -> None:
    config = EngineConfig("m").replace(**flags)
    resolved = resolve(config, MODEL, CPU, cpu_kernels=True)
    assert (resolved.cache.backend, resolved.matmul) == (backend, matmul)
    without = resolve(config, MODEL, CPU)
    assert (without.cache.backend, without.matmul) == ("xla", "xla")


@pytest.mark.parametrize(
    ("device", "flags", "message"),
    [
        (
            CPU,
            {"attention": "cpu", "dtype": "bfloat16"},
            r"attention=cpu .* \(here bfloat16 and float32 on a ",
        ),
        (CPU, {"attention": "cpu", "kv_cache_dtype": "float16"}, r"\(here float32 and float16 on a cpu\)"),
        (TPU, {"attention": "cpu", "dtype": "float32"}, r"\(here float32 and float32 on a tpu\)"),
        (CPU, {"matmul": "cpu", "mesh": "1x2"}, r"matmul=cpu .* mesh=Dx1 \(here 1x2\): use matmul=xla"),
        (TPU, {"matmul": "cpu"}, r"matmul=cpu is for CPUs"),
    ],
)
def test_what_is_refused(device: Any, flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig("m").replace(**flags), MODEL, device, cpu_kernels=device is CPU)
