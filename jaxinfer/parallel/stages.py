"""How a model's layers are dealt to pipeline stages. No jax.

A stage is a range of layers on devices of its own, with the pages of the KV cache for those layers. The
first has the embedding, the last the final norm, the head and the slots; a tied embedding lies on both.
"""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.config import ConfigError, ModelConfig, StageConfig


def stage_models(model: ModelConfig, num_stages: int) -> tuple[ModelConfig, ...]:
    """Each stage as a model of its own; the whole one where there is one stage.

    The numbers of layers differ by one at most. Stages in the middle, which have neither embedding nor
    head, get one more before the first does, and the last, which samples too, gets none.

    Raises:
      ConfigError: more stages than layers.
    """
    if num_stages == 1:
        return (model,)
    num_layers = model.num_hidden_layers
    if num_stages > num_layers:
        raise ConfigError(
            f"mesh: {num_stages} pipeline stages need as many layers, and {model.architecture} has "
            f"num_hidden_layers={num_layers}: use 1 to {num_layers}"
        )
    counts = [num_layers // num_stages] * num_stages
    for index in [*range(1, num_stages - 1), 0][: num_layers % num_stages]:
        counts[index] += 1
    stages, first = [], 0
    for index, count in enumerate(counts):
        stage = StageConfig(index, num_stages, first)
        stages.append(replace(model, layers=model.layers[first : first + count], stage=stage))
        first += count
    return tuple(stages)
