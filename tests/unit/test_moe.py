"""The router and the experts against a loop over tokens in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.config import LayerConfig, MeshConfig, ModelConfig, MoeConfig, RopeConfig
from jaxinfer.models.moe import SparseMoe, route
from jaxinfer.parallel.layout import partitioned
from jaxinfer.parallel.mesh import make_mesh, over_groups, parameter_sharding, row_sharding

D = 24


def make(moe: MoeConfig) -> SparseMoe:
    config = ModelConfig(
        architecture="test",
        vocab_size=20,
        hidden_size=D,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layers=(LayerConfig(RopeConfig(), moe=moe),),
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = SparseMoe(config, moe, jnp.float32)
    rng = np.random.default_rng(0)
    for _, param in nnx.to_flat_state(nnx.state(model)):
        param.set_value(jnp.asarray(rng.normal(size=param.get_value().shape), jnp.float32))
    return model


def whole(model: SparseMoe, x: jax.Array) -> jax.Array:
    """Of tokens alone, no padding."""
    return model(x, jnp.ones(x.shape[1], bool))


def by_hand(model: SparseMoe, x: np.ndarray) -> np.ndarray:
    """A token after the other, an expert after the other."""
    router, gate_up, down = (
        np.asarray(param[...], np.float64)
        for param in (model.gate.weight, model.experts.gate_up_proj, model.experts.down_proj)
    )
    out = np.zeros_like(x, np.float64)
    for t in range(x.shape[1]):
        scores = router @ x[:, t]
        probabilities = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        chosen = np.argsort(-probabilities)[: model.moe.num_experts_per_tok]
        total = probabilities[chosen].sum() if model.moe.norm_topk_prob else 1.0
        for expert in chosen:
            gate, up = np.split(gate_up[expert] @ x[:, t], 2)
            out[:, t] += probabilities[expert] / total * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize(
    "moe",
    [
        MoeConfig(8, 2, 16, True),
        MoeConfig(5, 3, 7, False),
        MoeConfig(1, 1, 8, True),
        MoeConfig(64, 8, 4, True),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 3, 33])
def test_equals_a_loop_over_tokens(moe: MoeConfig, num_tokens: int) -> None:
    model = make(moe)
    x = np.random.default_rng(num_tokens).normal(size=(D, num_tokens)).astype(np.float32)
    out = jax.jit(whole)(model, x)
    want = by_hand(model, x)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_route_by_hand() -> None:
    """Scores ln 1, ln 2, ln 3, ln 4 for the one, reversed for the other: probabilities of 0.1 to 0.4."""
    scores = np.log(np.array([[1, 4], [2, 3], [3, 2], [4, 1]], np.float32))
    ids, weights = route(jnp.eye(2), jnp.asarray(scores), MoeConfig(4, 2, 1, False))
    np.testing.assert_array_equal(ids, [[3, 2], [0, 1]])
    np.testing.assert_allclose(weights, [[0.4, 0.3], [0.4, 0.3]], rtol=1e-6)
    _, weights = route(jnp.eye(2), jnp.asarray(scores), MoeConfig(4, 2, 1, True))
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7], [4 / 7, 3 / 7]], rtol=1e-6)


@pytest.mark.parametrize("num_tokens", [4, 32, 96])
def test_a_token_gets_the_same_whatever_is_beside_it(num_tokens: int) -> None:
    """Bit for bit: other neighbours, which fill other groups; another place; neighbours of NaN."""
    model = make(MoeConfig(8, 2, 16, True))
    run = jax.jit(whole)
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(D, 2)).astype(np.float32)
    outs = []
    for trial in range(8):
        x = rng.normal(size=(D, num_tokens)).astype(np.float32)
        if trial == 6:
            x[:] = np.nan
        if trial == 7:
            x[:] = tokens[:, :1]  # all to the same experts
        places = rng.choice(num_tokens, 2, replace=False)
        x[:, places] = tokens
        outs.append(np.asarray(run(model, x))[:, places])
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])
    assert np.isfinite(outs[0]).all()


@pytest.mark.parametrize("moe", [MoeConfig(8, 2, 16, True), MoeConfig(6, 3, 16, True)])
@pytest.mark.parametrize("mesh_shape", [(1, 2), (1, 4), (2, 2)])
def test_a_mesh_gives_the_same(moe: MoeConfig, mesh_shape: tuple[int, int]) -> None:
    """Whole experts on each device, or (6 experts over 4) a part of each."""
    model, shape = make(moe), MeshConfig(*mesh_shape)
    mesh = make_mesh(shape, jax.devices())
    assert mesh is not None
    laid_out = partitioned(model.config, shape.tensor)
    on_mesh = SparseMoe(laid_out, laid_out.layers[0].moe or moe, jnp.float32)
    values = {
        "gate.weight": np.asarray(model.gate.weight[...]),
        "experts.gate_up_proj": np.asarray(model.experts.gate_up_proj[...]),
        "experts.down_proj": np.asarray(model.experts.down_proj[...]),
    }
    if laid_out.layers[0].moe == moe:  # rows in blocks of (gate_t, up_t)
        halves = np.split(values["experts.gate_up_proj"], 2, axis=1)
        parts = zip(*(np.split(half, shape.tensor, axis=1) for half in halves), strict=True)
        values["experts.gate_up_proj"] = np.concatenate(
            [np.concatenate(pair, axis=1) for pair in parts], axis=1
        )
    for path, param in nnx.to_flat_state(nnx.state(on_mesh)):
        name = ".".join(map(str, path))
        place = parameter_sharding(mesh, f"model.layers.0.mlp.{name}", laid_out)
        param.set_value(jax.device_put(values[name], place))
    x = (
        np.random.default_rng(1).normal(size=(shape.data * D, 5)).astype(np.float32)
    )  # a group's above another's
    run = jax.jit(over_groups(whole, mesh, num_shared=1))
    out = np.split(np.asarray(run(on_mesh, jax.device_put(x, row_sharding(mesh)))), shape.data)
    for own, group in zip(np.split(x, shape.data), out, strict=True):
        want = by_hand(model, own)
        np.testing.assert_allclose(group, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_no_expert_is_read_for_padding() -> None:
    """Experts that only padding would choose may be NaN: what is multiplied by 0 would not be 0 then."""
    model = make(MoeConfig(8, 2, 16, True))
    x = np.random.default_rng(2).normal(size=(D, 6)).astype(np.float32)
    is_token = np.array([True, False, False, False, False, False])
    want = by_hand(model, x[:, :1])
    chosen, _ = route(jnp.asarray(x[:, :1]), model.gate.weight[...], model.moe)
    for param in (model.experts.gate_up_proj, model.experts.down_proj):
        others = np.setdiff1d(np.arange(8), np.asarray(chosen))
        param.set_value(param[...].at[others].set(jnp.nan))
    out = np.asarray(jax.jit(lambda model, x, is_token: model(x, is_token))(model, x, is_token))
    np.testing.assert_allclose(out[:, :1], want, rtol=0, atol=2e-5 * np.abs(want).max())
    np.testing.assert_array_equal(out[:, 1:], 0)
