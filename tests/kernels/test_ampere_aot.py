"""Plain XLA, which is what Ampere runs, as XLA compiles it for an A100 that is not there (sm_80)."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxinfer_kernels import AttentionMetadata, QueryTiles, create_kv_pages, paged_attention

MISSING = [name for name in ("jax_plugins", "nvidia") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: see scripts/bench_kernels_gpu.py"),
]
# An A100 SXM of 80 GB, by NVIDIA's data sheet and CUDA's table of compute capabilities.
A100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912
  core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2039000000000 l2_cache_size: 41943040 device_memory_size: 85899345920
  cuda_compute_capability { major: 8 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
device_description_str: "NVIDIA A100-SXM4-80GB"
"""
N, K, H, PAGE, PAGES_A_SEQ = 32, 8, 128, 16, 512


@pytest.fixture(autouse=True)
def _no_cache() -> Iterator[None]:
    """Programs for absent devices cannot be read back here."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", enabled)


@pytest.mark.parametrize(("num_decodes", "num_tiles"), [(64, 0), (0, 4)])
def test_the_pool_stays_where_it_is_and_pages_are_read_as_they_are_used(
    num_decodes: int, num_tiles: int
) -> None:
    """Llama-3.1-8B's heads, and a pool for 64 sequences of 8,192."""
    topology = topologies.get_topology_desc("a100", platform="cuda", target_config=A100, topology="1x1x1")
    assert topology.devices[0].compute_capability == "8.0"
    placed = SingleDeviceSharding(topology.devices[0])

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    def tiles(count: int) -> QueryTiles | None:
        return QueryTiles(array((count, PAGES_A_SEQ)), array((count,)), array((count,))) if count else None

    rows, num_pages = num_decodes + 32 * num_tiles, 64 * PAGES_A_SEQ
    q, k, v = (array((rows, heads, H), jnp.bfloat16) for heads in (N, K, K))
    metadata = AttentionMetadata(array((rows,)), tiles(num_decodes), tiles(num_tiles))
    pages = jax.eval_shape(partial(create_kv_pages, num_pages, PAGE, K, H, "bfloat16", "xla"))
    pages = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), pages)
    step = jax.jit(partial(paged_attention, scale=H**-0.5, backend="xla"), donate_argnums=3)
    compiled: Any = step.lower(q, k, v, pages, metadata).compile()

    pool_bytes = pages.data.size * pages.data.dtype.itemsize
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == pool_bytes
    # The tile of keys and of values that a pass reads, in two forms at most, and the results; not the pool.
    assert memory.temp_size_in_bytes < 200e6 < pool_bytes / 10
    # As many bytes as the pool: its argument, the rows written into it, and what hands it on.
    whole = re.findall(rf"= u16\[(?:{num_pages},{2 * K}|{num_pages * 2 * K}),{PAGE},{H}\]\S* (\S+?)\(", text)
    assert set(whole) <= {"parameter", "get-tuple-element", "bitcast", "scatter", "fusion", "while"}
    # The pages are read in a loop that ends with the longest sequence.
    assert any(" while(" in line and "known_trip_count" not in line for line in text.splitlines())
