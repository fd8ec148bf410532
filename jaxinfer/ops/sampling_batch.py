"""Sampling parameters as arrays: rows on the host, a row a slot, gathered into the batch of a step.

Dims: S rows of a batch, B logit biases, E stop ids.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.types import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, RequestError, SamplingParams

MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 16  # room for the model's own end-of-sequence ids

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTS = ("top_k", "num_logprobs", "seed_high", "seed_low", "position", "hold_stops")
_NEUTRAL_FLOATS = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], np.float32)
_NEUTRAL_INTS = np.array([0, -1, 0, 0, 0, 0], np.int32)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["floats", "ints", "bias_ids", "bias_values", "stop_ids"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SamplingBatch:
    """How to sample each row; numpy or jax arrays. Few leaves, since each costs a jitted call 1 us and more.

    Attributes:
      floats: [S, 6] float32, the columns named by `_FLOATS`.
      ints: [S, 6] int32, the columns named by `_INTS`; the halves of a seed are reinterpreted uint32.
      bias_ids: [S, B] int32; unused entries are id 0 with value 0.
      bias_values: [S, B] float32, added to the logits of bias_ids.
      stop_ids: [S, E] int32, held back where hold_stops; -1 is unused.
    """

    floats: Any
    ints: Any
    bias_ids: Any
    bias_values: Any
    stop_ids: Any

    def column(self, name: str) -> Any:
        """[S] float32 or int32, by a name of `_FLOATS` or `_INTS`."""
        if name in _FLOATS:
            return self.floats[:, _FLOATS.index(name)]
        return self.ints[:, _INTS.index(name)]

    @property
    def wants_logprobs(self) -> Any:
        """[S] bool."""
        return self.column("num_logprobs") >= 0


class SamplingRows:
    """The sampling parameters of the sequences that hold a slot, as rows ready to gather. On the host."""

    def __init__(self, max_num_seqs: int) -> None:
        rows = max_num_seqs + 1  # the last one is for padding, and stays neutral
        self._floats = np.tile(_NEUTRAL_FLOATS, (rows, 1))
        self._ints = np.tile(_NEUTRAL_INTS, (rows, 1))
        self._bias_ids = np.zeros((rows, MAX_LOGIT_BIAS), np.int32)
        self._bias_values = np.zeros((rows, MAX_LOGIT_BIAS), np.float32)
        self._stop_ids = np.full((rows, MAX_STOP_IDS), -1, np.int32)
        self._min_tokens = np.zeros(rows, np.int32)

    def set(self, slot: int, params: SamplingParams, seed: int, stop_ids: Collection[int]) -> None:
        """Writes a slot's row, at admission.

        Args:
          slot: from 0 to max_num_seqs - 1.
          params: the request's.
          seed: 64 bits, signed or not.
          stop_ids: the ids that end this sequence, which min_tokens holds back.

        Raises:
          RequestError: more stop ids than a row holds.
        """
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids: {len(stop_ids)} ids end this sequence, end-of-sequence ids included; "
                f"give at most {MAX_STOP_IDS}",
                param="stop_token_ids",
            )
        p = params
        self._floats[slot] = [getattr(p, name) for name in _FLOATS]
        words = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
        self._ints[slot, :2] = min(p.top_k, 2**31 - 1), -1 if p.logprobs is None else p.logprobs
        self._ints[slot, 2:4] = words.view(np.int32)
        self._bias_ids[slot], self._bias_values[slot] = 0, 0.0
        self._bias_ids[slot, : len(p.logit_bias)] = list(p.logit_bias.keys())
        self._bias_values[slot, : len(p.logit_bias)] = list(p.logit_bias.values())
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stop_ids)] = sorted(stop_ids)
        self._min_tokens[slot] = p.min_tokens

    def gather(
        self, slots: np.ndarray, positions: np.ndarray, num_output_tokens: np.ndarray, size: int
    ) -> SamplingBatch:
        """The rows of a step as numpy arrays, padded with neutral, greedy rows.

        Args:
          slots: [n] int, n <= size.
          positions: [n] int, the position that each sampled token will have in its sequence.
          num_output_tokens: [n] int, tokens sampled before this one, those in flight included.
          size: rows of the batch, S.
        """
        n = len(slots)
        rows = np.full(size, len(self._min_tokens) - 1)
        rows[:n] = slots
        ints = self._ints[rows]
        ints[:n, 4] = positions
        ints[:n, 5] = num_output_tokens < self._min_tokens[rows[:n]]
        return SamplingBatch(
            self._floats[rows], ints, self._bias_ids[rows], self._bias_values[rows], self._stop_ids[rows]
        )
