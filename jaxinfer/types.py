"""Host types that the layers exchange. Nothing here imports jax."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

MAX_LOGPROBS = 20  # the most alternatives a token may ask for (OpenAI's limit)
MAX_LOGIT_BIAS = 300  # the most entries of `logit_bias` (OpenAI's limit)
MAX_STOP_STRINGS = 64  # each is sought for in every token's text
MAX_STOP_TOKEN_IDS = 64  # the most ids that `min_tokens` can hold back for one request


class RequestError(ValueError):
    """A request that cannot be honoured; `param` names the argument at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """Prompt and answer together are over the length limit."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"  # an end-of-sequence id, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the model's length limit
    ABORT = "abort"  # cancelled by the client


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Names and meanings follow vLLM's and OpenAI's.

    Numbers may be numpy's, sequences of any kind; None for one is an empty one. A string for `stop` is
    the only one. What is kept are Python's own types.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the likeliest tokens whose probabilities reach this sum.
      min_p: keep tokens at least this fraction as likely as the likeliest.
      repetition_penalty: over 1 makes tokens of the prompt and the output less likely.
      presence_penalty: taken from the logit of a token that the output holds.
      frequency_penalty: taken once for each time that the output holds a token.
      logit_bias: token id -> value added to its logit.
      min_tokens: no end of sequence and no stop token id before so many tokens.
      max_tokens: the most tokens to generate; None is up to the length limit.
      stop: strings that end the output and are not part of it.
      stop_token_ids: ids that end the output.
      ignore_eos: go on after the model's end of sequence.
      seed: makes the output repeatable, in whatever batch; None draws one.
      n: completions of the one prompt.
      logprobs: None, or the number of likeliest alternatives reported with each token.
      prompt_logprobs: the same for each token of the prompt.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str_in_output: keep the stop string in the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Raises RequestError, naming the parameter, for a value of another type or out of its range."""
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, empty)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for names, convert in _CONVERSIONS:
            for name in names:
                object.__setattr__(self, name, convert(name, getattr(self, name)))
        limits: tuple[tuple[str, bool, str], ...] = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "over 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            # Logits divided by less overflow.
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "from 0.01 to 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            ("logit_bias", len(self.logit_bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            (
                "min_tokens",
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"at most max_tokens, {self.max_tokens}",
            ),
            ("stop", all(self.stop), "strings that are not empty"),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
                f"at most {MAX_STOP_TOKEN_IDS} ids",
            ),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("n", 1 <= self.n <= 128, "from 1 to 128"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"from 0 to {MAX_LOGPROBS}",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"from 0 to {MAX_LOGPROBS}",
            ),
        )
        for name, ok, allowed in limits:
            if not ok:
                raise _refusal(name, getattr(self, name), allowed)

    @property
    def has_penalties(self) -> bool:
        """True where sampling needs the counts of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _refusal(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name}={value!r:.100} must be {allowed}", param=name)


def as_token_ids(name: str, value: object) -> tuple[int, ...]:
    """A sequence of integers of any kind, numpy's included, as ints.

    Raises:
      RequestError: names the argument `name`.
    """
    try:
        return tuple(_integer(name, item) for item in _items(value))
    except (TypeError, RequestError) as error:
        raise _refusal(name, value, "a sequence of integers") from error


def _items(value: object) -> Iterable[Any]:
    """Raises TypeError for what is no iterable, and for a string, whose items nobody means."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError
    return value


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _refusal(name, value, "an integer")
    return int(value)


