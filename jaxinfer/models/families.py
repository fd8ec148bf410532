"""config.json or GGUF metadata -> ModelConfig: one short function a family, found in a registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal, cast

from jaxinfer.config import ConfigError, LayerConfig, ModelConfig, MoeConfig, RopeConfig
from jaxinfer.models import rope_scaling
from jaxinfer_checkpoints.reader import CheckpointReader, TensorInfo

Config = Mapping[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"

# llama.cpp knows Gemma 3 27B, whose query scale is hidden_size / num_heads, by its layers alone.
GEMMA3_27B_NUM_LAYERS = 62
GEMMA3_PATTERN = 6  # every sixth layer attends to everything
GEMMA3_LOCAL_THETA = 10_000.0

# What must be there, and be a count, and what a family has a default for.
COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim")
GGUF_COUNTS = (
    *("block_count", "embedding_length", "context_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
)


def load_model_config(reader: CheckpointReader, *, rope_scaling_override: str | None = None) -> ModelConfig:
    """The ModelConfig of an open checkpoint; see `model_config_from`."""
    freq_factors: tuple[float, ...] = ()
    if "rope_freqs.weight" in reader.tensors:
        freq_factors = tuple(float(f) for f in reader.read("rope_freqs.weight"))
    return model_config_from(
        reader.config,
        reader.format,
        tensors=reader.tensors,
        freq_factors=freq_factors,
        rope_scaling_override=rope_scaling_override,
    )


def model_config_from(
    config: Config,
    format: Literal["safetensors", "gguf"],
    *,
    tensors: Mapping[str, TensorInfo] | None = None,
    freq_factors: tuple[float, ...] = (),
    rope_scaling_override: str | None = None,
) -> ModelConfig:
    """What the decoder needs to know of a model.

    Args:
      config: config.json with generation_config.json under "generation_config", or GGUF metadata.
      format: which of the two.
      tensors: the checkpoint's tensors. GGUF metadata leaves to them what biases there are and
        whether the head is tied.
      freq_factors: GGUF's rope_freqs.weight [H / 2], which divides the rotary frequencies.
      rope_scaling_override: JSON in place of config.json's `rope_scaling` (flag --rope_scaling).

    Raises:
      ConfigError: for an architecture, a RoPE scaling or an option that is not supported.
    """
    if format == "gguf":
        model = _from_gguf(config, tensors or {}, freq_factors)
    else:
        model = _from_hugging_face(config)
    if rope_scaling_override is not None:
        model = rope_scaling.override(model, rope_scaling_override)
    return model


# --- Hugging Face's config.json -------------------------------------------------------------------


def _from_hugging_face(config: Config) -> ModelConfig:
    named = list(config.get("architectures") or ())
    known = [name for name in named if name in FAMILIES]
    if not named:
        known = [name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")]
        named = [f"model_type {config.get('model_type')!r}"]
    if not known:
        raise ConfigError(
            f"unknown architecture {', '.join(named)}: known are {', '.join(FAMILIES)} "
            f"and, in GGUF, {', '.join(GGUF_FAMILIES)}"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"quantization_config of method {method!r} is not supported: use the unquantised model"
        )
    for part in (config, config.get("text_config") or {}):
        given = {name: part[name] for name in COUNTS if name in part}
        _check_counts(given | {name: part[name] for name in OPTIONAL_COUNTS if part.get(name) is not None})
    try:
        return FAMILIES[known[0]].build(known[0], config)
    except KeyError as error:
        raise ConfigError(f"config.json of {known[0]} lacks {error}") from error


def _check_counts(counts: Config) -> None:
    """Raises ConfigError, with its name, for one that is no whole number above 0."""
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number, 1 or more")


def _base(architecture: str, config: Config, layers: tuple[LayerConfig, ...], **special: Any) -> ModelConfig:
    """What every family of Hugging Face's spells alike; `special` overrides and adds."""
    heads = config["num_attention_heads"]
    values: dict[str, Any] = dict(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        layers=layers,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=config["max_position_embeddings"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        hidden_act=config.get("hidden_act", "silu"),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(config),
    )
    return _checked(ModelConfig(**(values | special)))


def _checked(model: ModelConfig) -> ModelConfig:
    """The model itself, where the decoder can compute it."""
    if model.hidden_act not in ("silu", "gelu_pytorch_tanh"):
        raise ConfigError(
            f"hidden_act={model.hidden_act!r} is not supported: known are silu, gelu_pytorch_tanh"
        )
    if model.num_attention_heads % model.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads={model.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={model.num_key_value_heads}"
        )
    for moe in {layer.moe for layer in model.layers} - {None}:
        if moe is not None and not 1 <= moe.num_experts_per_tok <= moe.num_experts:
            raise ConfigError(
                f"num_experts_per_tok={moe.num_experts_per_tok} must be from 1 to {moe.num_experts}, "
                "the number of experts"
            )
    # YaRN's own words say how far the model reaches; Qwen's configs leave max_position_embeddings at
    # the length before it.
    reach = [
        int(layer.rope.original_max_position_embeddings * layer.rope.factor)
        for layer in model.layers
        if layer.rope.rope_type == "yarn"
    ]
    longest = max([model.max_position_embeddings, *reach])
    return dataclasses.replace(model, max_position_embeddings=longest)


def _eos_token_ids(config: Config) -> tuple[int, ...]:
    """Every id that ends a text, of config.json and generation_config.json."""
    ids: list[int] = []
    for source in (config, config.get("generation_config") or {}):
        eos = source.get("eos_token_id")
        ids += [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return tuple(dict.fromkeys(ids))


def _layers(
    kinds: Sequence[str], ropes: Mapping[str, RopeConfig], sliding_window: int | None
) -> tuple[LayerConfig, ...]:
    """One LayerConfig for each of config.json's `layer_types`."""
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise ConfigError(f"layer_types has {', '.join(unknown)}: known are {FULL}, {SLIDING}")
    windows = {FULL: None, SLIDING: sliding_window}
    return tuple(LayerConfig(rope=ropes[kind], sliding_window=windows[kind]) for kind in kinds)


def _plain_ropes(config: Config, theta: float = 10_000.0) -> dict[str, RopeConfig]:
    """One RoPE for every layer, unless `rope_parameters` tells layer types apart."""
    return rope_scaling.from_config_json(config, {FULL: theta, SLIDING: theta})


def _with_moe(layers: tuple[LayerConfig, ...], moe: MoeConfig, dense: Set[int]) -> tuple[LayerConfig, ...]:
    """The same layers with a mixture of experts, but for those in `dense`."""
    return tuple(
        layer if i in dense else dataclasses.replace(layer, moe=moe) for i, layer in enumerate(layers)
    )


def _llama(architecture: str, config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    return _base(
        architecture,
        config,
        _layers([FULL] * config["num_hidden_layers"], _plain_ropes(config), None),
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _mistral(architecture: str, config: Config) -> ModelConfig:
    kinds = config.get("layer_types") or [SLIDING] * config["num_hidden_layers"]
    return _base(architecture, config, _layers(kinds, _plain_ropes(config), config.get("sliding_window")))


def _mixtral(architecture: str, config: Config) -> ModelConfig:
    moe = MoeConfig(
        num_experts=config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["intermediate_size"],
        norm_topk_prob=True,
    )
    kinds = [SLIDING] * config["num_hidden_layers"]
    layers = _layers(kinds, _plain_ropes(config, 1_000_000.0), config.get("sliding_window"))
    return _base(architecture, config, _with_moe(layers, moe, frozenset()))


def _qwen_layers(config: Config) -> tuple[LayerConfig, ...]:
    """The first max_window_layers layers see everything; the rest slide, if use_sliding_window."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    count, first = config["num_hidden_layers"], config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [SLIDING if i >= first else FULL for i in range(count)]
    return _layers(kinds, _plain_ropes(config), window)


def _qwen2(architecture: str, config: Config) -> ModelConfig:
    return _base(architecture, config, _qwen_layers(config), attention_bias=True)


def _qwen3(architecture: str, config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    return _base(
        architecture,
        config,
        _qwen_layers(config),
        head_dim=config.get("head_dim") or 128,
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
    )


def _qwen3_moe(architecture: str, config: Config) -> ModelConfig:
    """Every decoder_sparse_step-th layer is a mixture of experts, but for those of mlp_only_layers."""
    moe = MoeConfig(
        # transformers 5 writes num_local_experts, older versions num_experts.
        num_experts=config["num_experts" if "num_experts" in config else "num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
    )
    count, step = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
    dense = {i for i in range(count) if (i + 1) % step} | set(config.get("mlp_only_layers") or ())
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    bias = bool(config.get("attention_bias", False))
    return _base(
        architecture,
        config,
        _with_moe(_layers([SLIDING] * count, _plain_ropes(config), window), moe, dense),
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
    )


def _gemma3(architecture: str, config: Config) -> ModelConfig:
    if config.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention=True is an encoder: only causal models are supported")
    count = config["num_hidden_layers"]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or GEMMA3_PATTERN
    kinds = config.get("layer_types") or [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
    local_theta = float(config.get("rope_local_base_freq", GEMMA3_LOCAL_THETA))
    ropes = rope_scaling.from_config_json(config, {FULL: 1_000_000.0, SLIDING: local_theta}, scaled=(FULL,))
    bias = bool(config.get("attention_bias", False))
    return _base(
        architecture,
        config,
        _layers(kinds, ropes, config.get("sliding_window", 4096)),
        head_dim=config.get("head_dim", 256),
        hidden_act=config.get("hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        attention_bias=bias,
        attention_out_bias=bias,
        norm_offset=True,
        query_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        # attn_logit_softcapping is Gemma 2's: norms on q and k took its place, and transformers reads
        # the key and leaves it unused.
        final_logit_softcapping=config.get("final_logit_softcapping"),
        **_gemma3_shape(config["hidden_size"]),
    )


def _gemma3_shape(hidden_size: int) -> dict[str, Any]:
    """What is Gemma 3's whatever the file."""
    return dict(qk_norm=True, sandwich_norms=True, embedding_scale=hidden_size**0.5)


def _gemma3_multimodal(architecture: str, config: Config) -> ModelConfig:
    """The text half, whose config leaves out what is Gemma3TextConfig's default.

    The loader leaves the vision tower's tensors where they are.
    """
    defaults = dict(
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=131_072,
        bos_token_id=2,
    )
    outer = {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "generation_config", "tie_word_embeddings")
        if key in config
    }
    return _gemma3(architecture, defaults | dict(config["text_config"]) | outer)


@dataclasses.dataclass(frozen=True)
class Family:
    """How to read one of Hugging Face's architectures."""

    model_type: str
    build: Callable[[str, Config], ModelConfig]


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama),
    "MistralForCausalLM": Family("mistral", _mistral),
    "MixtralForCausalLM": Family("mixtral", _mixtral),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe),
    "Gemma3ForCausalLM": Family("gemma3_text", _gemma3),
    "Gemma3ForConditionalGeneration": Family("gemma3", _gemma3_multimodal),
}


