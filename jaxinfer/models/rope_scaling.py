"""RoPE scaling, in the spellings of config.json, of --rope_scaling and of GGUF -> RopeConfig."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.config import ConfigError, ModelConfig, RopeConfig

Params = Mapping[str, Any]


def from_config_json(
    config: Params, thetas: Mapping[str, float], scaled: tuple[str, ...] | None = None
) -> dict[str, RopeConfig]:
    """layer type -> RopeConfig.

    Reads `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`, which may hold one
    dict a layer type.

    Args:
      config: config.json.
      thetas: each layer type's theta where config.json gives none.
      scaled: the layer types that a flat spelling is about; None is all of them.
    """
    flat_types = tuple(thetas) if scaled is None else scaled
    params = config.get("rope_parameters") or {}
    flat = {key: value for key, value in params.items() if key not in thetas}
    flat |= config.get("rope_scaling") or {}
    if "rope_theta" in config:
        flat.setdefault("rope_theta", config["rope_theta"])
    if config.get("partial_rotary_factor") is not None:
        flat.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    max_length = config["max_position_embeddings"]
    return {
        kind: from_params((flat if kind in flat_types else {}) | (params.get(kind) or {}), theta, max_length)
        for kind, theta in thetas.items()
    }


def from_params(params: Params, theta: float, max_length: int) -> RopeConfig:
    """One dict of config.json's `rope_scaling` or `rope_parameters`.

    Args:
      params: the dict.
      theta: where the dict gives none.
      max_length: the original length, where the dict gives none.

    Raises:
      ConfigError: for an unknown type, a missing key, a value that is no number or a factor under 1.
    """
    kind = str(params.get("rope_type") or params.get("type") or "default")
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise ConfigError(f"RoPE scaling of type {kind!r} is not supported: known are {known}")
    partial = params.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor={partial} is not supported: only 1 is")
    try:
        rope = RopeConfig(rope_theta=float(params.get("rope_theta") or theta))
        rope = ROPE_TYPES[kind](rope, params, max_length)
    except KeyError as error:
        raise ConfigError(f"RoPE scaling of type {kind!r} lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"RoPE scaling of type {kind!r} has a value that is out of place: {error}"
        ) from error
    if not rope.factor >= 1.0:
        raise ConfigError(f"RoPE scaling's factor={rope.factor} must be 1 or more")
    return rope


def _default(rope: RopeConfig, params: Params, max_length: int) -> RopeConfig:
    del params, max_length
    return rope


def _linear(rope: RopeConfig, params: Params, max_length: int) -> RopeConfig:
    del max_length
    return dataclasses.replace(rope, rope_type="linear", factor=float(params["factor"]))


def _llama3(rope: RopeConfig, params: Params, max_length: int) -> RopeConfig:
    return dataclasses.replace(
        rope,
        rope_type="llama3",
        factor=float(params["factor"]),
        low_freq_factor=float(params["low_freq_factor"]),
        high_freq_factor=float(params["high_freq_factor"]),
        original_max_position_embeddings=int(params.get("original_max_position_embeddings") or max_length),
    )


def _yarn(rope: RopeConfig, params: Params, max_length: int) -> RopeConfig:
    original = int(params.get("original_max_position_embeddings") or max_length)
    factor = float(params["factor"] if params.get("factor") is not None else max_length / original)
    return dataclasses.replace(
        rope,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(params, factor),
        truncate=bool(params.get("truncate", True)),
    )


def _yarn_attention_factor(params: Params, factor: float) -> float:
    """What multiplies cos and sin: 0.1 ln(factor) + 1, or DeepSeek's ratio of two of those."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(float(params["mscale"])) / mscale(float(params["mscale_all_dim"]))
    return mscale(1.0)


ROPE_TYPES: Mapping[str, Callable[[RopeConfig, Params, int], RopeConfig]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def from_gguf(config: Params, theta: float, freq_factors: tuple[float, ...]) -> RopeConfig:
    """GGUF's `rope.*` keys, and the divisors that its rope_freqs.weight holds (Llama 3.1's scaling).

    Raises:
      ConfigError: for a scaling type that is not supported.
    """
    kind = str(config.get("rope.scaling.type", "none"))
    params = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": config.get("rope.freq_base", theta),
        "factor": config.get("rope.scaling.factor"),
        "original_max_position_embeddings": config.get("rope.scaling.original_context_length"),
        "beta_fast": config.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": config.get("rope.scaling.yarn_beta_slow"),
    }
    present = {key: value for key, value in params.items() if value is not None}
    rope = from_params(present, theta, config["context_length"])
    # llama.cpp multiplies YaRN's own factor by this one; both are 1 in other types.
    extra = float(config.get("rope.scaling.attn_factor", 1.0))
    return dataclasses.replace(
        rope, freq_factors=freq_factors, attention_factor=rope.attention_factor * extra
    )


def override(model: ModelConfig, text: str) -> ModelConfig:
    """The model with another RoPE scaling, as the flag --rope_scaling gives it.

    Layers without a window get it; those with one keep theirs, unless every layer has one. The
    length limit becomes what the scaling reaches: factor times the original length.

    Raises:
      ConfigError: for text that is not a JSON object, and as `from_params` does.
    """
    try:
        params = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"rope_scaling={text!r} is not JSON: {error}") from error
    if not isinstance(params, dict):
        raise ConfigError(f"rope_scaling={text!r} must be a JSON object with rope_type and factor")
    all_slide = all(layer.sliding_window for layer in model.layers)
    limit = model.max_position_embeddings
    layers = tuple(
        dataclasses.replace(layer, rope=from_params(params, layer.rope.rope_theta, limit))
        if all_slide or not layer.sliding_window
        else layer
        for layer in model.layers
    )
    rope = next(new.rope for new, old in zip(layers, model.layers, strict=True) if new is not old)
    if rope.rope_type == "linear":
        limit = int(limit * rope.factor)
    elif rope.rope_type in ("yarn", "llama3"):
        limit = max(limit, int(rope.original_max_position_embeddings * rope.factor))
    return dataclasses.replace(model, layers=layers, max_position_embeddings=limit)
