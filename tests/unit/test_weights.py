"""The rule table and the streaming loader, over readers that are dicts."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxinfer.config import LayerConfig, MeshConfig, ModelConfig, MoeConfig, RopeConfig, parse_mesh
from jaxinfer.models import weights
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weights import load_model, load_stages, random_stages
from jaxinfer.parallel.mesh import make_mesh, make_meshes
from jaxinfer_checkpoints import CheckpointError, TensorInfo
from tests.gguf_names import gguf_names, stack_experts

F32 = jnp.dtype("float32")
LLAMA = ModelConfig(
    architecture="test",
    vocab_size=20,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    layers=(LayerConfig(RopeConfig()),) * 2,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=True,
)
GEMMA = dataclasses.replace(
    LLAMA,
    attention_bias=False,
    tie_word_embeddings=True,
    sandwich_norms=True,
    qk_norm=True,
    norm_offset=True,
)
MOE = dataclasses.replace(
    LLAMA,
    layers=(LayerConfig(RopeConfig()), LayerConfig(RopeConfig(), moe=MoeConfig(3, 2, 12, True))),
    attention_bias=False,
)


class FakeReader:
    """A checkpoint in memory that notes the rows and values read of each tensor."""

    path = Path("fake")

    def __init__(self, format: Literal["safetensors", "gguf"], arrays: Mapping[str, np.ndarray]) -> None:
        self.format: Literal["safetensors", "gguf"] = format
        self.config: Mapping[str, Any] = {}
        self.arrays = dict(arrays)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, a.shape, "F32") for name, a in arrays.items()
        }
        self.rows: list[tuple[str, int]] = []
        self.num_values: dict[str, int] = dict.fromkeys(arrays, 0)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        values = self.arrays[name][index if index is not None else ...]
        self.rows.append((name, len(values)))
        self.num_values[name] += values.size
        return values

    def close(self) -> None:
        pass


def leaves(model: Transformer) -> dict[str, np.ndarray]:
    """Parameter path -> values."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(param.get_value()) for path, param in flat}


def tensors(model: Transformer) -> dict[str, np.ndarray]:
    """Hugging Face's name -> values: q, k and v, and gate and up, are one parameter each."""
    num_q, num_kv = model.config.num_attention_heads, model.config.num_key_value_heads
    out = {}
    for path, values in leaves(model).items():
        if "qkv_proj" in path:
            heads = np.split(values, num_q + 2 * num_kv)
            cuts = {"q": heads[:num_q], "k": heads[num_q : num_q + num_kv], "v": heads[num_q + num_kv :]}
            out |= {path.replace("qkv", name): np.concatenate(rows) for name, rows in cuts.items()}
        elif ".experts." in path:
            experts, name = path.rsplit(".", 1)
            for i, matrix in enumerate(values):
                cuts = zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True)
                parts = dict(cuts) if name == "gate_up_proj" else {name: matrix}
                out |= {f"{experts}.{i}.{part}.weight": rows for part, rows in parts.items()}
        elif "gate_up_proj" in path:
            gate, up = np.split(values, 2)
            out |= {path.replace("gate_up", "gate"): gate, path.replace("gate_up", "up"): up}
        else:
            out[path] = values
    return out