# --- GGUF metadata --------------------------------------------------------------------------------


def _from_gguf(
    metadata: Config, tensors: Mapping[str, TensorInfo], factors: tuple[float, ...]
) -> ModelConfig:
    architecture = str(metadata.get("general.architecture"))
    if architecture not in GGUF_FAMILIES:
        raise ConfigError(
            f"unknown GGUF architecture {architecture!r}: known are {', '.join(GGUF_FAMILIES)} "
            f"and, in Hugging Face's format, {', '.join(FAMILIES)}"
        )
    prefix = architecture + "."
    config = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    # Those that GGUF gives once a layer are `_uniform`'s to check.
    _check_counts({key: config[key] for key in GGUF_COUNTS if isinstance(config.get(key), int | float)})
    try:
        layers, special = GGUF_FAMILIES[architecture](config, factors)
        return _gguf_base(architecture, metadata, config, tensors, layers, special)
    except KeyError as error:
        raise ConfigError(f"GGUF metadata of {architecture} lacks {error}") from error


def _gguf_base(
    architecture: str,
    metadata: Config,
    config: Config,
    tensors: Mapping[str, TensorInfo],
    layers: tuple[LayerConfig, ...],
    special: Mapping[str, Any],
) -> ModelConfig:
    heads, hidden_size = _uniform(config, "attention.head_count"), config["embedding_length"]
    head_dim = config.get("attention.key_length", hidden_size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if config.get(key, head_dim) != head_dim:
            raise ConfigError(f"{architecture}.{key}={config[key]} must equal the head's length, {head_dim}")
    embedding = tensors.get("token_embd.weight")
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    values: dict[str, Any] = dict(
        architecture=architecture,
        vocab_size=embedding.shape[0] if embedding else len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=_uniform(config, "feed_forward_length"),
        num_attention_heads=heads,
        num_key_value_heads=_uniform(config, "attention.head_count_kv", heads),
        head_dim=head_dim,
        layers=layers,
        rms_norm_eps=float(config["attention.layer_norm_rms_epsilon"]),
        max_position_embeddings=config["context_length"],
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(metadata[key] for key in ends if key in metadata)),
    )
    return _checked(ModelConfig(**(values | dict(special))))


