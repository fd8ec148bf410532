"""The least time that a step can take, by what it must move and compute.

A step's time is the greater of its bytes over the memory's bandwidth and its operations over the
chip's rate, plus what it sends over the links: the first two overlap perfectly, the last not at all. It
passes the pipeline stages one after another, so what a device of each must do is added up.
Of a mixture's experts those are read that the step's tokens choose, were each choice as likely.
Nothing runs at the published peak, so this bounds the speed from above (Williams, Waterman and
Patterson 2009, "Roofline").
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxinfer.config import LayerConfig
from jaxinfer.memory.chips import Chip
from jaxinfer.memory.ledger import MemoryModel
from jaxinfer.memory.parameters import itemsize, parameter_bytes, parameters

_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True)
class Roofline:
    """One step of one device, or of one in each pipeline stage.

    Attributes:
      num_tokens: that the step brings, in one data-parallel group.
      weight_bytes, kv_bytes: read from memory, at least.
      flops: computed.
      link_bytes: sent, and as many received.
      memory_s, compute_s, link_s: what each takes alone.
    """

    num_tokens: int
    weight_bytes: int
    kv_bytes: int
    flops: float
    link_bytes: float
    memory_s: float
    compute_s: float
    link_s: float

    @property
    def step_s(self) -> float:
        return max(self.memory_s, self.compute_s) + self.link_s

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max((self.memory_s, "memory"), (self.compute_s, "compute"), (self.link_s, "links"))[1]

    @property
    def tokens_per_s(self) -> float:
        """Of a data-parallel group."""
        return self.num_tokens / self.step_s


def decode_roofline(memory: MemoryModel, chip: Chip, num_seqs: int, context: int) -> Roofline | None:
    """A token for each of `num_seqs` sequences that hold `context`; None where a rate is not published."""
    return _roofline(memory, chip, num_seqs, num_seqs, context, context)


def prefill_roofline(memory: MemoryModel, chip: Chip, num_tokens: int) -> Roofline | None:
    """A prompt of `num_tokens`, in one step; None where a rate is not published."""
    return _roofline(memory, chip, 1, num_tokens, num_tokens, num_tokens / 2)


def _roofline(
    memory: MemoryModel, chip: Chip, num_seqs: int, num_tokens: int, context: int, attended: float
) -> Roofline | None:
    """context: tokens that a sequence holds. attended: those that one of its tokens sees, on average."""
    if not (chip.bandwidth_gbps and chip.interconnect_gbps and chip.bf16_tflops) or memory.dtype == "float32":
        return None
    rates = _Rates(
        memory=chip.bandwidth_gbps * _GIGA / chip.num_devices,
        compute=chip.bf16_tflops * _TERA / chip.num_devices,
        link=chip.interconnect_gbps / 2 * _GIGA / chip.num_devices,
    )
    stages = [_stage(stage, rates, num_seqs, num_tokens, context, attended) for stage in memory.stages]
    added = [field.name for field in fields(Roofline) if field.name != "num_tokens"]
    return Roofline(num_tokens, **{name: sum(getattr(stage, name) for stage in stages) for name in added})


@dataclass(frozen=True)
class _Rates:
    """Of a device, a second: bytes of memory, operations, and bytes sent."""

    memory: float
    compute: float
    link: float


def _stage(
    memory: MemoryModel, rates: _Rates, num_seqs: int, num_tokens: int, context: int, attended: float
) -> Roofline:
    """As `_roofline`, of one pipeline stage."""
    model, share = memory.model, memory.share
    is_head = model.stage.is_last and model.tie_word_embeddings
    held = [p for p in parameters(share) if p.role != "embedding" or is_head]
    # Weights are expanded before they are multiplied: the arithmetic is bfloat16's, however they are stored.
    products = sum(
        2 * p.size * p.chosen * (num_seqs if p.role in ("head", "embedding") else num_tokens)
        for p in held
        if p.role not in ("bias", "norm")
    )
    queries = share.num_attention_heads * share.head_dim
    attention = sum(4 * queries * num_tokens * _seen(layer, attended) for layer in model.layers)
    token_bytes = memory.page_bytes / memory.page_size / model.num_hidden_layers
    weight_bytes = int(
        sum(
            parameter_bytes(p, memory.dtype, memory.quantize) * (1 - (1 - p.chosen) ** num_tokens)
            for p in held
        )
    )
    kv_bytes = int(num_seqs * token_bytes * sum(_seen(layer, context) for layer in model.layers))
    # A ring's all-reduce sends 2 (t - 1) / t of the array from each device; there are two a layer.
    all_reduces = 2 * model.num_hidden_layers * num_tokens * model.hidden_size * itemsize(memory.dtype)
    handed = 0 if model.stage.is_last else num_tokens * model.hidden_size * itemsize(memory.dtype)
    link_bytes = 2 * (memory.tensor - 1) / memory.tensor * all_reduces + handed
    return Roofline(
        num_tokens=num_tokens,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        flops=products + attention,
        link_bytes=link_bytes,
        memory_s=(weight_bytes + kv_bytes) / rates.memory,
        compute_s=(products + attention) / rates.compute,
        link_s=link_bytes / rates.link,
    )


def _seen(layer: LayerConfig, context: float) -> float:
    return context if layer.sliding_window is None else min(context, layer.sliding_window)
