"""A mixture of experts in place of an MLP: a router chooses a few experts a token (Shazeer et al. 2017,
arXiv 1701.06538).

The rows that go to an expert are brought together, so that each expert that any token chose is read
once, and the others not at all. What a token gets depends on its own column alone: the experts'
outputs are summed in the order of its own ranking, and a NaN in a padded column stays there.

On a mesh every device routes all tokens, and computes what its own experts (or its part of each one's
feed-forward) add to them; one all-reduce adds that up, as after a dense MLP.

Dims: T tokens, D hidden, E experts, X experts a token, F an expert's ffn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxinfer.config import ModelConfig, MoeConfig
from jaxinfer.models.layers import Linear
from jaxinfer.parallel.mesh import TENSOR
from jaxinfer_kernels import ACTIVATIONS, Activation, grouped_matmul


def route(x: jax.Array, weight: jax.Array, moe: MoeConfig) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and what their outputs are multiplied by.

    In float32 throughout: two experts may be nearly alike to the router, and a rounded score would
    choose the other one.

    Args:
      x: [D, T].
      weight: float32 [E, D].
      moe: how many to choose, and whether to normalise.

    Returns:
      expert_ids int32 [T, X], the likeliest first, and weights float32 [T, X].
    """
    scores = lax.dot_general(
        weight, x.astype(jnp.float32), (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    weights, expert_ids = lax.top_k(jax.nn.softmax(scores.T, axis=-1), moe.num_experts_per_tok)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return expert_ids, weights


def apply_experts(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    hidden_act: Activation,
    first_expert: int | jax.Array = 0,
) -> jax.Array:
    """What some experts add to each token: the sum of weight * down(act(gate(x)) * up(x)).

    Args:
      x: [D, T].
      expert_ids: [T, X].
      weights: [T, X].
      gate_up: [experts, 2F, D], each one's gate above its up.
      down: [experts, D, F].
      hidden_act: the gate's non-linearity.
      first_expert: the id of gate_up's first; those below it and after its last add nothing.

    Returns:
      float32 [D, T].
    """
    num_tokens, num_chosen = expert_ids.shape
    num_experts = gate_up.shape[0]
    own = expert_ids.reshape(-1) - first_expert
    own = jnp.where((own < 0) | (own >= num_experts), num_experts, own)
    # Rows by expert, and by token within one; those of other devices' experts come last.
    order = jnp.argsort(own, stable=True)
    group_sizes = jnp.bincount(own, length=num_experts)
    rows = x.T[order // num_chosen]  # [T * X, D]
    gate, up = jnp.split(grouped_matmul(rows, gate_up, group_sizes), 2, axis=1)
    out = grouped_matmul(ACTIVATIONS[hidden_act](gate) * up, down, group_sizes)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
    by_token = out[place].reshape(num_tokens, num_chosen, -1).astype(jnp.float32)
    return (by_token * weights[..., None]).sum(axis=1).T


class Experts(nnx.Module):
    """The weights of all experts, as `apply_experts` takes them."""

    def __init__(self, hidden_size: int, moe: MoeConfig, dtype: DTypeLike) -> None:
        num, ffn = moe.num_experts, moe.moe_intermediate_size
        self.gate_up_proj = nnx.Param(jnp.zeros((num, 2 * ffn, hidden_size), dtype))
        self.down_proj = nnx.Param(jnp.zeros((num, hidden_size, ffn), dtype))


class SparseMoe(nnx.Module):
    """The router and the experts."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, dtype: DTypeLike) -> None:
        self.config = config
        self.moe = moe
        self.gate = Linear(config.hidden_size, moe.num_experts, jnp.float32)
        self.experts = Experts(config.hidden_size, moe, dtype)

    def __call__(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        """[D, T] -> [D, T]; 0 where `is_token` [T] is False, for which no expert is read."""
        gate_up, down = self.experts.gate_up_proj[...], self.experts.down_proj[...]
        expert_ids, weights = route(x, self.gate.weight[...], self.moe)
        expert_ids = jnp.where(is_token[:, None], expert_ids, self.moe.num_experts)
        args = (x, expert_ids, weights, gate_up, down)
        if jax.sharding.get_abstract_mesh().empty:
            return apply_experts(*args, self.config.hidden_act).astype(x.dtype)
        return self._over_devices(*args).astype(x.dtype)

    def _over_devices(self, *args: jax.Array) -> jax.Array:
        """`apply_experts` by each device of a group with what it has of them, added up."""
        whole_experts = self.moe.expert_parallel > 1

        def part(
            x: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
        ) -> jax.Array:
            first = lax.axis_index(TENSOR) * gate_up.shape[0] if whole_experts else 0
            out = apply_experts(x, ids, weights, gate_up, down, self.config.hidden_act, first)
            return lax.psum(out, TENSOR)

        everywhere = PartitionSpec()
        divided = [PartitionSpec(*(None,) * axis, TENSOR) for axis in ((0, 0) if whole_experts else (1, 2))]
        return jax.shard_map(
            part,
            in_specs=(everywhere, everywhere, everywhere, *divided),
            out_specs=everywhere,
            axis_names={TENSOR},
            check_vma=False,
        )(*args)
