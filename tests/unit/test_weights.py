"""The rule table and the streaming loader, over readers that are dicts."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.models import weights
from jaxinfer.models.weights import load_model, random_stages
from jaxinfer_checkpoints import CheckpointError
from tests.gguf_names import gguf_names, stack_experts
from tests.unit.fake_reader import (
    F32,
    GEMMA,
    LLAMA,
    MOE,
    FakeReader,
    arrays_for,
    assert_equal,
    leaves,
    stacked_names,
    tensors,
)


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
