"""Named shapes of attention that tests and benchmarks run: real models', and odd ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention.

    Attributes:
      name: the model, and which of its layers.
      num_heads: query heads.
      num_kv_heads: key and value heads.
      head_dim: elements of a head.
      sliding_window: positions that a query sees, or None for all.
      attention_chunk: size of the chunks that attention is local to, or None.
      soft_cap: of the logits, or None.
      sinks: whether each head has a sink.
      page_size: tokens of a page.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    attention_chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    page_size: int = 16


@dataclass(frozen=True)
class LatentSpec:
    """One layer of latent attention (MLA).

    Attributes:
      name: the model.
      num_heads: query heads.
      latent_dim: R, Hugging Face's kv_lora_rank.
      rope_dim: Hr, qk_rope_head_dim.
      nope_dim: elements of a head's query and key that are not rotated, qk_nope_head_dim.
      value_dim: elements of a head's value, v_head_dim.
      page_size: tokens of a page.
    """

    name: str
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    page_size: int = 16


LATENT_SPECS = (
    LatentSpec("deepseek-v2-lite", 16, 512, 64, 128, 128),
    LatentSpec("deepseek-v3-a-shard", 16, 512, 64, 128, 128, page_size=64),
    LatentSpec("small", 3, 40, 8, 24, 16),
)

# Sizes and windows from each model's config.json.
MODEL_SPECS = (
    AttentionSpec("llama-3.1-8b", 32, 8, 128),
    AttentionSpec("llama-3.2-1b", 32, 8, 64),
    AttentionSpec("qwen3-32b", 64, 8, 128),
    AttentionSpec("gemma-2-9b-local", 16, 8, 256, sliding_window=4096, soft_cap=50.0),
    AttentionSpec("gemma-3-1b-local", 4, 1, 256, sliding_window=512),
    AttentionSpec("gemma-3-1b-global", 4, 1, 256),
    AttentionSpec("gpt-oss-20b-local", 64, 8, 64, sliding_window=128, sinks=True),
    AttentionSpec("gpt-oss-20b-global", 64, 8, 64, sinks=True),
    AttentionSpec("llama-4-scout-local", 40, 8, 128, attention_chunk=8192),
    AttentionSpec("phi-3-mini", 32, 32, 96, sliding_window=2047),
    AttentionSpec("phi-2", 32, 32, 80),
    AttentionSpec("deepseek-v2-unabsorbed", 16, 16, 192),
)

# What no model above has: windows and chunks that the tests' short sequences leave, one kv head of a
# shard, groups that are no power of two, every page size.
ODD_SPECS = (
    AttentionSpec("one-head", 1, 1, 64),
    AttentionSpec("a-shard", 8, 1, 128, page_size=128),
    AttentionSpec("group-of-7", 7, 1, 128, page_size=32),
    AttentionSpec("group-of-3", 9, 3, 64, page_size=64),
    AttentionSpec("window-of-1", 4, 2, 64, sliding_window=1),
    AttentionSpec("window-33", 4, 2, 80, sliding_window=33, soft_cap=3.0),
    AttentionSpec("window-150-sinks", 4, 2, 64, sliding_window=150, sinks=True, page_size=32),
    AttentionSpec("chunk-48", 4, 2, 96, attention_chunk=48),
    AttentionSpec("chunk-128-everything", 4, 4, 64, attention_chunk=128, soft_cap=3.0, sinks=True),
    AttentionSpec("large-pages", 6, 2, 192, page_size=256),
)

ATTENTION_SPECS = MODEL_SPECS + ODD_SPECS
