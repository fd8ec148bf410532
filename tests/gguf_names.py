"""Tensors under llama.cpp's names, as its converter stores them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from jaxinfer.config import ModelConfig

EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    head = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, head, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_names(
    config: ModelConfig, arrays: Mapping[str, np.ndarray], permute_qk: bool | None = None
) -> dict[str, np.ndarray]:
    """The same tensors as llama.cpp names and stores them; Llama's q and k are permuted."""
    permute_qk = config.interleaved_qk if permute_qk is None else permute_qk
    if config.sandwich_norms:
        norms = {
            "pre_feedforward_layernorm": "ffn_norm",
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    else:
        norms = {"post_attention_layernorm": "ffn_norm"}
    words = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate.": "ffn_gate_inp.",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
    } | norms
    out = {}
    for path, values in arrays.items():
        name = path
        for ours, theirs in words.items():
            name = name.replace(ours, theirs)
        if permute_qk and "q_proj" in path:
            values = permuted(values, config.num_attention_heads)
        if permute_qk and "k_proj" in path:
            values = permuted(values, config.num_key_value_heads)
        out[name] = values
    return out


def stack_experts(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face's tensors, one an expert and matrix, as the three of a layer that GGUF has."""
    stacks: dict[str, list[np.ndarray]] = {}
    out = {}
    for name, values in arrays.items():
        match = EXPERT.fullmatch(name)
        if match:
            stacks.setdefault(f"blk.{match[1]}.ffn_{match[3]}_exps.weight", []).append(values)
        else:
            out[name] = values
    return out | {name: np.stack(values) for name, values in stacks.items()}
