"""config.json and GGUF metadata -> ModelConfig, with the values of published models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxinfer.config import ConfigError, LayerConfig, MoeConfig, RopeConfig
from jaxinfer.models.families import FAMILIES, GGUF_FAMILIES, model_config_from
from jaxinfer_checkpoints import TensorInfo

# Of config.json of mistralai/Mistral-7B-v0.1.
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
# Of config.json of Qwen/Qwen2.5-7B-Instruct.
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
    "generation_config": {"eos_token_id": [151645, 151643]},
}
# Of config.json of google/gemma-3-27b-it: it says this little of its text half.
GEMMA_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
# Of the metadata of gemma-3-27b-it's GGUF files.
GEMMA_27B_GGUF: dict[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 131072,
    "gemma3.embedding_length": 5376,
    "gemma3.block_count": 62,
    "gemma3.feed_forward_length": 21504,
    "gemma3.attention.head_count": 32,
    "gemma3.attention.head_count_kv": 16,
    "gemma3.attention.key_length": 128,
    "gemma3.attention.value_length": 128,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 1024,
    "gemma3.rope.freq_base": 1000000.0,
    "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 8.0,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 106,
}
# Of config.json of mistralai/Mixtral-8x7B-v0.1.
MIXTRAL: dict[str, Any] = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
# Of config.json of Qwen/Qwen3-30B-A3B.
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Of the metadata of Qwen3-30B-A3B's GGUF files.
QWEN3_MOE_GGUF: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.context_length": 40960,
    "qwen3moe.embedding_length": 2048,
    "qwen3moe.block_count": 48,
    "qwen3moe.feed_forward_length": 6144,
    "qwen3moe.attention.head_count": 32,
    "qwen3moe.attention.head_count_kv": 4,
    "qwen3moe.attention.key_length": 128,
    "qwen3moe.attention.value_length": 128,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3moe.expert_count": 128,
    "qwen3moe.expert_used_count": 8,
    "qwen3moe.expert_feed_forward_length": 768,
    "qwen3moe.rope.freq_base": 1000000.0,
    "tokenizer.ggml.bos_token_id": 151643,
    "tokenizer.ggml.eos_token_id": 151645,
}
LLAMA_GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.block_count": 30,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.tokens": ["a"] * 49152,
}


def _tensors(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    """attn_q_bias=... stands for blk.0.attn_q.bias, and other names for those without a block."""
    names = {"token_embd": "token_embd.weight", "output": "output.weight", "attn_q_bias": "blk.0.attn_q.bias"}
    return {names[key]: TensorInfo(names[key], shape, "F32") for key, shape in shapes.items()}


def test_mistral_slides_everywhere_and_newer_ones_nowhere() -> None:
    model = model_config_from(MISTRAL, "safetensors")
    assert {layer.sliding_window for layer in model.layers} == {4096}
    assert (model.head_dim, model.num_hidden_layers, model.attention_bias) == (128, 32, False)

    newer = model_config_from(MISTRAL | {"sliding_window": None, "head_dim": 160}, "safetensors")
    assert {layer.sliding_window for layer in newer.layers} == {None}
    assert newer.head_dim == 160


def test_qwen2_window_counts_only_if_used_and_after_max_window_layers() -> None:
    model = model_config_from(QWEN2, "safetensors")
    assert {layer.sliding_window for layer in model.layers} == {None}
    assert (model.attention_bias, model.attention_out_bias) == (True, False)
    assert model.eos_token_ids == (151645, 151643)

    used = model_config_from(QWEN2 | {"use_sliding_window": True, "max_window_layers": 21}, "safetensors")
    assert [layer.sliding_window for layer in used.layers] == [None] * 21 + [131072] * 7


def test_yarn_in_config_json_lengthens_the_limit() -> None:
    """As Qwen's model cards tell to add it; max_position_embeddings stays in the file as it was."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    assert (
        model_config_from(QWEN2 | {"rope_scaling": scaling}, "safetensors").max_position_embeddings == 131072
    )


def test_rope_scaling_override_replaces_the_files() -> None:
    text = '{"rope_type": "linear", "factor": 2.0}'
    model = model_config_from(QWEN2, "safetensors", rope_scaling_override=text)
    assert {layer.rope for layer in model.layers} == {RopeConfig(1e6, "linear", 2.0)}


def test_gemma3_27b_is_the_same_from_config_json_and_gguf() -> None:
    """Whole configs equal, except for what the formats store differently."""
    ours = model_config_from(GEMMA_27B, "safetensors")
    theirs = model_config_from(GEMMA_27B_GGUF, "gguf", tensors=_tensors(token_embd=(262_208, 5376)))

    differing = {name for name in ours.__dataclass_fields__ if getattr(ours, name) != getattr(theirs, name)}
    assert differing == {"architecture", "norm_offset"}
    assert ours.query_scale == pytest.approx(168**-0.5)
    assert ours.embedding_scale == pytest.approx(5376**0.5)
    assert set(theirs.eos_token_ids) == set(ours.eos_token_ids) == {1, 106}
    assert [i for i, layer in enumerate(ours.layers) if layer.sliding_window is None] == list(range(5, 62, 6))
    assert ours.layers[5].rope == RopeConfig(1e6, "linear", 8.0)
    assert ours.layers[0].rope == RopeConfig(1e4)
    assert ours.layers[0].sliding_window == 1024


