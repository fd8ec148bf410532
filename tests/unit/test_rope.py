"""RoPE scaling: each spelling, and the frequencies it means, written out independently."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ConfigError, LayerConfig, ModelConfig, RopeConfig
from jaxinfer.models import rope_scaling
from jaxinfer.models.layers import rope_inv_freq, rope_table
from jaxinfer_kernels import rotate

LLAMA31 = RopeConfig(
    rope_theta=500_000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def test_rotation_keeps_products_of_equal_distance() -> None:
    """What RoPE is for: q.k depends on the difference of the positions alone."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 16, 1)).astype(np.float32)

    def product(i: int, j: int) -> float:
        turned = [
            rotate(jnp.asarray(x), *rope_table(RopeConfig(), 16, jnp.array([p]))) for x, p in ((q, i), (k, j))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(5, 5) == pytest.approx(float((q * k).sum()), abs=1e-5)
    assert abs(product(7, 3) - product(8, 3)) > 1e-2


def test_linear_scaling_is_a_position_divided() -> None:
    scaled = rope_table(RopeConfig(rope_type="linear", factor=4.0), 32, jnp.array([40]))
    plain = rope_table(RopeConfig(), 32, jnp.array([10]))
    np.testing.assert_allclose(scaled, plain, atol=1e-6)


def test_llama3_bands() -> None:
    """Wavelengths under 8192 / 4 stay, over 8192 / 1 are stretched by 8, and those between lie between."""
    plain = rope_inv_freq(RopeConfig(rope_theta=LLAMA31.rope_theta), 128)
    ratio = plain / rope_inv_freq(LLAMA31, 128)
    wavelength = 2 * math.pi / plain

    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 8192], 8.0, rtol=1e-6)
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between) > 0
    assert (np.diff(between) > 0).all()


def test_gguf_factors_equal_llama3() -> None:
    """GGUF's rope_freqs.weight, by llama.cpp's convert_hf_to_gguf.py, means the same frequencies."""
    factors = []
    for freq in 1.0 / LLAMA31.rope_theta ** (np.arange(0, 128, 2) / 128):
        wavelength = 2 * math.pi / freq
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    config = {"rope.freq_base": 500_000.0, "context_length": 131_072}
    rope = rope_scaling.from_gguf(config, 10_000.0, tuple(factors))
    np.testing.assert_allclose(rope_inv_freq(rope, 128), rope_inv_freq(LLAMA31, 128), rtol=1e-6)


def test_yarn_ends_and_attention_factor() -> None:
    """Qwen2.5's YaRN: the fastest dimension stays, the slowest is divided by 4, cos is scaled."""
    params = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = rope_scaling.from_params(params, 1e6, 131_072)
    ratio = rope_inv_freq(RopeConfig(1e6), 128) / rope_inv_freq(rope, 128)

    assert (ratio[0], ratio[-1]) == (1.0, pytest.approx(4.0))
    assert (np.diff(ratio) >= -1e-6).all()
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    cos, _ = rope_table(rope, 128, jnp.array([0]))
    np.testing.assert_allclose(cos, rope.attention_factor, rtol=1e-6)


def test_both_spellings_of_config_json_agree() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
        "original_max_position_embeddings": 8192
    }
    thetas = {"full_attention": 10_000.0}
    old = {"max_position_embeddings": 131_072, "rope_theta": 500_000.0} | {
        "rope_scaling": scaling | {"rope_type": "llama3"}
    }
    new = {"max_position_embeddings": 131_072} | {
        "rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 500_000.0}
    }
    nested = new | {"rope_parameters": {"full_attention": new["rope_parameters"]}}

    for config in (old, new, nested):
        assert rope_scaling.from_config_json(config, thetas) == {"full_attention": LLAMA31}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported: known are default, linear"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "linear"}, "'linear' lacks 'factor'"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5 must be 1 or more"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_scaling.from_params(params, 10_000.0, 4096)


def _model(*windows: int | None) -> ModelConfig:
    layers = tuple(LayerConfig(RopeConfig(1e6), window) for window in windows)
    return ModelConfig("test", 32, 64, 64, 4, 2, 16, layers, 1e-6, 4096, tie_word_embeddings=True)


def test_override_keeps_theta_and_lengthens_the_limit() -> None:
    model = rope_scaling.override(
        _model(None, None), '{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 4096}'
    )
    assert {layer.rope.rope_type for layer in model.layers} == {"yarn"}
    assert {layer.rope.rope_theta for layer in model.layers} == {1e6}
    assert model.max_position_embeddings == 8192


def test_override_leaves_windowed_layers_alone_in_a_mixed_model() -> None:
    text = json.dumps({"rope_type": "linear", "factor": 8.0})
    assert [layer.rope.rope_type for layer in rope_scaling.override(_model(512, None), text).layers] == [
        "default",
        "linear",
    ]
    assert rope_scaling.override(_model(512, 512), text).layers[0].rope.rope_type == "linear"


@pytest.mark.parametrize("text", ["yarn", "[4]", '"yarn"'])
def test_override_must_be_a_json_object(text: str) -> None:
    with pytest.raises(ConfigError, match="rope_scaling="):
        rope_scaling.override(_model(None), text)
