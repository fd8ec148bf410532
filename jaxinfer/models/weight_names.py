"""Checkpoint names -> the model's tensors: the rule table of each format, and what does not fit it.

Every tensor name matches one rule or is known to be no weight; what does not fit is reported together,
by name. A model's tensors go by Hugging Face's names, a tensor an expert and matrix.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer_checkpoints.reader import CheckpointReader, Problems

Shape = tuple[int, ...]
Transform = Literal["none", "add_one", "unpermute"]

_COMPARE_ROWS = 4096


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: one of the checkpoint, or one expert's rows in one that stacks all.

    Attributes:
      name: in the checkpoint.
      transform: what undoes the checkpoint's way of storing it.
      expert: which matrix of a stacked tensor; None of others.
      first_row: in the expert's matrix; 0 of others.
    """

    name: str
    transform: Transform
    expert: int | None = None
    first_row: int = 0


@dataclass(frozen=True)
class Rule:
    r"""A checkpoint name's pattern -> the tensor's path, with the pattern's groups as \1, \2 ...

    A path with `*` for the expert is that of a tensor that stacks those of all experts, and there
    `gate_up_proj` stands for gate_proj's rows above up_proj's.
    """

    pattern: str
    path: str
    transform: Transform = "none"


def rules(config: ModelConfig, format: Literal["safetensors", "gguf"]) -> tuple[Rule, ...]:
    """The rule table of a format. Patterns match whole names."""
    return _gguf_rules(config) if format == "gguf" else _hugging_face_rules(config)


