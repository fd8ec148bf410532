"""Bytes of a device by class, before anything is allocated: the one formula.

The engine sizes its KV cache by it, `/v1/memory` and the metrics report it, `jaxinfer.plan` prints it.

Dims: V vocab.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxinfer.config import ConfigError, ModelConfig
from jaxinfer.memory.parameters import itemsize, parameter_bytes, parameters
from jaxinfer.ops.sampling import BLOCK_ROWS
from jaxinfer.parallel.layout import device_share, row_share
from jaxinfer.parallel.stages import stage_models
from jaxinfer_kernels import Backend, decode_tile_tokens, kv_pages_shape, kv_scales_shape, kv_tile_tokens
from jaxinfer_kernels.layout import QUANTIZED_DTYPES

PROMPT_LOGPROBS_ROWS = 32  # of a prompt, whose logits are there at once; divides every prefill tile

# Of XLA's buffers, in programs compiled for the CPU. `plan --compile` has them from the compiler.
_SAMPLER_COPIES = 7  # float32 arrays of [rows, V] that the sampler holds of a block, its logits included
_PROMPT_LOGPROBS_COPIES = 2


@dataclass(frozen=True)
class Ledger:
    """Bytes by class: of one device, but for `host_staging`, which is of the host.

    Attributes:
      weights: parameters, in the dtypes that they are held in.
      kv_cache: pages of K and V, the null page and the layout's padding included.
      slots: what each slot keeps between steps: its tokens' counts for the penalties.
      activations: temporaries of the largest forward step.
      logits: logits, and temporaries of sampling.
      programs: compiled code.
      host_staging: of the host's memory, the largest parameter, which the loader builds there.
    """

    weights: int
    kv_cache: int
    slots: int
    activations: int
    logits: int
    programs: int
    host_staging: int

    @property
    def device_bytes(self) -> int:
        """All that is on the device."""
        return sum(self.by_class().values()) - self.host_staging

    def by_class(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return ", ".join(f"{name} {size:,}" for name, size in self.by_class().items())


@dataclass(frozen=True)
class CompiledBytes:
    """What the compiler says of a stage's programs, in place of the estimates.

    `page_bytes` are of a page in all layers, as the device's own layout of the cache pads it; the others
    are the ledger's classes.
    """

    page_bytes: int
    activations: int
    logits: int
    programs: int


class DoesNotFitError(ConfigError):
    """The device's memory does not hold the model, or a request at the length limit.

    `ledger` is without pages that do not fit; `budget_bytes` may be used of a device.
    """

    def __init__(self, message: str, ledger: Ledger, budget_bytes: int) -> None:
        super().__init__(message)
        self.ledger = ledger
        self.budget_bytes = budget_bytes


@dataclass(frozen=True)
class MemoryModel:
    """What decides the bytes of a device.

    Attributes:
      model: the model.
      dtype: of weights and activations.
      kv_dtype: of the KV cache.
      page_size: tokens in a page.
      max_num_seqs: slots, which are dealt to as many waves of decode rows as there are stages.
      max_num_batched_tokens: prefill rows of the largest step, beside the decode rows.
      tensor: devices that share a stage's model.
      pipe: pipeline stages.
      quantize: "none", or a weight-only format by its name.
      on_host: the device is the CPU, whose memory is the host's.
      compiled: what the compiler says of each stage, where it was asked.
      backend: the attention kernels', which own the layout of the pages.
      apart: the stages lie on several hosts.
    """

    model: ModelConfig
    dtype: str
    kv_dtype: str
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor: int = 1
    pipe: int = 1
    quantize: str = "none"
    on_host: bool = False
    compiled: tuple[CompiledBytes, ...] = ()
    backend: Backend = "xla"
    apart: bool = False

    @property
    def stages(self) -> tuple[MemoryModel, ...]:
        """Each pipeline stage, as a model of its own."""
        if self.pipe == 1:
            return (self,)
        models = stage_models(self.model, self.pipe)
        return tuple(
            replace(self, model=model, pipe=1, compiled=self.compiled[index : index + 1])
            for index, model in enumerate(models)
        )

    def fullest_stage(self, num_pages: int, among: Sequence[int] | None = None) -> int:
        """The first stage whose devices hold most, with so many pages; of all, or among these."""
        sizes = {
            index: stage._ledger(num_pages).device_bytes
            for index, stage in enumerate(self.stages)
            if among is None or index in among
        }
        return max(sizes, key=lambda index: sizes[index])

    def ledger(self, num_pages: int, among: Sequence[int] | None = None) -> Ledger:
        """With so many pages, the null page included; of a device of the fullest stage of all, or among
        these.
        """
        ledgers = [stage._ledger(num_pages) for stage in self.stages]
        staging = max(ledgers[index].host_staging for index in among or range(len(ledgers)))
        return replace(ledgers[self.fullest_stage(num_pages, among)], host_staging=staging)

    def pages_within(self, budget_bytes: int, cache_bytes: int) -> int:
        """Pages that fit beside everything else, and into `cache_bytes`, on the devices of every stage."""
        return min(
            min(budget_bytes - stage._ledger(0).device_bytes, cache_bytes) // stage.page_bytes
            for stage in self.stages
        )

    def _ledger(self, num_pages: int) -> Ledger:
        """Of one stage's device."""
        compiled = self.compiled[0] if self.compiled else None
        weights = [
            (parameter, parameter_bytes(parameter, self.dtype, self.quantize))
            for parameter in parameters(self.share)
        ]
        largest = max(size // parameter.count for parameter, size in weights if parameter.count)
        return Ledger(
            weights=sum(size for _, size in weights),
            kv_cache=num_pages * self.page_bytes,
            slots=self._slot_bytes() if self.model.stage.is_last else 0,
            activations=compiled.activations if compiled else self._activation_bytes(),
            logits=compiled.logits if compiled else self._logits_bytes(),
            programs=compiled.programs if compiled else 0,
            # The CPU client takes the buffer over.
            host_staging=0 if self.on_host else largest,
        )

    @property
    def share(self) -> ModelConfig:
        """What one device holds of a stage's model, as a model of its own."""
        return device_share(self.model, self.tensor)

    @property
    def page_bytes(self) -> int:
        """A page in all layers of one device, in the layout of the kernels, with its scales; the most of
        any stage's.
        """
        if self.pipe > 1:
            return max(stage.page_bytes for stage in self.stages)
        if self.compiled:
            return self.compiled[0].page_bytes
        heads = self.share.num_key_value_heads
        shape = kv_pages_shape(1, self.page_size, heads, self.model.head_dim, self.backend)
        data = math.prod(shape) * itemsize(self.kv_dtype)
        scales = 0
        if self.kv_dtype in QUANTIZED_DTYPES:
            scales = math.prod(kv_scales_shape(1, self.page_size, heads, self.backend)) * 4
        return (data + scales) * self.model.num_hidden_layers

    @property
    def _num_decodes(self) -> int:
        """Rows of the largest step."""
        return -(-self.max_num_seqs // self.model.stage.num_stages)

    def _slot_bytes(self) -> int:
        """engine/kv_cache.py's SlotState: a token, and for each of the vocabulary a bit and a count."""
        return (self.max_num_seqs + 1) * (4 + self.model.vocab_size * (1 + 4))

    def _activation_bytes(self) -> int:
        """The hidden state, its norm and sum, and what the MLP makes; or the keys and values that a tile of
        attention reads for all decode rows at once, with its queries and sums. And what the stage before
        hands over, and what the stage after gets.

        Of stages on several hosts one that receives also holds zeros in the shape of each step
        (engine/handover.py): under 3 times the most rows, since prefill rows double from step to step, and
        under 7/3 times, since beside decodes they quadruple.
        """
        share, size = self.share, itemsize(self.dtype)
        # A token has a row for each of its experts, and each row its input and output beside the ffn.
        per_moe = [
            layer.moe.num_experts_per_tok * (2 * share.hidden_size + 3 * layer.moe.moe_intermediate_size)
            for layer in share.layers
            if layer.moe is not None
        ]
        mlp = 3 * share.hidden_size + max([3 * share.intermediate_size, *per_moe])
        tile_tokens = (decode_tile_tokens if self.backend == "xla" else kv_tile_tokens)(self.page_size)
        tile = 2 * share.num_key_value_heads * tile_tokens * share.head_dim
        queries = 4 * max(share.hidden_size, share.num_attention_heads * share.head_dim)
        rows = self._num_decodes + self.max_num_batched_tokens
        handed = 2 - self.model.stage.is_first - self.model.stage.is_last
        if self.apart and not self.model.stage.is_first:
            handed += 3 + 7 / 3
        handed = int(handed * rows) * share.hidden_size * size
        return max(rows * mlp * size, self._num_decodes * (tile * size + queries * 4)) + handed

    def _logits_bytes(self) -> int:
        if not self.model.stage.is_last:
            return 0
        num_rows = row_share(self._num_decodes, self.tensor)
        sampled = _SAMPLER_COPIES * min(num_rows, BLOCK_ROWS)
        if num_rows > BLOCK_ROWS:  # of which the sampler takes a copy
            sampled += num_rows
        rows = max(sampled, _PROMPT_LOGPROBS_COPIES * PROMPT_LOGPROBS_ROWS)
        return rows * self.model.vocab_size * 4


def kv_bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    """K and V of one token in all layers: 131,072 bytes for Llama-3.1-8B in bfloat16."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize


def page_table_width(max_model_len: int, page_size: int) -> int:
    """Entries of a sequence's page table: whole tiles of the attention's reduction."""
    tile = kv_tile_tokens(page_size)
    return -(-max_model_len // tile) * (tile // page_size)
