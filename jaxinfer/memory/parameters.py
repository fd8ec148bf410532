"""What a model's parameters are: their shapes, counted and in bytes, of the whole or of one device.

The shapes are those of models/transformer.py, by formula: `jaxinfer.plan` needs them of a model with
hundreds of layers without the seconds that building its modules takes. Tests hold the two equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import ml_dtypes  # noqa: F401 (registers bfloat16 with numpy)
import numpy as np

from jaxinfer.config import ModelConfig, MoeConfig

Role = Literal["embedding", "head", "projection", "router", "bias", "norm"]


@dataclass(frozen=True)
class Parameter:
    """Parameters of one shape: a matrix [rows, columns], or a vector [rows] where columns is 1.

    Attributes:
      role: what it is for.
      rows, columns: of each.
      count: how many there are.
      chosen: the part of a step's tokens that it is for: less than 1 of an expert's, on average.
    """

    role: Role
    rows: int
    columns: int
    count: int
    chosen: float = 1.0

    @property
    def size(self) -> int:
        """Elements of all of them."""
        return self.rows * self.columns * self.count


@dataclass(frozen=True)
class WeightFormat:
    """How a quantised projection is stored: `bits` a weight, and scales.

    Attributes:
      bits: of a weight.
      group_size: inputs that share a scale; None is one scale for each output.
      scale_bytes: of a scale.
    """

    bits: int
    group_size: int | None
    scale_bytes: int

    def num_bytes(self, parameter: Parameter) -> int:
        groups = 1 if self.group_size is None else math.ceil(parameter.columns / self.group_size)
        row_bytes = math.ceil(parameter.columns * self.bits / 8) + groups * self.scale_bytes
        return parameter.rows * row_bytes * parameter.count


# Weight-only, of the projections; embedding, head, biases and norms stay as they are.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {"int8": WeightFormat(8, None, 4), "fp8": WeightFormat(8, None, 4), "int4": WeightFormat(4, 128, 2)}
)


def parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """The parameters of a model, of a stage, or of what one device has of it (`layout.device_share`)."""
    hidden, ffn, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    is_last = model.stage.is_last
    dense = sum(layer.moe is None for layer in model.layers)
    q_rows = model.num_attention_heads * model.head_dim
    qkv_rows = q_rows + 2 * model.num_key_value_heads * model.head_dim
    found = [
        Parameter("embedding", model.vocab_size, hidden, int(model.has_embedding)),
        Parameter("head", model.vocab_size, hidden, int(is_last and not model.tie_word_embeddings)),
        Parameter("projection", qkv_rows, hidden, layers),
        Parameter("projection", hidden, q_rows, layers),
        Parameter("projection", 2 * ffn, hidden, dense),
        Parameter("projection", hidden, ffn, dense),
        Parameter("norm", hidden, 1, (4 if model.sandwich_norms else 2) * layers + is_last),
    ]
    if model.qk_norm:
        found.append(Parameter("norm", model.head_dim, 1, 2 * layers))
    if model.attention_bias:
        found.append(Parameter("bias", qkv_rows, 1, layers))
    if model.attention_out_bias:
        found.append(Parameter("bias", hidden, 1, layers))
    if model.mlp_bias:
        found += [Parameter("bias", 2 * ffn, 1, dense), Parameter("bias", hidden, 1, dense)]
    for moe, count in Counter(layer.moe for layer in model.layers).items():
        if moe is not None:
            found += _experts(moe, hidden, count)
    return tuple(found)


def _experts(moe: MoeConfig, hidden: int, num_layers: int) -> list[Parameter]:
    ffn, held = moe.moe_intermediate_size, moe.num_experts // moe.expert_parallel * num_layers
    chosen = moe.num_experts_per_tok / moe.num_experts
    return [
        Parameter("router", moe.num_experts, hidden, num_layers),
        Parameter("projection", 2 * ffn, hidden, held, chosen),
        Parameter("projection", hidden, ffn, held, chosen),
    ]


def num_parameters(model: ModelConfig) -> int:
    """All of them, each once: 8,030,261,248 for Llama-3.1-8B."""
    return sum(parameter.size for parameter in parameters(model))


def parameter_bytes(parameter: Parameter, dtype: str, quantize: str = "none") -> int:
    """Bytes of one entry of `parameters`; quantize is "none" or a name of `WEIGHT_FORMATS`."""
    if parameter.role in ("norm", "router"):
        return parameter.size * 4  # models/layers.py and moe.py keep them in float32
    if parameter.role == "projection" and quantize != "none":
        return WEIGHT_FORMATS[quantize].num_bytes(parameter)
    return parameter.size * itemsize(dtype)


def itemsize(dtype: str) -> int:
    """Bytes of an element, by a numpy or ml_dtypes name."""
    return np.dtype(dtype).itemsize
