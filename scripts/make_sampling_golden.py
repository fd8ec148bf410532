"""Remakes tests/golden/sampling/processors.npz: the scores that transformers' logits processors leave.

Needs torch and transformers (5.24 made the committed file): python scripts/make_sampling_golden.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

OUTPUT = Path(__file__).parents[1] / "tests" / "golden" / "sampling" / "processors.npz"
VOCAB_SIZE = 199
# One case a row: repetition_penalty, temperature, min_p, top_k, top_p, in the order they are applied.
CASES = (
    (1.0, 0.7, 0.0, 0, 1.0),
    (1.0, 1.0, 0.0, 1, 1.0),
    (1.0, 1.0, 0.0, 10, 1.0),
    (1.0, 1.5, 0.0, 150, 1.0),
    (1.0, 1.0, 0.05, 0, 1.0),
    (1.0, 1.0, 0.0, 0, 0.9),
    (1.0, 2.0, 0.0, 0, 0.5),
    (1.0, 1.3, 0.0, 0, 0.05),
    (1.3, 1.0, 0.0, 0, 1.0),
    (0.8, 0.9, 0.0, 0, 1.0),
    (1.2, 1.4, 0.02, 40, 0.8),
    (1.1, 0.6, 0.01, 25, 0.95),
)


def processed(logits: np.ndarray, tokens: np.ndarray, case: tuple[float, ...]) -> np.ndarray:
    """[V] float32, -inf where a token is filtered out."""
    repetition, temperature, min_p, top_k, top_p = case
    processors = LogitsProcessorList()
    if repetition != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(repetition))
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if min_p > 0.0:
        processors.append(MinPLogitsWarper(min_p))
    if top_k > 0:
        processors.append(TopKLogitsWarper(int(top_k)))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    scores = processors(torch.from_numpy(tokens[None].astype(np.int64)), torch.from_numpy(logits[None]))
    return scores[0].numpy()


def main() -> None:
    rng = np.random.default_rng(20)
    logits = (rng.standard_normal((len(CASES), VOCAB_SIZE)) * 2.5).astype(np.float32)
    tokens = rng.integers(0, VOCAB_SIZE, (len(CASES), 24)).astype(np.int32)
    scores = np.stack([processed(*row) for row in zip(logits, tokens, CASES, strict=True)])
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        OUTPUT,
        logits=logits,
        tokens=tokens,
        cases=np.array(CASES, np.float64),
        scores=scores.astype(np.float32),
    )


if __name__ == "__main__":
    main()