def test_gemma3_layer_types_beat_the_pattern() -> None:
    text = GEMMA_27B["text_config"] | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "architectures": ["Gemma3ForCausalLM"],
    }
    model = model_config_from(text, "safetensors")
    assert [layer.sliding_window for layer in model.layers] == [None, 1024, None]
    with pytest.raises(ConfigError, match="layer_types has chunked_attention"):
        model_config_from(text | {"layer_types": ["chunked_attention"] * 3}, "safetensors")


def test_mixtral_is_mistral_with_experts() -> None:
    model = model_config_from(MIXTRAL, "safetensors")
    assert set(model.layers) == {LayerConfig(RopeConfig(1e6), None, MoeConfig(8, 2, 14336, True))}
    without_theta = {key: value for key, value in MIXTRAL.items() if key != "rope_theta"}
    assert model_config_from(without_theta, "safetensors") == model

    metadata = LLAMA_GGUF | {"llama.expert_count": 8, "llama.expert_used_count": 2}
    gguf = model_config_from(metadata, "gguf", tensors=_tensors(token_embd=(49152, 576)))
    assert {layer.moe for layer in gguf.layers} == {MoeConfig(8, 2, 1536, True)}
    assert gguf.interleaved_qk


def test_qwen3_moe_is_the_same_from_config_json_and_gguf() -> None:
    ours = model_config_from(QWEN3_MOE, "safetensors")
    tensors = _tensors(token_embd=(151_936, 2048), output=(151_936, 2048))
    theirs = model_config_from(QWEN3_MOE_GGUF, "gguf", tensors=tensors)
    assert dataclasses.replace(theirs, architecture=ours.architecture) == ours
    assert set(ours.layers) == {LayerConfig(RopeConfig(1e6), None, MoeConfig(128, 8, 768, True))}
    assert ours.qk_norm
    renamed = {"num_local_experts" if key == "num_experts" else key: v for key, v in QWEN3_MOE.items()}
    assert model_config_from(renamed, "safetensors") == ours


def test_qwen3_moe_says_which_layers_are_dense() -> None:
    """transformers' Qwen3MoeDecoderLayer: not in mlp_only_layers and (i + 1) % decoder_sparse_step == 0."""
    change = {"num_hidden_layers": 9, "decoder_sparse_step": 3, "mlp_only_layers": [5]}
    model = model_config_from(QWEN3_MOE | change, "safetensors")
    assert [i for i, layer in enumerate(model.layers) if layer.moe] == [2, 8]


def test_gguf_leaves_head_biases_and_vocabulary_to_the_tensors() -> None:
    tied = model_config_from(LLAMA_GGUF, "gguf", tensors=_tensors(token_embd=(49152, 576)))
    assert (tied.tie_word_embeddings, tied.attention_bias, tied.head_dim) == (True, False, 64)
    assert tied.interleaved_qk

    other = model_config_from(
        LLAMA_GGUF, "gguf", tensors=_tensors(token_embd=(50000, 576), output=(50000, 576), attn_q_bias=(576,))
    )
    assert (other.tie_word_embeddings, other.attention_bias, other.vocab_size) == (False, True, 50000)


def test_unknown_architecture_is_refused_by_name_with_those_known() -> None:
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM") as error:
        model_config_from({"architectures": ["GPTNeoXForCausalLM"]}, "safetensors")
    assert all(name in str(error.value) for name in (*FAMILIES, *GGUF_FAMILIES))

    with pytest.raises(ConfigError, match="'mamba'") as error:
        model_config_from({"general.architecture": "mamba"}, "gguf")
    assert all(name in str(error.value) for name in (*FAMILIES, *GGUF_FAMILIES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config of method 'gptq'"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        (MIXTRAL | {"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be from 1 to 8"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su' is not supported"),
    ],
)
def test_unsupported_options_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config_from(MISTRAL | change, "safetensors")


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [0, -8, 4096.5, "big", None])
def test_sizes_that_are_no_counts_are_refused_by_name(name: str, value: Any) -> None:
    for config in (MISTRAL, MISTRAL | {"architectures": ["Qwen3ForCausalLM"]}):
        with pytest.raises(ConfigError, match=f"{name}={value!r} must be a whole number, 1 or more"):
            model_config_from(config | {name: value}, "safetensors")
    multimodal = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": MISTRAL | {name: value},
    }
    with pytest.raises(ConfigError, match=f"{name}={value!r} must"):
        model_config_from(multimodal, "safetensors")


def test_optional_sizes_are_counts_or_null() -> None:
    assert model_config_from(MISTRAL | {"num_key_value_heads": None}, "safetensors").num_key_value_heads
    with pytest.raises(ConfigError, match="num_key_value_heads=-8 must be a whole number, 1 or more"):
        model_config_from(MISTRAL | {"num_key_value_heads": -8}, "safetensors")


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"config\.json of MistralForCausalLM lacks 'vocab_size'"):
        model_config_from({k: v for k, v in MISTRAL.items() if k != "vocab_size"}, "safetensors")
    with pytest.raises(ConfigError, match="GGUF metadata of llama lacks 'context_length'"):
        model_config_from({k: v for k, v in LLAMA_GGUF.items() if k != "llama.context_length"}, "gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "num_experts_per_tok=9"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count=32"),
        ({"llama.attention.head_count_kv": [3, 1]}, "differs from layer to layer"),
        ({"llama.block_count": 0}, "block_count=0 must be a whole number"),
        ({"llama.attention.head_count": 0}, "attention.head_count=0 must be a whole number"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
    ],
)
def test_unsupported_gguf_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config_from(LLAMA_GGUF | change, "gguf")
