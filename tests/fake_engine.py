"""An engine without a model that says the prompt back, a token a step: tests take milliseconds."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxinfer.memory.ledger import Ledger
from jaxinfer.memory.measured import MemoryReport
from jaxinfer.metrics import EngineStats, Metrics
from jaxinfer.text import Detokenizer, StopStrings
from jaxinfer.types import (
    ContextLengthError,
    FinishReason,
    Request,
    RequestMetrics,
    TokenLogprobs,
    TokenOutput,
)

EOS = 256
MODEL = "fake"


class ByteTokenizer:
    """A token a byte of UTF-8, and EOS, which is special."""

    vocab_size = 257
    bos_token_id = None
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({EOS})
    drops_leading_space = False
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


@dataclass
class _Sequence:
    request: Request
    index: int
    detokenizer: Detokenizer
    stops: StopStrings
    first_token_time_s: float | None = None
    num_tokens: int = 0


@dataclass
class FakeEngine:
    """Completion `index` of a prompt is the prompt's bytes from `index` on, then EOS.

    step_s: how long a step takes, in seconds. fail: makes the next step raise.
    """

    config: EngineConfig = field(default_factory=lambda: EngineConfig(model=MODEL))
    scheduler_config: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(4, 512, 512))
    step_s: float = 0.0
    timeline: tuple[tuple[str, float], ...] = (("load", 0.5), ("compile", 0.25))
    tokenizer: Any = field(default_factory=ByteTokenizer)
    metrics: Metrics = field(default_factory=Metrics)
    fail: bool = False
    num_steps: int = 0
    aborted: list[tuple[str, int]] = field(default_factory=list)  # with the step after which it came
    threads: set[int] = field(default_factory=set)
    _sequences: list[_Sequence] = field(default_factory=list)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def on_lost_host(self, callback: Callable[[str], None]) -> None:
        """There is one host."""

    def add_request(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        limit = self.scheduler_config.max_model_len
        if len(request.prompt_token_ids) >= limit:
            message = f"the prompt has {len(request.prompt_token_ids)} tokens, over the limit of {limit}"
            raise ContextLengthError(message, "prompt")
        params = request.params
        for index in range(params.n):
            detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens, continuation=True)
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
            self._sequences.append(_Sequence(request, index, detokenizer, stops))

    def abort(self, request_id: str) -> None:
        before = len(self._sequences)
        self._sequences = [s for s in self._sequences if s.request.request_id != request_id]
        if len(self._sequences) < before:
            self.aborted.append((request_id, self.num_steps))
            self.metrics.observe_abort(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[TokenOutput]:
        self.threads.add(threading.get_ident())
        if self.fail:
            raise RuntimeError("out of luck")
        time.sleep(self.step_s)
        self.num_steps += 1
        return [self._next(s) for s in self._sequences[: self.scheduler_config.max_num_seqs]]

    def stats(self) -> EngineStats:
        running = min(len(self._sequences), self.scheduler_config.max_num_seqs)
        return EngineStats(
            num_running=running,
            num_waiting=len(self._sequences) - running,
            kv_cache_usage=running / self.scheduler_config.max_num_seqs,
            num_steps=self.num_steps,
        )

    def memory(self) -> MemoryReport:
        """A cache of 8 pages of 100 bytes, and weights that came out larger than planned."""
        planned = Ledger(2000, 800, 0, 0, 0, 0, host_staging=50)
        cache = CacheConfig(page_size=16, num_pages=8, dtype="float32")
        return MemoryReport(planned, {"weights": 2001, "kv_cache": 800}, 4000, None, cache, 1, 100, 3, 2)

    def _next(self, sequence: _Sequence) -> TokenOutput:
        request, params = sequence.request, sequence.request.params
        said = [*request.prompt_token_ids[sequence.index :], EOS]
        token_id = said[sequence.num_tokens % len(said) if params.ignore_eos else sequence.num_tokens]
        now_s = time.monotonic()
        first = sequence.first_token_time_s is None
        if first:
            sequence.first_token_time_s = now_s
        sequence.num_tokens += 1
        text = sequence.stops.feed(sequence.detokenizer.add(token_id))
        stop_reason, reason = sequence.stops.matched, None
        if stop_reason is not None or (token_id == EOS and not params.ignore_eos):
            reason = FinishReason.STOP
        elif sequence.num_tokens == params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            if stop_reason is None:
                text += sequence.stops.feed(sequence.detokenizer.flush()) + sequence.stops.flush()
            self._sequences.remove(sequence)
        metrics = RequestMetrics(
            request.arrival_time_s, now_s, sequence.first_token_time_s, num_cached_tokens=3
        )
        output = TokenOutput(
            request_id=request.request_id,
            index=sequence.index,
            text=text,
            token_ids=(token_id,),
            logprobs=() if params.logprobs is None else (_logprobs(token_id, params.logprobs),),
            finish_reason=reason,
            stop_reason=stop_reason,
            metrics=dataclasses.replace(metrics, finished_time_s=now_s if reason else None),
            prompt_logprobs=self._prompt_logprobs(request) if first else None,
            request_finished=all(s.request is not request for s in self._sequences),
        )
        self.metrics.observe_output(output, len(request.prompt_token_ids))
        return output

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        num = request.params.prompt_logprobs
        if num is None:
            return None
        return (None, *(_logprobs(i, num) for i in request.prompt_token_ids[1:]))


def _logprobs(token_id: int, num: int) -> TokenLogprobs:
    """The token is second: likelier is `!`; the third has no probability at all."""
    top = ((ord("!"), -0.25), (token_id, -1.5), (ord("?"), float("-inf")))
    return TokenLogprobs(token_id, -1.5, 2, top[:num])