def arrays_for(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random values for each tensor, under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    shapes = {name: value.shape for name, value in tensors(random_stages(config, F32, 0, (None,))[0]).items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def assert_equal(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    assert set(got) == set(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_hugging_face_names_are_understood(prefix: str) -> None:
    """Gemma's norms store w for 1 + w; multimodal checkpoints put a prefix before the text model."""
    arrays = arrays_for(GEMMA)
    renamed = {name.replace("model.", prefix, 1): values for name, values in arrays.items()}
    renamed["vision_tower.encoder.weight"] = np.zeros((3, 3), np.float32)
    want = {name: values + np.float32("norm" in name) for name, values in arrays.items()}
    assert_equal(tensors(load_model(FakeReader("safetensors", renamed), GEMMA, F32)), want)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(LLAMA, interleaved_qk=True),
        dataclasses.replace(LLAMA, mlp_bias=True, attention_out_bias=True),
        dataclasses.replace(GEMMA, norm_offset=False),
    ],
    ids=["llama", "biases", "gemma"],
)
def test_gguf_gives_the_same_parameters(config: ModelConfig) -> None:
    """Llama's q and k, weights and biases, come out in Hugging Face's order."""
    arrays = arrays_for(config)
    stored = gguf_names(config, arrays) | {"rope_freqs.weight": np.ones(4, np.float32)}
    assert_equal(tensors(load_model(FakeReader("gguf", stored), config, F32)), arrays)


def mixtral_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As mistralai/Mixtral-8x7B-v0.1 names them."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    out = {}
    for name, values in arrays.items():
        if ".experts." in name:
            name = name.replace("mlp", "block_sparse_moe")
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
        out[name.replace("mlp.gate.", "block_sparse_moe.gate.")] = values
    return out


def stacked_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As transformers 5 holds them: gate and up of all experts are one tensor, and down is one."""
    stacks = stack_experts(arrays)
    gate, up, down = (stacks.pop(f"blk.1.ffn_{name}_exps.weight") for name in ("gate", "up", "down"))
    experts = "model.layers.1.mlp.experts."
    return stacks | {experts + "gate_up_proj": np.concatenate([gate, up], 1), experts + "down_proj": down}


def old_gguf_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As GGUF files of before April 2024 name them, a tensor an expert."""
    return {re.sub(r"mlp\.experts\.(\d+)\.(\w+)_proj", r"ffn_\2.\1", k): v for k, v in arrays.items()}


@pytest.mark.parametrize(
    ("format", "rename"),
    [
        ("safetensors", dict),
        ("safetensors", mixtral_names),
        ("safetensors", stacked_names),
        ("gguf", lambda arrays: gguf_names(MOE, stack_experts(arrays))),
        ("gguf", lambda arrays: gguf_names(MOE, old_gguf_names(arrays))),
    ],
    ids=["qwen3_moe", "mixtral", "stacked", "gguf", "old gguf"],
)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_experts_are_read_into_one_parameter(
    monkeypatch: pytest.MonkeyPatch, format: Literal["safetensors", "gguf"], rename: Any, rows: int
) -> None:
    """However they are stored, and read in blocks of however many rows."""
    monkeypatch.setattr(weights, "_BLOCK_BYTES", rows * 16 * 4)
    arrays = arrays_for(MOE)
    assert_equal(tensors(load_model(FakeReader(format, rename(arrays)), MOE, F32)), arrays)


def test_experts_lie_one_behind_the_other_with_gate_above_up() -> None:
    arrays = arrays_for(MOE)
    model = leaves(load_model(FakeReader("safetensors", arrays), MOE, F32))
    stacks = stacked_names(arrays)
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.1.mlp.experts.{name}"
        np.testing.assert_array_equal(model[path], stacks[path])
    assert model["model.layers.1.mlp.gate.weight"].dtype == np.float32


@pytest.mark.parametrize("rename", [dict, stacked_names], ids=["a tensor an expert", "stacked"])
def test_each_device_holds_its_experts_or_its_part_of_each(rename: Any) -> None:
    """3 experts with an ffn of 12: over 3 devices one each, over 4 and 2 a part of all; read once."""
    arrays = arrays_for(MOE)
    stacks = stacked_names(arrays)
    path = "model.layers.1.mlp.experts."
    for devices in (2, 3, 4):
        stored = rename(arrays)
        reader = FakeReader("safetensors", stored)
        mesh = make_mesh(MeshConfig(tensor=devices), jax.devices())
        held = on_devices(load_model(reader, MOE, F32, mesh=mesh))
        gate, up = np.split(stacks[path + "gate_up_proj"], 2, axis=1)
        down = stacks[path + "down_proj"]
        rows, columns = (0, 0) if devices == 3 else (1, 2)
        for device in range(devices):
            own = [np.split(matrix, devices, rows)[device] for matrix in (gate, up)]
            np.testing.assert_array_equal(held[path + "gate_up_proj"][device], np.concatenate(own, axis=1))
            want = np.split(down, devices, columns)[device]
            np.testing.assert_array_equal(held[path + "down_proj"][device], want)
        read = {name: count for name, count in reader.num_values.items() if ".mlp." in name}
        assert read == {name: values.size for name, values in stored.items() if ".mlp." in name}


def test_an_ffn_of_experts_that_does_not_divide_is_padded_with_zeros() -> None:
    """10 over 4 devices: 3, 3, 3 and 1."""
    config = dataclasses.replace(MOE, layers=(LayerConfig(RopeConfig(), moe=MoeConfig(3, 2, 10, True)),))
    arrays = arrays_for(config)
    mesh = make_mesh(MeshConfig(tensor=4), jax.devices())
    held = on_devices(load_model(FakeReader("safetensors", arrays), config, F32, mesh=mesh))
    experts = "model.layers.0.mlp.experts."
    last = held[experts + "gate_up_proj"][3]
    assert last.shape == (3, 6, 16)
    for expert in range(3):
        want = np.zeros((6, 16), np.float32)
        want[0] = arrays[f"{experts}{expert}.gate_proj.weight"][9]
        want[3] = arrays[f"{experts}{expert}.up_proj.weight"][9]
        np.testing.assert_array_equal(last[expert], want)
    down = np.concatenate(held[experts + "down_proj"], axis=2)
    want = np.stack([arrays[f"{experts}{expert}.down_proj.weight"] for expert in range(3)])
    np.testing.assert_array_equal(down, np.pad(want, ((0, 0), (0, 0), (0, 2))))


def test_experts_that_do_not_fit_are_reported_by_name() -> None:
    arrays = arrays_for(MOE)
    experts = "model.layers.1.mlp.experts."
    del arrays[experts + "2.up_proj.weight"]
    arrays[experts + "3.up_proj.weight"] = np.zeros((12, 16), np.float32)
    arrays[experts + "0.down_proj.weight"] = np.zeros((16, 13), np.float32)
    arrays["model.layers.0.mlp.experts.0.up_proj.weight"] = np.zeros((12, 16), np.float32)
    with pytest.raises(CheckpointError) as error:
        load_model(FakeReader("safetensors", arrays), MOE, F32)
    problems = {reason.split()[0]: set(names) for reason, names in error.value.problems.items()}
    assert problems == {
        "missing": {experts + "2.up_proj.weight"},
        "tensors": {experts + "3.up_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight"},
        "misshapen": {experts + "0.down_proj.weight [16, 13] instead of [16, 12]"},
    }

    stacked = stacked_names(arrays_for(MOE))
    stacked[experts + "down_proj"] = np.zeros((4, 16, 12), np.float32)
    with pytest.raises(CheckpointError, match=r"down_proj \[4, 16, 12\] instead of \[3, 16, 12\]"):
        load_model(FakeReader("safetensors", stacked), MOE, F32)


def test_everything_that_does_not_fit_is_reported_at_once() -> None:
    arrays = arrays_for(LLAMA)
    del arrays["model.layers.1.mlp.up_proj.weight"]
    del arrays["model.norm.weight"]
    arrays["model.layers.2.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
    arrays["model.layers.0.self_attn.q_norm.weight"] = np.zeros(8, np.float32)
    arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 16), np.float32)

    with pytest.raises(CheckpointError) as error:
        load_model(FakeReader("safetensors", arrays), LLAMA, F32)

    problems = {reason.split()[0]: set(names) for reason, names in error.value.problems.items()}
    assert problems == {
        "missing": {"model.layers.1.mlp.up_proj.weight", "model.norm.weight"},
        "tensors": {"model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"},
        "misshapen": {"model.layers.0.self_attn.k_proj.weight [32, 16] instead of [16, 16]"},
    }
    for names in problems.values():
        assert all(name in str(error.value) for name in names)


def test_the_same_parameter_twice_is_reported() -> None:
    arrays = arrays_for(LLAMA)
    arrays["language_model.model.norm.weight"] = arrays["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"same parameter: .*language_model\.model\.norm\.weight"):
        load_model(FakeReader("safetensors", arrays), LLAMA, F32)


def test_a_tied_head_may_be_there_if_it_is_the_embedding() -> None:
    arrays = arrays_for(GEMMA)
    head = arrays["model.embed_tokens.weight"].copy()
    load_model(FakeReader("safetensors", {"lm_head.weight": head} | arrays), GEMMA, F32)

    head[3, 4] += 1
    with pytest.raises(CheckpointError, match=r"head of a tied model.*lm_head\.weight"):
        load_model(FakeReader("safetensors", {"lm_head.weight": head} | arrays), GEMMA, F32)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_q_is_unpermuted_in_any_slices(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Blocks that cut through a head give the same as one block."""
    monkeypatch.setattr(weights, "_BLOCK_BYTES", rows * 16 * 4)
    config = dataclasses.replace(LLAMA, interleaved_qk=True)
    arrays = arrays_for(config)
    assert_equal(tensors(load_model(FakeReader("gguf", gguf_names(config, arrays)), config, F32)), arrays)


def test_fused_parameters_are_their_tensors_one_below_the_other() -> None:
    arrays = arrays_for(LLAMA)
    model = leaves(load_model(FakeReader("safetensors", arrays), LLAMA, F32))
    for kind in ("weight", "bias"):
        qkv = [arrays[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        np.testing.assert_array_equal(model[f"model.layers.1.self_attn.qkv_proj.{kind}"], np.concatenate(qkv))
    gate_up = [arrays[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(model["model.layers.1.mlp.gate_up_proj.weight"], np.concatenate(gate_up))


@pytest.mark.parametrize("rows", [5, 8, 64])
def test_a_shard_reads_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Shards of a few rows, which cut through q, k and v: together each tensor's rows, once each."""

    def in_shards(shape: tuple[int, ...], sharding: object, read: Any) -> jax.Array:
        ends = [slice(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]
        return jnp.concatenate([read((end, *(slice(None),) * (len(shape) - 1))) for end in ends])

    monkeypatch.setattr(jax, "make_array_from_callback", in_shards)
    arrays = arrays_for(LLAMA)
    reader = FakeReader("safetensors", arrays)
    assert_equal(tensors(load_model(reader, LLAMA, F32)), arrays)
    read = dict.fromkeys(arrays, 0)
    for name, count in reader.rows:
        read[name] += count
    assert read == {name: len(values) for name, values in arrays.items()}


def test_tensors_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no more than a block is on the host twice."""
    monkeypatch.setattr(weights, "_BLOCK_BYTES", 5 * 16 * 4)
    reader = FakeReader("safetensors", arrays_for(LLAMA))
    load_model(reader, LLAMA, F32)
    assert [rows for name, rows in reader.rows if name == "model.embed_tokens.weight"] == [5, 5, 5, 5]


def test_weights_take_the_dtype_and_norms_stay_float32() -> None:
    model = leaves(load_model(FakeReader("safetensors", arrays_for(GEMMA)), GEMMA, jnp.bfloat16))
    for name, values in model.items():
        assert values.dtype == (np.float32 if name.endswith("norm.weight") else jnp.bfloat16), name


def on_devices(model: Transformer) -> dict[str, list[np.ndarray]]:
    """Parameter path -> what each device holds."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {
        ".".join(map(str, path)): [np.asarray(shard.data) for shard in param.get_value().addressable_shards]
        for path, param in flat
    }


@pytest.mark.parametrize("devices", [2, 4])
def test_each_device_holds_its_heads_and_its_ffn(devices: int) -> None:
    """4 query heads on 2 kv heads: over 4 devices each kv head lies on two of them."""
    config = dataclasses.replace(LLAMA, mlp_bias=True, attention_out_bias=True)
    arrays = arrays_for(config)
    mesh = make_mesh(MeshConfig(tensor=devices), jax.devices())
    held = on_devices(load_model(FakeReader("safetensors", arrays), config, F32, mesh=mesh))
    layer = "model.layers.1."

    def part(name: str, device: int, num_parts: int = devices, axis: int = 0) -> np.ndarray:
        return np.split(arrays[name], num_parts, axis)[device * num_parts // devices]

    for device in range(devices):
        for kind in ("weight", "bias"):
            attention, mlp = layer + "self_attn.{}_proj." + kind, layer + "mlp.{}_proj." + kind
            kv = [part(attention.format(name), device, min(2, devices)) for name in "kv"]
            want = np.concatenate([part(attention.format("q"), device), *kv])
            np.testing.assert_array_equal(held[attention.format("qkv")][device], want)
            want = np.concatenate([part(mlp.format(name), device) for name in ("gate", "up")])
            np.testing.assert_array_equal(held[mlp.format("gate_up")][device], want)
        for name in (layer + "self_attn.o_proj", layer + "mlp.down_proj"):
            want = part(f"{name}.weight", device, axis=1)
            np.testing.assert_array_equal(held[f"{name}.weight"][device], want)
            np.testing.assert_array_equal(held[f"{name}.bias"][device], arrays[f"{name}.bias"])
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            np.testing.assert_array_equal(held[name][device], part(name, device))
        np.testing.assert_array_equal(held["model.norm.weight"][device], arrays["model.norm.weight"])


def test_what_does_not_divide_is_padded_with_zeros() -> None:
    """24 of ffn, 20 of vocabulary and 2 kv heads over 3 devices: a kv head more, and its query heads."""
    arrays = arrays_for(LLAMA)
    mesh = make_mesh(MeshConfig(tensor=3), jax.devices())
    held = on_devices(load_model(FakeReader("safetensors", arrays), LLAMA, F32, mesh=mesh))
    attention = "model.layers.0.self_attn."
    assert [part.shape for part in held[attention + "qkv_proj.weight"]] == [(32, 16)] * 3
    assert not held[attention + "qkv_proj.weight"][2].any()
    assert not held[attention + "qkv_proj.bias"][2].any()
    assert not held[attention + "o_proj.weight"][2].any()
    want = arrays[attention + "o_proj.weight"]
    np.testing.assert_array_equal(np.concatenate(held[attention + "o_proj.weight"][:2], axis=1), want)
    head = np.concatenate(held["lm_head.weight"])
    np.testing.assert_array_equal(head, np.pad(arrays["lm_head.weight"], ((0, 1), (0, 0))))


@pytest.mark.parametrize("shape", [(1, 2), (4, 2), (8, 1)])
def test_a_mesh_reads_each_value_once(shape: tuple[int, int]) -> None:
    """Groups that hold the same parameters share what is read; devices of a group read their own part."""
    arrays = arrays_for(LLAMA)
    reader = FakeReader("safetensors", arrays)
    mesh = make_mesh(MeshConfig(*shape), jax.devices())
    load_model(reader, LLAMA, F32, mesh=mesh)
    assert reader.num_values == {name: values.size for name, values in arrays.items()}


@pytest.mark.parametrize("config", [LLAMA, GEMMA, MOE], ids=["llama", "tied", "experts"])
@pytest.mark.parametrize("mesh", ["2x1x1", "2x2x2"])
def test_stages_hold_the_layers_that_they_compute(mesh: str, config: ModelConfig) -> None:
    """Under their own devices, each value read once; but a tied embedding once a stage that has it."""
    arrays = arrays_for(config)
    meshes = make_meshes(parse_mesh(mesh), jax.devices())
    reader = FakeReader("safetensors", arrays)
    stages = load_stages(reader, config, F32, meshes)
    tied = config.tie_word_embeddings
    assert reader.num_values == {
        name: values.size * (2 if tied and "embed_tokens" in name else 1) for name, values in arrays.items()
    }
    size = parse_mesh(mesh).stage.num_devices
    found = Counter[str]()
    for index, stage in enumerate(stages):
        first = stage.config.stage.first_layer
        whole = on_devices(load_model(FakeReader("safetensors", arrays), config, F32, meshes[index]))
        for name, parts in on_devices(stage).items():
            number = re.search(r"layers\.(\d+)", name)
            path = name.replace(number[0], f"layers.{int(number[1]) + first}") if number else name
            found[path] += 1
            np.testing.assert_array_equal(parts, whole[path])
        devices = {device for leaf in jax.tree.leaves(stage) for device in leaf.sharding.device_set}
        assert devices == set(jax.devices()[index * size : (index + 1) * size])
    everything = on_devices(load_model(FakeReader("safetensors", arrays), config, F32))
    assert found == Counter(everything.keys()) + Counter({"model.embed_tokens.weight": int(tied)})


def test_a_mesh_needs_a_few_tensors_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is let go of as soon as it is on the devices: here they take nothing."""
    sizes = []

    def take(shape: tuple[int, ...], sharding: NamedSharding, read: Any) -> jax.ShapeDtypeStruct:
        for index in sharding.addressable_devices_indices_map(shape).values():
            sizes.append(read(index).nbytes)
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    config = dataclasses.replace(LLAMA, hidden_size=256, intermediate_size=1024, layers=LLAMA.layers * 8)
    reader = FakeReader("safetensors", arrays_for(config))
    mesh = make_mesh(MeshConfig(2, 4), jax.devices())
    monkeypatch.setattr(jax, "make_array_from_callback", take)
    tracemalloc.start()
    try:
        load_model(reader, config, F32, mesh=mesh)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    largest = 2 * 1024 * 256 * 4
    assert sum(sizes) > 16 * 2 * largest  # both groups' devices, 16 layers
    assert peak < 2 * largest


def test_random_model_is_repeatable_and_its_norms_are_one() -> None:
    first, second, other = (leaves(random_stages(LLAMA, F32, seed, (None,))[0]) for seed in (1, 1, 2))
    assert_equal(first, second)
    assert not np.array_equal(first["lm_head.weight"], other["lm_head.weight"])
    assert (first["model.norm.weight"] == 1).all()
    spread = first["model.embed_tokens.weight"].std()
    assert spread == pytest.approx(weights.INIT_SCALE, rel=0.2)


PEAK_SCRIPT = """
import resource, sys
from pathlib import Path
import jax
from jaxinfer_checkpoints import open_checkpoint
from jaxinfer.models.families import load_model_config
from jaxinfer.models.weights import load_model

jax.devices()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
reader = open_checkpoint(Path(sys.argv[1]))
config = load_model_config(reader)
before = peak()
model = load_model(reader, config, "float32")
print(peak() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(model)))
"""


@pytest.mark.slow
def test_loading_the_demo_needs_little_more_memory_than_the_model(demo_path: Path) -> None:
    """Peak of a process of its own; the mapped file's pages (98 MB at most) count too."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PEAK_SCRIPT, str(demo_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    peak, model = map(int, run.stdout.split())
    assert 538_000_000 < model < 539_000_000
    assert peak < model + 300_000_000
