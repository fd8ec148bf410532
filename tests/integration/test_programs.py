"""What the compiled programs do to memory, and between devices: the cache is written in place, in every
bucket, and a layer has two all-reduces."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import CacheConfig, MeshConfig, SchedulerConfig, parse_mesh
from jaxinfer.engine.programs import Program, Programs, compile_programs
from jaxinfer.models.families import load_model_config
from jaxinfer.models.weights import abstract_stages
from jaxinfer.parallel.mesh import make_meshes
from jaxinfer_checkpoints import open_checkpoint
from tests.integration.engines import MODELS

NUM_LAYERS = 4
NUM_PAGES = 4096
KV_BYTES = NUM_LAYERS * 2 * NUM_PAGES * 16 * 2 * 16 * 4  # K and V; 2 heads of 16, float32
# The operation, and the devices that exchange with one another.
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)(?:-start)?\(.*replica_groups=(.+?), "
)

PAIRS = "[2,2]<=[4]"  # devices 0 and 1, and 2 and 3, of a stage; a shard_map's names the axis instead


@pytest.fixture(
    scope="module",
    params=[
        "1x1",
        pytest.param("2x2x2", marks=pytest.mark.slow),
        pytest.param("2x2", marks=pytest.mark.long),
    ],
)
def mesh_config(request: pytest.FixtureRequest) -> MeshConfig:
    return parse_mesh(request.param)


@pytest.fixture(scope="module")
def programs(mesh_config: MeshConfig) -> Programs:
    reader = open_checkpoint(MODELS / "llama")
    config = load_model_config(reader)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (NUM_LAYERS, 2, 16)
    cache = CacheConfig(page_size=16, num_pages=NUM_PAGES, dtype="float32")
    scheduler = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, num_groups=mesh_config.data
    )
    meshes = make_meshes(mesh_config, jax.devices())
    return compile_programs(abstract_stages(config, jnp.dtype("float32"), meshes), cache, scheduler, meshes)


def collectives(program: Program) -> Counter[tuple[str, str]]:
    text = program.as_text()  # type: ignore[attr-defined]
    return Counter(COLLECTIVE.findall(text.replace("mesh['data'=2,'tensor'=2] {'tensor'}", PAIRS)))


def test_every_step_writes_the_cache_in_place(programs: Programs, mesh_config: MeshConfig) -> None:
    """A copy of one layer's pages would be 16 MiB of temporaries, or that by the devices of a group."""
    shapes = {(b.num_decodes, b.num_prefill_rows) for b in programs.forward}
    assert shapes == {(1, 0), (4, 0), (0, 64), (4, 64)}
    for bucket, stages in programs.forward.items():
        assert len(stages) == mesh_config.pipe
        for program in stages.values():
            memory = program.memory_analysis()  # type: ignore[attr-defined]
            assert memory.alias_size_in_bytes == KV_BYTES // mesh_config.tensor // mesh_config.pipe, bucket
            assert memory.temp_size_in_bytes < 2**20, bucket


def test_sampling_keeps_the_slots_in_place(programs: Programs) -> None:
    for size, program in programs.sample.items():
        memory = program.memory_analysis()  # type: ignore[attr-defined]
        assert memory.alias_size_in_bytes > 0, size


def test_a_layer_has_two_all_reduces(programs: Programs, mesh_config: MeshConfig) -> None:
    """And the embedding one. The logits of one row are gathered; of more, each device gets those of its part
    of the rows, and then what the others sampled: five arrays. Groups exchange nothing, and stages nothing
    within a program.
    """
    divided = mesh_config.tensor > 1
    num_layers = NUM_LAYERS // mesh_config.pipe
    for bucket, stages in programs.forward.items():
        for index, program in stages.items():
            want = Counter({("all-reduce", PAIRS): divided * (2 * num_layers + (index == 0))})
            assert collectives(program) == want, bucket
    gathered = Counter({("all-gather", PAIRS): int(divided)})
    shared = Counter({("all-to-all", PAIRS): int(divided), ("all-gather", PAIRS): 5 * divided})
    assert {rows: collectives(program) for rows, program in programs.sample.items()} == {
        1: gathered,
        4: shared,
    }
    for program in programs.prompt_logprobs.values():
        assert collectives(program) == gathered
    assert programs.set_counts is not None
    assert collectives(programs.set_counts) == Counter()


@pytest.mark.parametrize(("model", "mesh"), [("qwen3_moe", "1x4"), ("mixtral", "1x4")])
@pytest.mark.slow
def test_a_layer_of_experts_has_two_all_reduces(model: str, mesh: str) -> None:
    """With whole experts on each device, and with a part of each expert."""
    config = load_model_config(open_checkpoint(MODELS / model))
    cache = CacheConfig(page_size=16, num_pages=64, dtype="float32")
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=128)
    meshes = make_meshes(parse_mesh(mesh), jax.devices())
    stages = abstract_stages(config, jnp.dtype("float32"), meshes)
    for bucket, programs in compile_programs(stages, cache, scheduler, meshes).forward.items():
        operations = Counter(operation for operation, _ in collectives(programs[0]).elements())
        assert operations == Counter({"all-reduce": 2 * config.num_hidden_layers + 1}), bucket
