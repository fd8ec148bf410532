"""From sampled tokens to text: what the engine keeps of each completion until it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jaxinfer.text import Detokenizer, StopStrings, Tokenizer
from jaxinfer.types import (
    FinishReason,
    Request,
    RequestMetrics,
    Sequence,
    TokenLogprobs,
    TokenOutput,
)


@dataclass(eq=False)
class LiveRequest:
    """A request whose completions have not all ended."""

    request: Request
    num_unfinished: int
    first_scheduled_time_s: float | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])


class LiveCompletion:
    """Turns one sequence's tokens into outputs."""

    def __init__(self, sequence: Sequence, owner: LiveRequest, tokenizer: Tokenizer) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self.owner = owner
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, continuation=True)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._first_token_time_s: float | None = None

    def add_token(self, token_id: int) -> tuple[str, str | None]:
        """The text that a token adds, and the stop string that it completes, if any.

        A token that ends the sequence is text only where `include_stop_str_in_output` says so.
        """
        if self._first_token_time_s is None:
            self._first_token_time_s = time.monotonic()
        params = self.sequence.request.params
        ends = self.sequence.finish_reason is FinishReason.STOP
        text = ""
        if not ends or params.include_stop_str_in_output:
            text = self._stops.feed(self._detokenizer.add(token_id))
        if self.sequence.finish_reason is not None and self._stops.matched is None:
            text += self._stops.feed(self._detokenizer.flush())
            if self._stops.matched is None:
                text += self._stops.flush()
        return text, self._stops.matched

    def output(self, text: str, token_id: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        """The news of one step. The sequence says whether it is the last."""
        sequence, owner = self.sequence, self.owner
        finished = sequence.finish_reason is not None
        first = sequence.num_output_tokens == 1
        if finished:
            owner.num_unfinished -= 1
        wants_prompt = first and owner.request.params.prompt_logprobs is not None
        return TokenOutput(
            request_id=owner.request.request_id,
            index=sequence.index,
            text=text,
            token_ids=(token_id,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            metrics=self._metrics(finished),
            prompt_logprobs=tuple(owner.prompt_logprobs) if wants_prompt else None,
            request_finished=finished and owner.num_unfinished == 0,
        )

    def _metrics(self, finished: bool) -> RequestMetrics:
        return RequestMetrics(
            arrival_time_s=self.owner.request.arrival_time_s,
            first_scheduled_time_s=self.owner.first_scheduled_time_s,
            first_token_time_s=self._first_token_time_s,
            finished_time_s=time.monotonic() if finished else None,
            num_cached_tokens=self.sequence.num_cached_tokens,
            num_preemptions=self.sequence.num_preemptions,
        )
