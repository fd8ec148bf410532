"""What each device and each pipeline stage reads and holds of the weights."""

from __future__ import annotations

import dataclasses
import re
import tracemalloc
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxinfer.config import LayerConfig, MeshConfig, ModelConfig, MoeConfig, RopeConfig, parse_mesh
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weights import load_model, load_stages
from jaxinfer.parallel.mesh import make_mesh, make_meshes
from tests.unit.fake_reader import (
    F32,
    GEMMA,
    LLAMA,
    MOE,
    FakeReader,
    arrays_for,
    stacked_names,
)


def on_devices(model: Transformer) -> dict[str, list[np.ndarray]]:
    """Parameter path -> what each device holds."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {
        ".".join(map(str, path)): [np.asarray(shard.data) for shard in param.get_value().addressable_shards]
        for path, param in flat
    }


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
    for index, stage in stages.items():
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
