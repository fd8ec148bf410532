"""OpenAI's answers, whole and in chunks, from the engine's outputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jaxinfer.server.openai import ChatCompletionRequest, CompletionRequest
from jaxinfer.text import Detokenizer, Tokenizer
from jaxinfer.types import FinishReason, Request, TokenLogprobs, TokenOutput

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have (vLLM's number)

B = TypeVar("B", CompletionRequest, ChatCompletionRequest)


@dataclass
class _Choice:
    """What came of one choice so far."""

    index: int
    prompt_index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    offsets: _Offsets | None = None
    num_tokens: int = 0
    started: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Answer(Generic[B]):
    """Makes one HTTP request's answer. Take either `chunks` of each output, or `add` and `whole`."""

    object_name = ""

    def __init__(
        self, body: B, response_id: str, model: str, requests: Sequence[Request], tokenizer: Tokenizer
    ) -> None:
        self.body = body
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        self._requests = requests
        self._tokenizer = tokenizer
        self._prompt_index = {request.request_id: i for i, request in enumerate(requests)}
        self._num_cached = [0] * len(requests)
        self._prompt_logprobs: list[tuple[TokenLogprobs | None, ...] | None] = [None] * len(requests)
        n = body.num_choices
        self._choices = [_Choice(i, i // n) for i in range(len(requests) * n)]

    def add(self, output: TokenOutput) -> None:
        """Takes an output of an answer that is given whole."""
        choice = self._take(output)
        choice.text.append(self._text(choice, output))
        piece = self._logprobs(choice, output)
        if piece is not None:
            choice.logprobs.append(piece)
        choice.started = True

    def whole(self) -> dict[str, Any]:
        """The answer, once every output is in."""
        choices = [self._whole_choice(choice) for choice in self._choices]
        return self._envelope(self.object_name, choices) | {"usage": self.usage()}

    def chunks(self, output: TokenOutput) -> list[dict[str, Any]]:
        """The chunks that stream an output; [] where it has nothing to show yet."""
        choice = self._take(output)
        parts = self._parts(choice, self._text(choice, output), self._logprobs(choice, output))
        choice.started = True
        return [self._chunk([part]) for part in parts]

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that ends a stream with `include_usage`."""
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, whatever n is."""
        num_prompt = sum(len(request.prompt_token_ids) for request in self._requests)
        num_completion = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }

    def _take(self, output: TokenOutput) -> _Choice:
        prompt_index = self._prompt_index[output.request_id]
        choice = self._choices[prompt_index * self.body.num_choices + output.index]
        choice.num_tokens += len(output.token_ids)
        choice.finish_reason = output.finish_reason
        choice.stop_reason = output.stop_reason
        if output.index == 0:  # later completions find their prompt where the first one left it
            self._num_cached[prompt_index] = output.metrics.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        return choice

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_name, choices)
        return chunk | {"usage": None} if self.body.include_usage else chunk

    def _rendered_prompt_logprobs(self, choice: _Choice) -> list[dict[str, Any] | None] | None:
        """vLLM's `prompt_logprobs`: for each prompt token a map from token id, its own included."""
        entries = self._prompt_logprobs[choice.prompt_index]
        if entries is None or self.body.prompt_logprobs is None:
            return None
        return [None if entry is None else self._by_token_id(entry) for entry in entries]

    def _by_token_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [
            (i, p, rank)
            for rank, (i, p) in enumerate(entry.top[: self.body.prompt_logprobs], 1)
            if i != entry.token_id
        ]
        return {
            str(i): {"logprob": _finite(p), "rank": rank, "decoded_token": self._tokenizer.token_text(i)}
            for i, p, rank in ranked
        }

    # --- What completions and chat differ in ----------------------------------------------------

    chunk_name = ""

    def _text(self, choice: _Choice, output: TokenOutput) -> str:
        return output.text

    def _logprobs(self, choice: _Choice, output: TokenOutput) -> dict[str, Any] | None:
        raise NotImplementedError

    def _parts(self, choice: _Choice, text: str, logprobs: dict[str, Any] | None) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError


