"""Frozen, hashable configurations. Nothing here imports jax."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal


class ConfigError(ValueError):
    """A configuration that cannot be honoured: one line that says what is wrong and what to do."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with the scaling that stretches it, in Hugging Face's words."""

    rope_theta: float = 10000.0
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 0  # llama3 and yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin; resolved by the family
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    freq_factors: tuple[float, ...] = ()  # divide each frequency; GGUF's rope_freqs.weight


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in place of an MLP, in Hugging Face's words."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool  # the chosen experts' probabilities are scaled to sum to 1
    expert_parallel: int = 1  # devices that divide the experts among them: parallel/layout.py


@dataclass(frozen=True)
class LayerConfig:
    """What differs from layer to layer."""

    rope: RopeConfig
    sliding_window: int | None = None  # a token sees this many positions, its own included
    moe: MoeConfig | None = None  # None is one dense MLP


@dataclass(frozen=True)
class StageConfig:
    """Which pipeline stage of a model a config describes; a whole model is first and last in one."""

    index: int = 0
    num_stages: int = 1
    first_layer: int = 0  # of the whole model's: the stage's own first one

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, in Hugging Face's words. Holds no family's name in any decision.

    `architecture` is for messages alone. `norm_offset` says that the checkpoint stores w where
    the norm multiplies by 1 + w, and `interleaved_qk` that it stores the rows of q and k with each
    head's halves interleaved; the loader undoes both, so the decoder never sees them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    attention_bias: bool = False  # on q, k and v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False  # norms after attention and after the MLP too
    norm_offset: bool = False
    interleaved_qk: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None  # multiplies q.k; None is head_dim ** -0.5
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    tensor_parallel: int = 1  # sizes are padded to so many devices: parallel/layout.py
    stage: StageConfig = StageConfig()  # `layers` are those of one stage: parallel/stages.py
    matmul: Literal["cpu", "xla"] = "xla"  # whose kernels multiply by the weights

    @property
    def has_embedding(self) -> bool:
        """Whether this stage makes hidden states of tokens, or logits with the same weights."""
        return self.stage.is_first or (self.stage.is_last and self.tie_word_embeddings)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        return -(-self.vocab_size // self.tensor_parallel) * self.tensor_parallel

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale


@dataclass(frozen=True)
class MeshConfig:
    """Devices: `data` groups that serve requests of their own, `tensor` devices in each that share a layer,
    and as many in each of `pipe` stages that have layers of their own.
    """

    data: int = 1
    tensor: int = 1
    pipe: int = 1

    @property
    def num_devices(self) -> int:
        return self.pipe * self.data * self.tensor

    @property
    def stage(self) -> MeshConfig:
        """The devices of one stage."""
        return replace(self, pipe=1)

    def __str__(self) -> str:
        stages = f"{self.pipe}x" if self.pipe > 1 else ""
        return f"{stages}{self.data}x{self.tensor}"


def parse_mesh(text: str) -> MeshConfig:
    """DxT, data by tensor parallel; or PxDxT, with pipeline stages.

    Raises:
      ConfigError: it is something else.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        raise ConfigError(
            f"mesh={text} must be DxT, data by tensor parallel, such as 1x1, or PxDxT with pipeline stages"
        )
    *pipe, data, tensor = map(int, text.split("x"))
    return MeshConfig(data, tensor, *pipe)


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache of a data-parallel group. `num_pages` includes page 0, the null page."""

    page_size: int
    num_pages: int
    dtype: str
    backend: Literal["cpu", "tpu", "gpu", "xla"] = "xla"  # the attention kernels', which own the layout


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of continuous batching, of each data-parallel group. All counts are positive."""

    max_num_seqs: int
    max_num_batched_tokens: int  # prefill tokens a step at most; decodes ride along
    max_model_len: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    prefill_tile: int = 32  # a chunk's rows are a multiple of it, as the attention kernels want
    num_groups: int = 1
    num_waves: int = 1  # that sequences are dealt to, which steps serve in turn: one a pipeline stage

    @property
    def max_step_seqs(self) -> int:
        """Sequences of a group in a step at most: a wave's part of `max_num_seqs`."""
        return -(-self.max_num_seqs // self.num_waves)


def padded_rows(num_tokens: int, tile: int) -> int:
    """Rows that a chunk of a prompt takes: whole tiles."""
    return -(-num_tokens // tile) * tile


@dataclass(frozen=True)
class HostsConfig:
    """The processes, on a machine each, that run one engine together. Host 0 serves, the others follow it.

    Attributes:
      coordinator: host 0's name or address and a port, on which jax listens there; we do on the next one.
      num_hosts: 2 or more.
      host_id: this one's number, from 0.
      preflight_timeout_s: within so many seconds all hosts must have met.
    """

    coordinator: str
    num_hosts: int
    host_id: int
    preflight_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not re.fullmatch(r"(\[[^]]+\]|[^:\s]+):\d{1,5}", self.coordinator) or not 0 < self.port < 65535:
            raise ConfigError(f"coordinator={self.coordinator!r} must be HOST:PORT, such as 10.0.0.1:8476")
        if self.num_hosts < 2:
            raise ConfigError(f"num_hosts={self.num_hosts} must be 2 or more")
        if not 0 <= self.host_id < self.num_hosts:
            raise ConfigError(f"host_id={self.host_id} must be from 0 to {self.num_hosts - 1}")

    @property
    def address(self) -> str:
        """Of host 0, without the brackets of IPv6."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """jax's."""
        return int(self.coordinator.rpartition(":")[2])


@dataclass(frozen=True)
class EngineConfig:
    """What a user asks for; None means: derive it (`resolve` does, once)."""

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    mesh: str = "1x1"
    hosts: HostsConfig | None = None  # None is this process alone
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    page_size: int = 16
    num_pages: int | None = None
    memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    seed: int = 0
    cache_dir: str | None = None  # where the demo model is kept; None is ~/.cache/jaxinfer
    compilation_cache_dir: str | None = None
    bundle: str | None = None  # a directory of bundles: memory/bundle.py
    xla_flags: str = ""  # what the environment tells XLA
    strict_shapes: bool = False  # a compilation while serving is an error
    rope_scaling: str | None = None  # JSON, as in config.json
    verify: Literal["none", "size", "sha256"] = "size"
    load_format: Literal["auto", "dummy"] = "auto"
    attention: Literal["auto", "cpu", "tpu", "gpu", "xla"] = "auto"
    matmul: Literal["auto", "cpu", "xla"] = "auto"

    def replace(self, **changes: object) -> EngineConfig:
        return replace(self, **changes)  # type: ignore[arg-type]
