"""The tiny mixtures of experts as GGUF files, with llama.cpp's metadata and names: the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.models.families import load_model_config
from jaxinfer.models.weights import load_model
from jaxinfer_checkpoints import open_checkpoint
from tests.gguf_names import gguf_names, stack_experts
from tests.golden.test_families import MODELS, all_logits


def write_gguf(source: Path, path: Path) -> None:
    """What llama.cpp's converter makes of a Hugging Face directory, but for the vocabulary."""
    config = json.loads((source / "config.json").read_text())
    mixtral = config["model_type"] == "mixtral"
    writer = gguf.GGUFWriter(path, "llama" if mixtral else "qwen3moe")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if not mixtral:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    words = {"block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
    tensors = {}
    for name, values in load_file(source / "model.safetensors").items():
        for theirs, ours in words.items():
            name = name.replace(theirs, ours)
        tensors[name] = values
    model = load_model_config(open_checkpoint(source))
    for name, values in gguf_names(model, stack_experts(tensors), permute_qk=mixtral).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_logits_of_a_gguf_equal_transformers(name: str, tmp_path: Path) -> None:
    write_gguf(MODELS / name, tmp_path / "model.gguf")
    reader = open_checkpoint(tmp_path / "model.gguf")
    golden = np.load(MODELS / name / "golden.npz")
    model = load_model(reader, load_model_config(reader), jnp.dtype("float32"))
    logits = np.asarray(all_logits(model, golden["prompt_ids"]))
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)
