"""Small models, and a checkpoint in memory that has their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.config import LayerConfig, ModelConfig, MoeConfig, RopeConfig
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weights import random_stages
from jaxinfer_checkpoints import TensorInfo
from tests.gguf_names import stack_experts

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


def stacked_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As transformers 5 holds them: gate and up of all experts are one tensor, and down is one."""
    stacks = stack_experts(arrays)
    gate, up, down = (stacks.pop(f"blk.1.ffn_{name}_exps.weight") for name in ("gate", "up", "down"))
    experts = "model.layers.1.mlp.experts."
    return stacks | {experts + "gate_up_proj": np.concatenate([gate, up], 1), experts + "down_proj": down}
