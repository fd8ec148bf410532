"""The one decoder. `ModelConfig` alone decides what it computes; it holds no family's name.

Activations are feature-major, [D, T], products are weight @ x, and q, k and v are one product, as are
gate and up: XLA's CPU products of few tokens are faster so. On two cores the demo's 30 layers of
them took 33 ms instead of 51 at T=4, 72 instead of 79 at T=32, and 88 instead of 109 at T=64.

Dims: T tokens of this step, R rows that need logits, N query heads, K key/value heads, H head_dim,
D hidden, F ffn, V vocab. Parameter paths mirror Hugging Face's, but for the fused ones.

A pipeline stage is a decoder too, of a part of the layers: it takes and gives hidden states where the
whole takes tokens and gives the final norm's.

On a mesh the weights' shardings and four `constrain`s a layer make it tensor parallel: the devices
divide the heads and the ffn, and each of the two products that bring them together ends in an all-reduce.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.models.layers import (
    Embedding,
    Linear,
    RMSNorm,
    rope_table,
    soft_cap,
    unfuse,
)
from jaxinfer.models.moe import SparseMoe
from jaxinfer.parallel.mesh import TENSOR, constrain
from jaxinfer_kernels import ACTIVATIONS, gated_linear, linear, rotate, rotate_qkv

# One layer's part of the KV cache: whatever the attention function takes and gives back.
KVPages = Any


class AttentionFn(Protocol):
    """Writes k and v where `metadata` says and attends. Hashable; the same object for every layer."""

    def __call__(
        self,
        q: jax.Array,  # [T, N, H]
        k: jax.Array,  # [T, K, H]
        v: jax.Array,  # [T, K, H]
        kv_pages: KVPages,
        metadata: Any,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> tuple[jax.Array, KVPages]: ...


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding, and norms on q and k where the model has them."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.config = config
        q_dim = config.num_attention_heads * config.head_dim
        kv_dim = config.num_key_value_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size, q_dim + 2 * kv_dim, dtype, config.attention_bias, config.matmul
        )
        self.o_proj = Linear(q_dim, config.hidden_size, dtype, config.attention_out_bias, config.matmul)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, axis=1) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, axis=1) if config.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv_pages: KVPages,
        metadata: Any,
        layer: LayerConfig,
        attend: AttentionFn,
    ) -> tuple[jax.Array, KVPages]:
        """x [D, T] -> [D, T], and the layer's pages with this step's k and v written."""
        config, num_tokens = self.config, x.shape[1]
        heads = self.qkv_proj(x).reshape(-1, config.head_dim, num_tokens)
        if self.q_norm is None and config.tensor_parallel == 1:
            qkv = rotate_qkv(heads, *rope, num_kv_heads=config.num_key_value_heads, backend=config.matmul)
        else:
            qkv = self._rotated(heads, rope)
        q, k, v = (part.transpose(2, 0, 1) for part in qkv)
        out, kv_pages = attend(
            q,
            k,
            v,
            kv_pages,
            metadata,
            scale=config.attention_scale,
            sliding_window=layer.sliding_window,
            soft_cap=config.attn_logit_softcapping,
        )
        # Without the barrier XLA folds the transpose into the product, which is then the slower form.
        out = lax.optimization_barrier(out.transpose(1, 2, 0).reshape(-1, num_tokens).astype(x.dtype))
        return constrain(self.o_proj(constrain(out, TENSOR))), kv_pages

    def _rotated(
        self, heads: jax.Array, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [N, H, T], k and v [K, H, T] of the fused product's heads."""
        config = self.config
        sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        q, k, v = unfuse(heads, sizes, config.tensor_parallel)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rope), rotate(k, *rope), v


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.config = config
        self.gate_up_proj = Linear(
            config.hidden_size, 2 * config.intermediate_size, dtype, config.mlp_bias, config.matmul
        )
        self.down_proj = Linear(
            config.intermediate_size, config.hidden_size, dtype, config.mlp_bias, config.matmul
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[D, T] -> [D, T]."""
        config = self.config
        if config.matmul == "cpu" and self.gate_up_proj.bias is None:
            weight = self.gate_up_proj.weight[...]
            return self.down_proj(gated_linear(weight, x, activation=config.hidden_act, backend="cpu"))
        sizes = (config.intermediate_size,) * 2
        gate, up = unfuse(self.gate_up_proj(x), sizes, config.tensor_parallel)
        return constrain(self.down_proj(constrain(ACTIVATIONS[config.hidden_act](gate) * up, TENSOR)))


class DecoderLayer(nnx.Module):
    """Attention and MLP, each with a norm before it, and with sandwich norms one after it too.

    In place of the MLP there may be a mixture of experts. The names are Hugging Face's:
    `post_attention_layernorm` stands before the MLP, except with sandwich norms, where it stands
    after the attention.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DTypeLike) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, backend=config.matmul)

        self.sandwich_norms = config.sandwich_norms
        self.self_attn = Attention(config, dtype)
        if layer.moe is None:
            self.mlp = MLP(config, dtype)
        else:
            self.mlp = SparseMoe(config, layer.moe, dtype)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()

    def __call__(
        self,
        x: jax.Array,
        delta: jax.Array,
        is_token: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv_pages: KVPages,
        metadata: Any,
        layer: LayerConfig,
        attend: AttentionFn,
    ) -> tuple[jax.Array, jax.Array, KVPages]:
        """The layer's pages with this step's k and v written, and x and delta [D, T] for the next layer.

        x + delta is the residual stream: each norm adds what the half before it computed, in one pass.
        `is_token` [T] is False for padding, for which no experts are read.
        """
        x, normed = self.input_layernorm.add(x, delta)
        delta, kv_pages = self.self_attn(normed, rope, kv_pages, metadata, layer, attend)
        if self.sandwich_norms:
            x, normed = self.pre_feedforward_layernorm.add(x, self.post_attention_layernorm(delta))
            delta = self.post_feedforward_layernorm(self._feed_forward(normed, is_token))
        else:
            x, normed = self.post_attention_layernorm.add(x, delta)
            delta = self._feed_forward(normed, is_token)
        return x, delta, kv_pages

    def _feed_forward(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        return self.mlp(x, is_token) if isinstance(self.mlp, SparseMoe) else self.mlp(x)


@partial(jax.jit, static_argnames=("layer", "attend"))
def _run_layer(
    module: DecoderLayer,
    x: jax.Array,
    delta: jax.Array,
    is_token: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    kv_pages: KVPages,
    metadata: Any,
    *,
    layer: LayerConfig,
    attend: AttentionFn,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """Jitted so that layers of equal config are traced and lowered once; XLA inlines the calls."""
    return module(x, delta, is_token, rope, kv_pages, metadata, layer, attend)


class Backbone(nnx.Module):
    """Embeddings, layers and the final norm, as far as a stage has them; `model.` in Hugging Face's names."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        if config.has_embedding:
            self.embed_tokens = Embedding(config.padded_vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List([DecoderLayer(config, layer, dtype) for layer in config.layers])
        if config.stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend=config.matmul)


class Transformer(nnx.Module):
    """A decoder-only language model, or a pipeline stage of one.

    A fresh one has zeros for weights: make it under `nnx.eval_shape`, and fill it with
    `weights.load_stages` or `weights.random_stages`. It is a pytree; `jax.tree.flatten` it once, and
    pass the leaves to jitted steps, since flattening it takes longer than a small step.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.model = Backbone(config, dtype)
        if config.stage.is_last and not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.padded_vocab_size, dtype)

    def __call__(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        kv_pages: tuple[KVPages, ...],
        metadata: Any,
        attend: AttentionFn,
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """The hidden state of each token, after the final norm.

        Args:
          inputs: token ids, int32 [T], of any number of sequences; a stage that is not the first takes what
            the one before it gives.
          positions: int32 [T], each token's place in its sequence, from 0; -1 for padding.
          kv_pages: one entry a layer, handed to `attend`.
          metadata: handed to `attend`; a pytree.
          attend: writes k and v, and attends.

        Returns:
          hidden [T, D] in the weights' dtype, and the kv_pages after the writes. A stage that is not the
          last gives hidden [D, T], without the norm.
        """
        config = self.config
        x = self._embed(inputs) if config.stage.is_first else inputs
        delta = 0 * x  # of x's mesh, as no plain zeros are: the first layer is traced with the others
        distinct = dict.fromkeys(layer.rope for layer in config.layers)
        # XLA would compute sines and cosines anew in each layer, for each head.
        ropes = {
            rope: lax.optimization_barrier(rope_table(rope, config.head_dim, positions)) for rope in distinct
        }
        pages: list[KVPages] = []
        for module, layer, layer_pages in zip(self.model.layers, config.layers, kv_pages, strict=True):
            x, delta, layer_pages = _run_layer(
                module,
                x,
                delta,
                positions >= 0,
                ropes[layer.rope],
                layer_pages,
                metadata,
                layer=layer,
                attend=attend,
            )
            pages.append(layer_pages)
        hidden = self.model.norm.add(x, delta)[1].T if config.stage.is_last else x + delta
        return hidden, tuple(pages)

    def _embed(self, token_ids: jax.Array) -> jax.Array:
        """[T] -> [D, T]."""
        x = constrain(self.model.embed_tokens(token_ids).T)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    @property
    def head_weight(self) -> jax.Array:
        """[V, D], which makes logits of hidden states: all that sampling needs of the model."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return head.weight.get_value()  # abstract models have one too

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> float32 logits [R, V]."""
        return head_logits(self.config, self.head_weight, hidden)


def head_logits(
    config: ModelConfig, head_weight: jax.Array, hidden: jax.Array, rows_axis: str | None = None
) -> jax.Array:
    """hidden [R, D] -> float32 logits [R, V], soft-capped where the model says so.

    On a mesh every device gets those of all rows, or of its part of the rows along an axis.
    """
    scores = linear(head_weight, hidden.T, token_major=True, backend=config.matmul)
    scores = constrain(scores, None, TENSOR)  # as the weight lies: else the compiler may gather that instead
    scores = constrain(scores, rows_axis)[:, : config.vocab_size]
    return soft_cap(scores, config.final_logit_softcapping)
