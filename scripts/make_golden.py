#!/usr/bin/env python3
"""Remakes tests/golden/models: tiny random models of each family with transformers' own output.

Needs torch and transformers 5, which nothing else here does:

    pip install torch transformers && python scripts/make_golden.py [NAME ...]

Each model is saved by transformers (config.json, model.safetensors, float32). golden.npz beside it
holds prompt_ids [48], logits float32 [48, V] of the prompt, and greedy_ids [24] that continue it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "models"
PROMPT_LENGTH, GREEDY_LENGTH = 48, 24

SMALL: Mapping[str, Any] = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    # As large as gives uneven attention, so that a wrong mask or angle shows.
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GEMMA: Mapping[str, Any] = SMALL | dict(
    num_hidden_layers=7,  # the sixth sees everything
    hidden_size=32,
    intermediate_size=48,
    head_dim=16,
    query_pre_attn_scalar=24,  # unlike head_dim
    sliding_window=12,
)
QWEN3_MOE: Mapping[str, Any] = SMALL | dict(
    head_dim=16, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=32)
# yarn's range of dimensions, rounded, is all of a head of 16; without rounding it is not.
YARN_EXACT = YARN | dict(truncate=False, beta_fast=4.0, beta_slow=1.0, attention_factor=1.25)

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", dict(SMALL, head_dim=16, tie_word_embeddings=False)),
    "llama_bias": (
        "LlamaForCausalLM",
        dict(SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    ),
    "llama_linear": ("LlamaForCausalLM", dict(SMALL, rope_parameters=dict(rope_type="linear", factor=4.0))),
    "llama_llama3": ("LlamaForCausalLM", dict(SMALL, tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "mistral": ("MistralForCausalLM", dict(SMALL, sliding_window=16, head_dim=16)),
    "qwen2": ("Qwen2ForCausalLM", dict(SMALL, tie_word_embeddings=True)),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        dict(SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=2),
    ),
    "qwen2_yarn": ("Qwen2ForCausalLM", dict(SMALL, rope_parameters=YARN)),
    "qwen3": ("Qwen3ForCausalLM", dict(SMALL, head_dim=20, tie_word_embeddings=True)),
    "qwen3_yarn": ("Qwen3ForCausalLM", dict(SMALL, head_dim=16, rope_parameters=YARN_EXACT)),
    "gemma3": ("Gemma3ForCausalLM", dict(GEMMA, tie_word_embeddings=True)),
    "gemma3_scaled": (
        "Gemma3ForCausalLM",
        dict(
            GEMMA,
            tie_word_embeddings=False,
            final_logit_softcapping=4.0,
            attn_logit_softcapping=2.0,  # which transformers leaves unused
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=5000.0),
                sliding_attention=dict(rope_type="default", rope_theta=200.0),
            ),
        ),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        dict(
            SMALL,
            num_hidden_layers=2,
            num_local_experts=6,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        ),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        dict(QWEN3_MOE, num_hidden_layers=2, norm_topk_prob=True, tie_word_embeddings=True),
    ),
    "qwen3_moe_stacked": (
        "Qwen3MoeForCausalLM",
        # Experts in layers 1 and 5 alone.
        dict(
            QWEN3_MOE, num_hidden_layers=6, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3]
        ),
    ),
}
# transformers 5 holds all experts in one parameter. It writes a tensor an expert, as older versions do,
# unless it is told to write what it holds.
STACKED = {"qwen3_moe_stacked"}


def build(class_name: str, options: dict[str, Any], seed: int) -> torch.nn.Module:
    """A random model, its norms and biases random too, since 1 and 0 would hide a mistake."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**options)
    config._attn_implementation = "eager"
    model = model_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                value.add_(0.2 * torch.randn_like(value))
    return model


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The continuation, the whole text computed again for each token."""
    ids = list(prompt)
    for _ in range(GREEDY_LENGTH):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def main() -> None:
    """Makes the models named on the command line, or all."""
    for seed, (name, (class_name, options)) in enumerate(MODELS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        model = build(class_name, options, seed)
        rng = np.random.default_rng(seed)
        prompt = [int(i) for i in rng.integers(3, options["vocab_size"], PROMPT_LENGTH)]
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
        directory = OUT / name
        model.save_pretrained(directory, save_original_format=name not in STACKED)
        np.savez_compressed(
            directory / "golden.npz",
            prompt_ids=np.array(prompt, np.int32),
            logits=logits.astype(np.float32),
            greedy_ids=np.array(greedy(model, prompt), np.int32),
        )
        size = sum(file.stat().st_size for file in directory.iterdir())
        print(f"{name}: {size // 1000} kB, logits {logits.std():.2f} standard deviation")


if __name__ == "__main__":
    main()
