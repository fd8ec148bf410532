"""The ledger's formulas against the decoder's own shapes, published counts and hand arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from jaxinfer.config import CacheConfig, LayerConfig, ModelConfig, RopeConfig, SchedulerConfig, parse_mesh
from jaxinfer.engine.kv_cache import create_kv_pages, create_slots
from jaxinfer.engine.step_batch import make_buckets
from jaxinfer.memory.chips import CHIPS
from jaxinfer.memory.ledger import MemoryModel, kv_bytes_per_token
from jaxinfer.memory.parameters import num_parameters, parameter_bytes, parameters
from jaxinfer.memory.roofline import decode_roofline
from jaxinfer.models.families import load_model_config, model_config_from
from jaxinfer.models.weights import abstract_model, abstract_stages
from jaxinfer.ops.sampling import SamplingRows, sample
from jaxinfer.parallel.mesh import DATA, TENSOR
from jaxinfer_checkpoints import open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = sorted(path.name for path in (GOLDEN / "models").iterdir())
# What Hugging Face's index of each repository's safetensors says.
PUBLISHED = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Qwen3-32B": 32_762_123_264,
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen3-30B-A3B": 30_532_122_624,
    # 27,432,406,640 with the vision tower (416,866,032) and the projector (6,194,304).
    "Gemma-3-27B": 27_009_346_304,
}


def public_config(name: str) -> ModelConfig:
    config: Mapping[str, Any] = json.loads((GOLDEN / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    return model_config_from(config, "safetensors")


def nbytes(tree: Any) -> int:
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def memory_model(model: ModelConfig, **changes: Any) -> MemoryModel:
    sizes = dict(dtype="bfloat16", kv_dtype="bfloat16", page_size=16, max_num_seqs=32)
    return MemoryModel(model, **(sizes | dict(max_num_batched_tokens=512) | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert num_parameters(public_config(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", TINY)
def test_weights_take_the_bytes_of_the_decoders_own_shapes(name: str) -> None:
    model = load_model_config(open_checkpoint(GOLDEN / "models" / name))
    for dtype in ("float32", "bfloat16"):
        planned = memory_model(model, dtype=dtype).ledger(2)
        assert planned.weights == nbytes(abstract_model(model, jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cache_and_slots_take_the_bytes_of_their_arrays(dtype: str) -> None:
    model = public_config("Llama-3.1-8B")
    planned = memory_model(model, kv_dtype=dtype).ledger(100)
    pages = jax.eval_shape(lambda: create_kv_pages(model, CacheConfig(16, 100, dtype)))
    assert planned.kv_cache == nbytes(pages)
    assert planned.slots == nbytes(jax.eval_shape(lambda: create_slots(model, 32)))


@pytest.mark.parametrize("num_rows", [12, 32, 75, 256])
def test_logits_are_what_the_sampler_takes(num_rows: int) -> None:
    """Its argument and its temporaries, as the CPU's compiler has them."""
    model = replace(public_config("Llama-3.1-8B"), vocab_size=12_800)
    rows = SamplingRows(num_rows)
    batch = rows.gather(np.arange(num_rows), np.zeros(num_rows, int), np.zeros(num_rows, int), num_rows)
    shapes = ((num_rows, 12_800), jnp.float32), ((257, 12_800), jnp.bool_), ((257, 12_800), jnp.int32)
    logits, mask, counts = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    compiled = jax.jit(sample).lower(logits, batch, mask, counts, np.arange(num_rows)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    planned = memory_model(model, max_num_seqs=num_rows).ledger(2).logits
    assert planned == pytest.approx(memory.temp_size_in_bytes + nbytes(logits), rel=0.01)


def test_devices_share_the_rows_that_are_sampled() -> None:
    """Of all the vocabulary: 32 of 256 rows each, and all of them where they do not divide."""
    model = public_config("Llama-3.1-8B")
    row = 128_256 * 4
    for tensor, rows in ((8, 7 * 32), (4, 7 * 32 + 64), (3, 7 * 32 + 256)):
        assert memory_model(model, max_num_seqs=256, tensor=tensor).ledger(2).logits == rows * row


def test_known_bytes_of_a_token() -> None:
    layers = (LayerConfig(RopeConfig()),) * 32
    llama_7b = ModelConfig("llama", 32000, 4096, 11008, 32, 32, 128, layers, 1e-5, 4096, False)
    assert kv_bytes_per_token(llama_7b, 2) == 524_288
    assert 2048 * kv_bytes_per_token(llama_7b, 2) == 2**30
    assert kv_bytes_per_token(public_config("Llama-3.1-8B"), 2) == 131_072
    assert memory_model(public_config("Llama-3.1-8B")).page_bytes == 16 * 131_072


def test_a_mesh_splits_the_model() -> None:
    """Llama-3.1-8B by hand, 4 devices: 8 query heads, 2 KV heads, 3584 of the feed-forward, 32064 tokens."""
    layer = (8 + 2 * 2) * 128 * 4096 + 4096 * 8 * 128 + 3 * 3584 * 4096
    by_hand = 2 * (32 * layer + 2 * 32064 * 4096) + 4 * (2 * 32 + 1) * 4096
    split = memory_model(public_config("Llama-3.1-8B"), tensor=4)
    assert split.ledger(2).weights == by_hand
    assert split.page_bytes == 16 * 131_072 // 4


def test_kv_heads_are_repeated_where_devices_outnumber_them() -> None:
    model = public_config("Llama-3.3-70B")
    token_bytes = 80 * 2 * 128 * 2  # of one KV head in all layers
    heads = [memory_model(model, tensor=t).page_bytes / 16 / token_bytes for t in (1, 2, 8, 16, 32)]
    assert heads == [8, 4, 1, 1, 1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "llama_bias", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("tensor", [2, 3, 4])
def test_a_device_of_a_mesh_holds_its_shards(name: str, tensor: int) -> None:
    """Padded heads and repeated KV heads included: the shards that the decoder's shardings give it."""
    model = load_model_config(open_checkpoint(GOLDEN / "models" / name))
    mesh = AbstractMesh((1, tensor), (DATA, TENSOR))
    held = 0
    for leaf in jax.tree.leaves(abstract_model(model, jnp.float32, mesh)):  # type: ignore[arg-type]
        held += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    assert memory_model(model, dtype="float32", tensor=tensor).ledger(2).weights == held


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe_stacked"])
@pytest.mark.parametrize("mesh", ["2x1x1", "3x1x2", "4x2x2"])
def test_a_device_of_a_stage_holds_its_shards(name: str, mesh: str) -> None:
    """Of weights and cache, what the shardings of its stage's parameters and pages give it."""
    model, shape = load_model_config(open_checkpoint(GOLDEN / "models" / name)), parse_mesh(mesh)
    on_devices = AbstractMesh((shape.data, shape.tensor), (DATA, TENSOR))
    memory = memory_model(model, dtype="float32", kv_dtype="float32", tensor=shape.tensor, pipe=shape.pipe)
    stages = abstract_stages(model, jnp.float32, [on_devices] * shape.pipe)  # type: ignore[list-item]
    for stage, planned in zip(stages, memory.stages, strict=True):
        held = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(stage)]
        assert planned.ledger(2).weights == 4 * sum(held)
        pages = jax.eval_shape(lambda: create_kv_pages(stage.config, CacheConfig(16, 100, "float32")))  # noqa: B023
        assert planned.ledger(100).kv_cache == nbytes(pages) // shape.tensor
    ledgers = [planned.ledger(100) for planned in memory.stages]
    assert memory.ledger(100).device_bytes == max(ledger.device_bytes for ledger in ledgers)


def test_pages_fit_on_the_devices_of_every_stage() -> None:
    """And one more does not on some."""
    memory = memory_model(public_config("Gemma-3-27B"), tensor=4, pipe=4)
    budget = 16 * 2**30
    num_pages = memory.pages_within(budget, budget)
    ledgers = [[stage.ledger(n).device_bytes for stage in memory.stages] for n in (num_pages, num_pages + 1)]
    assert max(ledgers[0]) <= budget < max(ledgers[1])
    assert num_pages > 1000


def test_a_decode_reads_the_experts_that_its_tokens_choose() -> None:
    """Qwen3-30B-A3B: a token chooses 8 of 128; of 32 tokens' choices 1 - (120 / 128) ** 32 are distinct."""
    memory = memory_model(public_config("Qwen3-30B-A3B"))
    expert_bytes = 48 * 128 * 3 * 768 * 2048 * 2
    rest = memory.ledger(2).weights - expert_bytes - 151_936 * 2048 * 2
    for num_seqs, part in ((1, 8 / 128), (32, 0.8732)):
        roofline = decode_roofline(memory, CHIPS["v5p"], num_seqs, 1)
        assert roofline is not None
        assert roofline.weight_bytes == pytest.approx(rest + part * expert_bytes, rel=1e-4)
    one = decode_roofline(memory, CHIPS["v5p"], 1, 0)
    assert one is not None
    active = 2 * (num_parameters(memory.model) - 48 * 120 * 3 * 768 * 2048 - 151_936 * 2048)
    assert one.flops == pytest.approx(active, rel=1e-4)  # but for the norms


def test_quantised_projections_carry_their_scales() -> None:
    """o_proj of Llama-3.1-8B, [4096, 4096]: a float32 scale a row, or a 2-byte one for 128 inputs."""
    o_proj = next(p for p in parameters(public_config("Llama-3.1-8B")) if (p.rows, p.columns) == (4096, 4096))
    assert parameter_bytes(o_proj, "bfloat16") == 32 * 2 * 4096**2
    assert parameter_bytes(o_proj, "bfloat16", "int8") == 32 * (4096**2 + 4 * 4096)
    assert parameter_bytes(o_proj, "bfloat16", "int4") == 32 * (4096**2 // 2 + 4096 * 32 * 2)
    unquantised = [p for p in parameters(public_config("Llama-3.1-8B")) if p.role != "projection"]
    for parameter in unquantised:
        assert parameter_bytes(parameter, "bfloat16", "int4") == parameter_bytes(parameter, "bfloat16")


@given(max_num_seqs=st.integers(1, 256), num_tiles=st.integers(1, 256), pipe=st.integers(2, 4))
def test_what_stages_on_several_hosts_hold_is_counted(max_num_seqs: int, num_tiles: int, pipe: int) -> None:
    """A stage that receives has zeros in the shape of each hidden state that it can get."""
    model = public_config("Llama-3.1-8B")
    sizes: dict[str, Any] = dict(max_num_seqs=max_num_seqs, max_num_batched_tokens=32 * num_tiles)
    scheduler = SchedulerConfig(max_model_len=8192, num_waves=pipe, **sizes)
    held = sum({bucket.num_rows for bucket in make_buckets(scheduler)}) * model.hidden_size * 2
    here, apart = (memory_model(model, pipe=pipe, apart=apart, **sizes).stages for apart in (False, True))
    added = [b.ledger(2).activations - a.ledger(2).activations for a, b in zip(here, apart, strict=True)]
    assert added[0] == 0
    assert all(held <= more <= 6 * held for more in added[1:])