def _uniform(config: Config, key: str, default: int | None = None) -> int:
    """A count that GGUF may give once, or once a layer."""
    value = config[key] if default is None else config.get(key, default)
    distinct = {value} if isinstance(value, int) else set(value)
    if len(distinct) != 1:
        raise ConfigError(f"GGUF's {key} differs from layer to layer, {sorted(distinct)}: not supported")
    return int(cast(int, distinct.pop()))


# What GGUF_FAMILIES' functions give: the layers, and what differs from a plain decoder.
GgufParts = tuple[tuple[LayerConfig, ...], Mapping[str, Any]]


def _gguf_layers(
    config: Config, factors: tuple[float, ...], moe: MoeConfig | None = None
) -> tuple[LayerConfig, ...]:
    rope = rope_scaling.from_gguf(config, 10_000.0, factors)
    window = config.get("attention.sliding_window") or None
    return (LayerConfig(rope, window, moe),) * config["block_count"]


def _gguf_moe(config: Config, expert_size: int) -> MoeConfig:
    """llama.cpp scales the chosen experts' probabilities to sum to 1, whatever config.json said."""
    return MoeConfig(
        num_experts=config["expert_count"],
        num_experts_per_tok=config["expert_used_count"],
        moe_intermediate_size=expert_size,
        norm_topk_prob=True,
    )