def _optional_integer(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refusal(name, value, "a number")
    try:
        return float(value)
    except OverflowError as error:
        raise _refusal(name, value, "a number that a float holds") from error


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refusal(name, value, "True or False")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    try:
        strings = tuple(_items(value))
    except TypeError as error:
        raise _refusal(name, value, "a string, or a sequence of strings") from error
    if not all(isinstance(item, str) for item in strings):
        raise _refusal(name, value, "a string, or a sequence of strings")
    return strings


def _biases(name: str, value: Any) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise _refusal(name, value, "a mapping from token ids to numbers")
    biases = {_integer(name, token_id): _number(name, bias) for token_id, bias in value.items()}
    for token_id, bias in biases.items():
        if not -100.0 <= bias <= 100.0:
            raise RequestError(f"{name} of token {token_id} is {bias}; it must be from -100 to 100", name)
    return biases


_CONVERSIONS: tuple[tuple[tuple[str, ...], Callable[[str, Any], Any]], ...] = (
    (("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), _number),
    (("frequency_penalty",), _number),
    (("top_k", "min_tokens", "n"), _integer),
    (("max_tokens", "seed", "logprobs", "prompt_logprobs"), _optional_integer),
    (("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), _switch),
    (("logit_bias",), _biases),
    (("stop",), _strings),
    (("stop_token_ids",), as_token_ids),
)


@dataclass(frozen=True)
class Request:
    """One prompt, tokenised, as the engine takes it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time_s: float  # time.monotonic()
    priority: int = 0  # lower goes first, under the priority policy


class SequenceStatus(enum.Enum):
    """Where a sequence stands with the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One completion of a request: the only mutable host type. Owned by the scheduler.

    `num_computed_tokens` counts the tokens whose K and V every launched step has written or
    will write, the step in flight included. `num_inflight_samples` counts sampled tokens that
    the host has not read yet, so the sequence's length is
    `len(token_ids) + num_inflight_samples`.
    """

    seq_id: int
    request: Request
    index: int  # which of the request's n completions
    seed: int  # resolved, never None
    stop_ids: frozenset[int]  # the ids that end it: eos (unless ignored) and stop_token_ids
    max_total_tokens: int  # prompt and output together
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_inflight_samples: int = 0
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache at first admission
    num_preemptions: int = 0
    page_ids: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    slot: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated that the host has read."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class ScheduledSeq:
    """One sequence's part of a step: tokens [start, start + num_tokens) of it.

    Attributes:
      sequence: read-only for everyone but the scheduler.
      group: the data-parallel group that computes it; slot and pages are that group's.
      slot: its row of the slot state on the device.
      start: position of the first token computed.
      num_tokens: tokens computed.
      token_ids: their ids, or () for a decode, whose one id is the slot's last sampled token.
      page_ids: the sequence's pages, which hold at least start + num_tokens positions.
      samples: True where the step's last token is the sequence's last, so that one is sampled.
      first: True in the first step after (re)admission, when the slot's state must be set.
    """

    sequence: Sequence
    group: int
    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    page_ids: tuple[int, ...]
    samples: bool
    first: bool


@dataclass(frozen=True)
class StepPlan:
    """What one step computes. Decodes and prefill chunks are apart; a step may hold both.

    All its sequences are of one `wave`, and those of other waves take no token of it.
    """

    step_id: int
    decodes: tuple[ScheduledSeq, ...]
    prefills: tuple[ScheduledSeq, ...]
    wave: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(s.num_tokens for s in self.prefills)


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log-probability, its rank (1 is the likeliest), and the likeliest ids with theirs."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SampledToken:
    """What a step sampled for one sequence."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class StepResult:
    """What the host read of one step.

    Attributes:
      step_id: the plan's.
      sampled: seq_id -> the token sampled, for each sequence whose `samples` is True.
      prompt_logprobs: seq_id -> for a chunk [start, start + num_tokens) of a prompt that asks for
        them, the log-probabilities of tokens start + 1 ... start + num_tokens, those beyond the
        prompt's end left out.
    """

    step_id: int
    sampled: Mapping[int, SampledToken]
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]]


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic() where a point, else durations."""

    arrival_time_s: float
    first_scheduled_time_s: float | None = None
    first_token_time_s: float | None = None
    finished_time_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True)
class TokenOutput:
    """News of one completion: what came since the last one. Text joined is the whole text.

    `token_ids` holds every token read, so text may lag behind it while a multi-byte character or
    a possible stop string is held back. The last one of a completion has a `finish_reason`.
    `prompt_logprobs`, whole, comes with the first output; its first entry is None.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    request_finished: bool = False  # True in the last output of the request's last completion


@dataclass(frozen=True)
class CompletionOutput:
    """One finished completion."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestOutput:
    """All of a finished request, as `LLM.generate` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    metrics: RequestMetrics
