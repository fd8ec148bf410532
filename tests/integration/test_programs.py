"""What the compiled programs do to memory: the cache is written in place, in every bucket."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.engine.programs import Programs, compile_programs
from jaxinfer.models.families import load_model_config
from jaxinfer.models.weights import abstract_model
from jaxinfer_checkpoints import open_checkpoint
from tests.integration.engines import MODELS

NUM_PAGES = 4096
KV_BYTES = 4 * 2 * NUM_PAGES * 16 * 2 * 16 * 4  # 4 layers of K and V; 2 heads of 16, float32


@pytest.fixture(scope="module")
def programs() -> Programs:
    reader = open_checkpoint(MODELS / "llama")
    config = load_model_config(reader)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    cache = CacheConfig(page_size=16, num_pages=NUM_PAGES, dtype="float32")
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
    return compile_programs(abstract_model(config, jnp.dtype("float32")), config, cache, scheduler)


def test_every_step_writes_the_cache_in_place(programs: Programs) -> None:
    """A copy of one layer's pages would be 16 MiB of temporaries."""
    shapes = {(b.num_decodes, b.num_prefill_rows) for b in programs.forward}
    assert shapes == {(1, 0), (4, 0), (0, 64), (4, 64)}
    for bucket, program in programs.forward.items():
        memory = program.memory_analysis()  # type: ignore[attr-defined]
        assert memory.alias_size_in_bytes == KV_BYTES, bucket
        assert memory.temp_size_in_bytes < 2**20, bucket


def test_sampling_keeps_the_slots_in_place(programs: Programs) -> None:
    for size, program in programs.sample.items():
        memory = program.memory_analysis()  # type: ignore[attr-defined]
        assert memory.alias_size_in_bytes > 0, size