def _gguf_llama(config: Config, factors: tuple[float, ...]) -> GgufParts:
    """Llama, and Mistral and Mixtral, which GGUF files as llama."""
    moe = _gguf_moe(config, _uniform(config, "feed_forward_length")) if config.get("expert_count") else None
    return _gguf_layers(config, factors, moe), {"interleaved_qk": True}


def _gguf_qwen2(config: Config, factors: tuple[float, ...]) -> GgufParts:
    return _gguf_layers(config, factors), {}


def _gguf_qwen3(config: Config, factors: tuple[float, ...]) -> GgufParts:
    return _gguf_layers(config, factors), {"qk_norm": True}


def _gguf_qwen3_moe(config: Config, factors: tuple[float, ...]) -> GgufParts:
    moe = _gguf_moe(config, config["expert_feed_forward_length"])
    return _gguf_layers(config, factors, moe), {"qk_norm": True}


def _gguf_gemma3(config: Config, factors: tuple[float, ...]) -> GgufParts:
    """1 + w is folded in GGUF already, so `norm_offset` stays False."""
    count, hidden_size = config["block_count"], config["embedding_length"]
    pattern = config.get("attention.sliding_window_pattern", GEMMA3_PATTERN)
    local_theta = float(config.get("rope.freq_base_swa", GEMMA3_LOCAL_THETA))
    ropes = {FULL: rope_scaling.from_gguf(config, 1_000_000.0, factors), SLIDING: RopeConfig(local_theta)}
    kinds = (
        [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
        if isinstance(pattern, int)
        else [SLIDING if slides else FULL for slides in pattern]
    )
    head_dim = config["attention.key_length"]
    if count == GEMMA3_27B_NUM_LAYERS:
        head_dim = hidden_size // _uniform(config, "attention.head_count")
    special = dict(
        hidden_act="gelu_pytorch_tanh",
        query_scale=head_dim**-0.5,
        final_logit_softcapping=config.get("final_logit_softcapping"),
        **_gemma3_shape(hidden_size),
    )
    return _layers(kinds, ropes, config["attention.sliding_window"]), special


GGUF_FAMILIES: Mapping[str, Callable[[Config, tuple[float, ...]], GgufParts]] = {
    "llama": _gguf_llama,
    "qwen2": _gguf_qwen2,
    "qwen3": _gguf_qwen3,
    "qwen3moe": _gguf_qwen3_moe,
    "gemma3": _gguf_gemma3,
}