class _Offsets:
    """Where each token's text begins in the text of its choice, in characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, continuation: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, continuation=continuation)
        self._length = 0

    def next(self, token_id: int) -> int:
        offset = self._length
        self._length += len(self._detokenizer.add(token_id))
        return offset


class CompletionAnswer(Answer[CompletionRequest]):
    """The answer of POST /v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def _text(self, choice: _Choice, output: TokenOutput) -> str:
        if not self.body.echo or choice.started:
            return output.text
        prompt = self.body.prompts()[choice.prompt_index]
        if not isinstance(prompt, str):
            prompt = self._tokenizer.decode(
                prompt, skip_special_tokens=self.body.skip_special_tokens is not False
            )
        return prompt + output.text

    def _logprobs(self, choice: _Choice, output: TokenOutput) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        if choice.offsets is None:
            skip = self.body.skip_special_tokens is not False
            choice.offsets = _Offsets(self._tokenizer, skip, continuation=not self.body.echo)
        entries: list[TokenLogprobs | None] = list(output.logprobs)
        token_ids = list(output.token_ids)
        if self.body.echo and not choice.started:
            entries = [*(self._prompt_logprobs[choice.prompt_index] or ()), *entries]
            token_ids = [*self._requests[choice.prompt_index].prompt_token_ids, *token_ids]
        return {
            "tokens": [self._token(i) for i in token_ids],
            "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
            "top_logprobs": [None if e is None else self._top(e) for e in entries],
            "text_offset": [choice.offsets.next(i) for i in token_ids],
        }

    def _token(self, token_id: int) -> str:
        """A token's text; bytes that are no whole character are written as OpenAI does."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens by text, and the sampled one where it is not among them."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self.body.logprobs], (entry.token_id, entry.logprob)):
            top.setdefault(self._token(token_id), _finite(logprob))
        return top

    def _parts(self, choice: _Choice, text: str, logprobs: dict[str, Any] | None) -> list[dict[str, Any]]:
        shown = text or choice.finish_reason or (logprobs and logprobs["tokens"])
        return [self._choice_object(choice, text, logprobs)] if shown else []

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            logprobs = {name: [x for piece in choice.logprobs for x in piece[name]] for name in names}
        whole = self._choice_object(choice, "".join(choice.text), logprobs)
        prompt_logprobs = self._rendered_prompt_logprobs(choice)
        return whole if prompt_logprobs is None else whole | {"prompt_logprobs": prompt_logprobs}

    def _choice_object(self, choice: _Choice, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class ChatAnswer(Answer[ChatCompletionRequest]):
    """The answer of POST /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        """As in the base, with vLLM's `prompt_logprobs` beside the choices, where asked for."""
        prompt_logprobs = self._rendered_prompt_logprobs(self._choices[0])
        answer = super().whole()
        return answer if prompt_logprobs is None else answer | {"prompt_logprobs": prompt_logprobs}

    def _logprobs(self, choice: _Choice, output: TokenOutput) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": [self._entry(e) for e in output.logprobs], "refusal": None}

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = entry.top[: self.body.top_logprobs or 0]
        return self._token(entry.token_id, entry.logprob) | {
            "top_logprobs": [self._token(*pair) for pair in top]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    def _parts(self, choice: _Choice, text: str, logprobs: dict[str, Any] | None) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        if not choice.started:
            parts.append(self._delta(choice, {"role": "assistant", "content": ""}, None, None))
        shown = text or choice.finish_reason or (logprobs and logprobs["content"])
        if shown:
            delta = {"content": text} if text or not choice.finish_reason else {}
            parts.append(self._delta(choice, delta, logprobs, choice.finish_reason))
        return parts

    def _delta(
        self, choice: _Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        stop_reason = choice.stop_reason if reason else None
        part = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return part | {"stop_reason": stop_reason}

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs:
            logprobs = {
                "content": [x for piece in choice.logprobs for x in piece["content"]],
                "refusal": None,
            }
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


def make_answer(
    body: CompletionRequest | ChatCompletionRequest,
    response_id: str,
    model: str,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
) -> CompletionAnswer | ChatAnswer:
    """The answer to a body's requests, under the model's served name."""
    if isinstance(body, CompletionRequest):
        return CompletionAnswer(body, response_id, model, requests, tokenizer)
    return ChatAnswer(body, response_id, model, requests, tokenizer)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
