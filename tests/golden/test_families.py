"""Each family's decoder against transformers' own output (models/*, made by scripts/make_golden.py)."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.families import FAMILIES, load_model_config
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weights import load_model
from jaxinfer_checkpoints import open_checkpoint

MODELS = Path(__file__).parent / "models"
NAMES = sorted(path.name for path in MODELS.iterdir())


def dense_attention(q, k, v, kv_pages, metadata, *, scale, sliding_window, soft_cap):
    """Causal attention of one whole sequence, the plainest way; no cache."""
    del metadata
    groups = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
    scores = jnp.einsum("tnh,snh->nts", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    distance = jnp.arange(q.shape[0])[:, None] - jnp.arange(k.shape[0])[None, :]
    seen = distance >= 0
    if sliding_window is not None:
        seen &= distance < sliding_window
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("nts,snh->tnh", weights, v), kv_pages


@jax.jit
def all_logits(model: Transformer, token_ids: jax.Array) -> jax.Array:
    """[T] -> [T, V]."""
    pages = (None,) * model.config.num_hidden_layers
    hidden, _ = model(token_ids, jnp.arange(token_ids.shape[0]), pages, None, dense_attention)
    return model.logits(hidden)


def greedy(model: Transformer, prompt: np.ndarray, count: int) -> list[int]:
    """The whole text computed again for each token; padding after it is never seen."""
    ids = np.zeros(len(prompt) + count, prompt.dtype)
    ids[: len(prompt)] = prompt
    for end in range(len(prompt), len(ids)):
        ids[end] = int(all_logits(model, ids)[end - 1].argmax())
    return ids[len(prompt) :].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_ids_equal_transformers(name: str) -> None:
    reader = open_checkpoint(MODELS / name)
    golden = np.load(MODELS / name / "golden.npz")
    model = load_model(reader, load_model_config(reader), jnp.dtype("float32"))

    num_prompt, count = len(golden["prompt_ids"]), len(golden["greedy_ids"])
    padded = np.pad(golden["prompt_ids"], (0, count))  # the shape of `greedy`: one program serves both

    logits = np.asarray(all_logits(model, padded))[:num_prompt]

    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)
    assert greedy(model, golden["prompt_ids"], count) == golden["greedy_ids"].tolist()


def test_every_family_has_a_golden() -> None:
    """Gemma3ForConditionalGeneration is Gemma3ForCausalLM under a prefix; test_weights covers that."""
    covered = {open_checkpoint(MODELS / name).config["architectures"][0] for name in NAMES}
    assert covered == set(FAMILIES) - {"Gemma3ForConditionalGeneration"}


@pytest.mark.parametrize("name", ["mistral", "qwen2_window", "gemma3"])
def test_goldens_notice_the_window(name: str) -> None:
    """The prompt is longer than the window, so a decoder that ignored it would differ."""
    reader = open_checkpoint(MODELS / name)
    config = load_model_config(reader)
    windows = {layer.sliding_window for layer in config.layers} - {None}
    golden = np.load(MODELS / name / "golden.npz")

    assert windows
    assert max(w for w in windows if w) < len(golden["prompt_ids"])


def test_layers_of_equal_config_are_traced_once() -> None:
    """Seven layers of Gemma: one trace for the sliding ones, one for the full one."""
    traces = []

    def counting(q, k, v, kv_pages, metadata, *, scale, sliding_window, soft_cap):
        traces.append(sliding_window)
        return dense_attention(
            q, k, v, kv_pages, metadata, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
        )

    reader = open_checkpoint(MODELS / "gemma3")
    config = load_model_config(reader)
    model = load_model(reader, config, jnp.dtype("float32"))
    pages = (None,) * config.num_hidden_layers
    jax.jit(lambda ids: model(ids, jnp.arange(8), pages, None, counting)).lower(jnp.zeros(8, jnp.int32))

    assert sorted(traces, key=str) == [12, None]