# Mixtral's names for an expert's matrices.
MIXTRAL_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _hugging_face_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """Hugging Face's names are the tensors' paths. Multimodal checkpoints put a prefix before them."""
    norm: Transform = "add_one" if config.norm_offset else "none"
    model = r"(?:model|language_model\.model|model\.language_model)"
    layer = model + r"\.layers\.(\d+)\."
    experts = r"model.layers.\1.mlp.experts."
    mixtral = layer + r"block_sparse_moe\.experts\.(\d+)\.{}\.weight"
    return (
        Rule(model + r"\.embed_tokens\.weight", "model.embed_tokens.weight"),
        Rule(r"(?:language_model\.)?lm_head\.weight", "lm_head.weight"),
        Rule(model + r"\.norm\.weight", "model.norm.weight", norm),
        Rule(layer + r"(\w+_layernorm)\.weight", r"model.layers.\1.\2.weight", norm),
        Rule(layer + r"self_attn\.([qk]_norm)\.weight", r"model.layers.\1.self_attn.\2.weight", norm),
        Rule(layer + r"self_attn\.([qkvo]_proj)\.(weight|bias)", r"model.layers.\1.self_attn.\2.\3"),
        Rule(layer + r"mlp\.(gate_proj|up_proj|down_proj)\.(weight|bias)", r"model.layers.\1.mlp.\2.\3"),
        Rule(layer + r"(?:mlp|block_sparse_moe)\.gate\.weight", r"model.layers.\1.mlp.gate.weight"),
        Rule(layer + r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", experts + r"\2.\3_proj.weight"),
        Rule(layer + r"mlp\.experts\.(gate_up|down)_proj", experts + r"*.\2_proj.weight"),
        *(Rule(mixtral.format(name), experts + rf"\2.{ours}.weight") for name, ours in MIXTRAL_NAMES.items()),
    )


def _gguf_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """llama.cpp's names. Its converter interleaves the rows of Llama's q and k, two halves a head."""
    qk: Transform = "unpermute" if config.interleaved_qk else "none"
    layer = r"blk\.(\d+)\."
    ours = r"model.layers.\1."
    before_mlp = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    return (
        Rule(r"token_embd\.weight", "model.embed_tokens.weight"),
        Rule(r"output\.weight", "lm_head.weight"),
        Rule(r"output_norm\.weight", "model.norm.weight"),
        Rule(layer + r"attn_norm\.weight", ours + "input_layernorm.weight"),
        Rule(layer + r"post_attention_norm\.weight", ours + "post_attention_layernorm.weight"),
        Rule(layer + r"ffn_norm\.weight", ours + f"{before_mlp}.weight"),
        Rule(layer + r"post_ffw_norm\.weight", ours + "post_feedforward_layernorm.weight"),
        Rule(layer + r"attn_([qk])_norm\.weight", ours + r"self_attn.\2_norm.weight"),
        Rule(layer + r"attn_([qk])\.(weight|bias)", ours + r"self_attn.\2_proj.\3", qk),
        Rule(layer + r"attn_v\.(weight|bias)", ours + r"self_attn.v_proj.\2"),
        Rule(layer + r"attn_output\.(weight|bias)", ours + r"self_attn.o_proj.\2"),
        Rule(layer + r"ffn_(gate|up|down)\.(weight|bias)", ours + r"mlp.\2_proj.\3"),
        Rule(layer + r"ffn_gate_inp\.weight", ours + "mlp.gate.weight"),
        Rule(layer + r"ffn_(gate|up|down)_exps\.weight", ours + r"mlp.experts.*.\2_proj.weight"),
        # As files of before April 2024 have them.
        Rule(layer + r"ffn_(gate|up|down)\.(\d+)\.weight", ours + r"mlp.experts.\3.\2_proj.weight"),
    )


# Tensors that checkpoints carry and the decoder derives, or leaves to another half of the model.
NO_WEIGHTS = re.compile(
    r".*\.rotary_emb\.inv_freq|.*\.attention\.masked_bias|rope_freqs\.weight"
    r"|(?:model\.)?vision_tower\..*|(?:model\.)?multi_modal_projector\..*"
)


def match_names(
    reader: CheckpointReader, config: ModelConfig, shapes: Mapping[str, Shape]
) -> dict[str, Source]:
    """Path -> source, for each tensor of the model.

    Args:
      reader: an open checkpoint.
      config: made from the same checkpoint.
      shapes: path -> shape of each tensor of the model.

    Raises:
      CheckpointError: naming everything that does not fit.
    """
    table = [(re.compile(rule.pattern), rule) for rule in rules(config, reader.format)]
    sources: dict[str, Source] = {}
    tied_heads: list[str] = []
    problems = Problems(reader.path)
    unexpected = f"tensors that {config.architecture} has no place for"
    for name, info in reader.tensors.items():
        found = next(((match, rule) for regex, rule in table if (match := regex.fullmatch(name))), None)
        path = found[0].expand(found[1].path) if found else ""
        held, shape = _held(path, shapes)
        if path == "lm_head.weight" and config.tie_word_embeddings:
            tied_heads.append(name)
        elif found is None or not held:
            if not NO_WEIGHTS.fullmatch(name):
                problems.add(unexpected, name)
        elif taken := [path for path in held if path in sources]:
            problems.add("tensors that are the same parameter", sources[taken[0]].name, name)
        else:
            sources |= {path: Source(name, found[1].transform, *place) for path, place in held.items()}
            if tuple(info.shape) != shape:
                both = f"{list(info.shape)} instead of {list(shape)}"
                problems.add("misshapen tensors", f"{name} {both}")
    embedding = sources.get("model.embed_tokens.weight")
    for name in tied_heads:
        if embedding is not None and not _equal(reader, name, embedding.name):
            problems.add(f"the head of a tied model, unlike {embedding.name}", name)
    missing = [path for path in shapes if path not in sources]
    if missing:
        problems.add("missing tensors", *missing)
    problems.raise_if_any()
    return sources


# Where one of the model's tensors lies in the checkpoint's: Source's expert and first_row.
_Place = tuple[int | None, int]


def _held(path: str, shapes: Mapping[str, Shape]) -> tuple[dict[str, _Place], Shape]:
    """What a checkpoint's tensor holds, by its rule's path, and the shape that it must have for that."""
    if "*" not in path:
        return ({path: (None, 0)}, shapes[path]) if path in shapes else ({}, ())
    fused = "gate_up_proj"
    paths = [path.replace(fused, name) for name in ("gate_proj", "up_proj")] if fused in path else [path]
    experts = list(itertools.takewhile(lambda i: paths[0].replace("*", str(i)) in shapes, itertools.count()))
    if not experts:
        return {}, ()
    num_rows, num_columns = shapes[paths[0].replace("*", "0")]
    held: dict[str, _Place] = {
        path.replace("*", str(expert)): (expert, i * num_rows)
        for i, path in enumerate(paths)
        for expert in experts
    }
    return held, (len(experts), len(paths) * num_rows, num_columns)


def _equal(reader: CheckpointReader, name: str, other: str) -> bool:
    """Whether two matrices of the checkpoint hold the same values."""
    rows, columns = reader.tensors[name].shape
    if reader.tensors[other].shape != (rows, columns):
        return False
    blocks = [slice(first, min(first + _COMPARE_ROWS, rows)) for first in range(0, rows, _COMPARE_ROWS)]
    return all(
        np.array_equal(
            reader.read(name, (block, slice(columns))), reader.read(other, (block, slice(columns)))
        )
        for block in blocks
    )
