"""How a model's heads, feed-forward and vocabulary are laid out for T-way tensor parallelism. No jax.

A fused parameter's rows come in T blocks, (q_t, k_t, v_t) or (gate_t, up_t), so that a plain split of
its rows gives each device the heads that it computes. Sizes that T does not divide are padded with
zeros, which add nothing to any product; with fewer kv heads than devices each is repeated, and the
query heads that share it are dealt out among its copies. Of a mixture of experts each device has some
of the experts, or where T does not divide them a part of each one's feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxinfer.config import ConfigError, LayerConfig, ModelConfig, MoeConfig

# Modules whose rows are outputs that the devices of a group divide: heads, feed-forward, vocabulary.
_SPLIT_ROWS = ("qkv_proj", "gate_up_proj", "embed_tokens", "lm_head")
# Modules whose columns are inputs that the devices divide: each adds up its part of the sum.
_SPLIT_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Run:
    """Rows (or columns) of a checkpoint's tensor that lie side by side in a parameter too.

    Attributes:
      part: the tensor's module: "q_proj", "gate_proj" ...
      source: first row in the tensor.
      target: first row in the parameter.
      size: rows.
    """

    part: str
    source: int
    target: int
    size: int


def partitioned(model: ModelConfig, tensor_parallel: int) -> ModelConfig:
    """The model as its parameters, cache and attention see it: padded sizes, repeated kv heads.

    Raises:
      ConfigError: more devices than query heads.
    """
    if tensor_parallel > model.num_attention_heads:
        raise ConfigError(
            f"mesh: {tensor_parallel}-way tensor parallelism needs as many query heads, and "
            f"{model.architecture} has num_attention_heads={model.num_attention_heads}: "
            f"use 1 to {model.num_attention_heads}, and more data-parallel groups"
        )
    query_heads, kv_heads = _head_slots(model, tensor_parallel)
    return replace(
        model,
        num_attention_heads=len(query_heads),
        num_key_value_heads=len(kv_heads),
        intermediate_size=_round_up(model.intermediate_size, tensor_parallel),
        layers=tuple(_partitioned_layer(layer, tensor_parallel) for layer in model.layers),
        tensor_parallel=tensor_parallel,
    )


def _partitioned_layer(layer: LayerConfig, tensor_parallel: int) -> LayerConfig:
    moe = layer.moe
    if moe is None:
        return layer
    if moe.num_experts % tensor_parallel == 0:
        return replace(layer, moe=replace(moe, expert_parallel=tensor_parallel))
    size = _round_up(moe.moe_intermediate_size, tensor_parallel)
    return replace(layer, moe=replace(moe, moe_intermediate_size=size))


def moe_of(path: str, model: ModelConfig) -> MoeConfig:
    """The mixture of experts that a parameter model.layers.I.mlp.experts... belongs to."""
    moe = model.layers[int(path.split(".")[2]) - model.stage.first_layer].moe
    if moe is None:
        raise ValueError(f"path={path!r} is of a layer without experts")
    return moe


def device_share(model: ModelConfig, tensor_parallel: int) -> ModelConfig:
    """What one device of a group holds of the model, as a model of its own: to count bytes with."""
    whole = partitioned(model, tensor_parallel)
    return replace(
        whole,
        num_attention_heads=whole.num_attention_heads // tensor_parallel,
        num_key_value_heads=whole.num_key_value_heads // tensor_parallel,
        intermediate_size=whole.intermediate_size // tensor_parallel,
        vocab_size=whole.padded_vocab_size // tensor_parallel,
        layers=tuple(_layer_share(layer, tensor_parallel) for layer in whole.layers),
        tensor_parallel=1,
    )


def _layer_share(layer: LayerConfig, tensor_parallel: int) -> LayerConfig:
    """The router is whole on each device, so the number of experts stays, and how they are divided."""
    moe = layer.moe
    if moe is None or moe.expert_parallel > 1:
        return layer
    return replace(
        layer, moe=replace(moe, moe_intermediate_size=moe.moe_intermediate_size // tensor_parallel)
    )


def padding(model: ModelConfig, tensor_parallel: int) -> dict[str, tuple[int, int]]:
    """What `partitioned` pads or repeats: name of the size -> as it is, as it is laid out."""
    laid_out = partitioned(model, tensor_parallel)
    sizes = {
        name: (getattr(model, name), getattr(laid_out, name))
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    sizes["vocab_size"] = (model.vocab_size, laid_out.padded_vocab_size)
    for before, after in zip(model.layers, laid_out.layers, strict=True):
        if before.moe is not None and after.moe is not None:
            sizes["moe_intermediate_size"] = (
                before.moe.moe_intermediate_size,
                after.moe.moe_intermediate_size,
            )
    return {name: (before, after) for name, (before, after) in sizes.items() if before != after}


def row_share(num_rows: int, tensor_parallel: int) -> int:
    """Rows of a step that one device samples: its part of them, or all where they do not divide."""
    return num_rows if num_rows % tensor_parallel else num_rows // tensor_parallel


def split_axis(path: str, laid_out: ModelConfig) -> int | None:
    """The axis of a parameter that the devices of a group divide among them; None is none."""
    module, kind = path.split(".")[-2:]
    if module == "experts":
        if moe_of(path, laid_out).expert_parallel > 1:
            return 0
        return 1 if kind == "gate_up_proj" else 2
    if module in _SPLIT_ROWS:
        return 0
    if module in _SPLIT_COLUMNS and kind == "weight":
        return 1
    return None


def part_size(part: str, model: ModelConfig) -> int:
    """Size of a checkpoint's tensor along the axis that is divided, by its module's name."""
    query_dim = model.num_attention_heads * model.head_dim
    kv_dim = model.num_key_value_heads * model.head_dim
    heads = {"q_proj": query_dim, "k_proj": kv_dim, "v_proj": kv_dim, "o_proj": query_dim}
    ffn = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), model.intermediate_size)
    return (heads | ffn | dict.fromkeys(("embed_tokens", "lm_head"), model.vocab_size))[part]


def runs(module: str, model: ModelConfig, tensor_parallel: int) -> tuple[Run, ...]:
    """What a divided parameter is made of along its `split_axis`, in order; the rest of it is zeros.

    Args:
      module: the last module of its path, such as "qkv_proj".
      model: as the checkpoint has it.
      tensor_parallel: T.
    """
    if module == "qkv_proj":
        return tuple(_qkv_runs(model, tensor_parallel))
    if module == "o_proj":
        query_heads, _ = _head_slots(model, tensor_parallel)
        return tuple(_head_runs("o_proj", query_heads, 0, model.head_dim))
    if module == "gate_up_proj":
        return tuple(_gate_up_runs(model.intermediate_size, tensor_parallel))
    return (Run(module, 0, 0, part_size(module, model)),)


def expert_runs(module: str, moe: MoeConfig, num_blocks: int) -> tuple[Run, ...]:
    """What each expert's matrix is made of: along its rows for gate_up_proj, its columns for down_proj.

    Args:
      module: "gate_up_proj" or "down_proj".
      moe: as the checkpoint has it.
      num_blocks: devices that divide the matrix; 1 where they divide the experts.
    """
    if module == "down_proj":
        return (Run(module, 0, 0, moe.moe_intermediate_size),)
    return tuple(_gate_up_runs(moe.moe_intermediate_size, num_blocks))


def _qkv_runs(model: ModelConfig, tensor_parallel: int) -> Iterator[Run]:
    head_dim = model.head_dim
    query_heads, kv_heads = _head_slots(model, tensor_parallel)
    num_q, num_kv = len(query_heads) // tensor_parallel, len(kv_heads) // tensor_parallel
    target = 0
    for block in range(tensor_parallel):
        own_q = query_heads[block * num_q : (block + 1) * num_q]
        own_kv = kv_heads[block * num_kv : (block + 1) * num_kv]
        for part, heads in (("q_proj", own_q), ("k_proj", own_kv), ("v_proj", own_kv)):
            yield from _head_runs(part, heads, target, head_dim)
            target += len(heads) * head_dim


def _gate_up_runs(size: int, tensor_parallel: int) -> Iterator[Run]:
    rows = _round_up(size, tensor_parallel) // tensor_parallel
    for block in range(tensor_parallel):
        first = block * rows
        count = min(rows, size - first)
        if count > 0:
            yield Run("gate_proj", first, 2 * first, count)
            yield Run("up_proj", first, 2 * first + rows, count)


def _head_runs(part: str, heads: tuple[int | None, ...], target: int, head_dim: int) -> Iterator[Run]:
    """Runs of neighbouring heads; None is a head of zeros."""
    slot = 0
    while slot < len(heads):
        first, end = heads[slot], slot + 1
        if first is not None:
            while end < len(heads) and heads[end] == first + end - slot:
                end += 1
            yield Run(part, first * head_dim, target + slot * head_dim, (end - slot) * head_dim)
        slot = end


def _head_slots(
    model: ModelConfig, tensor_parallel: int
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """The checkpoint's head in each slot of the laid-out query heads and kv heads; None is padding.

    Each kv head has `copies` slots, followed by as many query heads a slot; slots are padded to whole
    devices. With T dividing the kv heads, or they T and T the query heads, nothing is padded.
    """
    num_kv = model.num_key_value_heads
    group = model.num_attention_heads // num_kv
    copies = min(max(1, tensor_parallel // num_kv), group)
    share = -(-group // copies)  # query heads of one kv slot
    query_heads: list[int | None] = []
    kv_heads: list[int | None] = []
    for head in range(num_kv):
        for copy in range(copies):
            own = range(copy * share, min((copy + 1) * share, group))
            query_heads += [head * group + i for i in own] + [None] * (share - len(own))
            kv_heads.append(head)
    num_padding = -len(kv_heads) % tensor_parallel
    query_heads += [None] * (num_padding * share)
    kv_heads += [None] * num_padding
    return tuple(query_heads), tuple(kv_heads)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
