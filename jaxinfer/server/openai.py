"""OpenAI's requests: what a body may hold, and the engine's requests that it becomes.

Every parameter of OpenAI's that is known is honoured, or refused by name; so is every other one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails, from_json

from jaxinfer.config import SchedulerConfig
from jaxinfer.text import Tokenizer
from jaxinfer.types import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    ContextLengthError,
    Request,
    RequestError,
    SamplingParams,
)

MAX_ECHO = 100  # characters of what a client sent that an error message repeats


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
    ) -> None:
        """kind: OpenAI's `type`; it follows from the status where None."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


_KINDS = {429: "rate_limit_error", 503: "service_unavailable_error"}


T = TypeVar("T")
# Stops at the first bad item: a list of millions would else make as many error messages.
FastList = Annotated[list[T], Field(fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Body(_Strict):
    """What completions and chat share. None is the default, as in OpenAI's API."""

    # Parameters of OpenAI's or vLLM's that are known and not supported, each with the values that ask
    # for nothing and are let through; None always is.
    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {}
    # SamplingParams fields that have the body's name.
    sampling_names: ClassVar[tuple[str, ...]] = (
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("min_tokens", "stop_token_ids", "ignore_eos", "seed", "n"),
        *("skip_special_tokens", "include_stop_str_in_output"),
    )

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | FastList[str] | None = None
    stop_token_ids: FastList[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    user: str | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_logit_bias(cls, value: Any) -> Any:
        """The keys, before pydantic makes an error for each that is wrong."""
        if not isinstance(value, Mapping):
            return value
        if len(value) > MAX_LOGIT_BIAS:
            raise ValueError(f"{len(value)} entries must be at most {MAX_LOGIT_BIAS}")
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) < 10) or (key[0] == "0" and key != "0"):
                raise ValueError(f"the key {key!r:.100} must be a token id")
        return value

    @property
    def num_choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raises RequestError for parameters that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed; leave stream out", "prompt_logprobs")

    def sampling_params(self) -> SamplingParams:
        """Raises RequestError for a value out of its range."""
        self.check()
        given = {name: getattr(self, name) for name in self.sampling_names}
        given |= {"logprobs": self.num_logprobs(), "prompt_logprobs": self.num_prompt_logprobs()}
        given["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's word for all of them
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        given["logit_bias"] = {int(k): v for k, v in (self.logit_bias or {}).items()} or None
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=self.most_tokens(), **given)

    def num_logprobs(self) -> int | None:
        """SamplingParams.logprobs."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """SamplingParams.prompt_logprobs."""
        return self.prompt_logprobs

    def most_tokens(self) -> int | None:
        """SamplingParams.max_tokens."""
        raise NotImplementedError

    def prompt_ids(self, tokenizer: Tokenizer, limit: int) -> list[list[int]]:
        """The prompts, tokenised; raises RequestError. limit: tokens over which one is surely refused."""
        raise NotImplementedError

    def requests(self, tokenizer: Tokenizer, response_id: str, scheduler: SchedulerConfig) -> list[Request]:
        """The engine's requests, one a prompt, in order.

        Args:
          tokenizer: the model's.
          response_id: what their ids begin with.
          scheduler: the engine's, which says whether `priority` can be honoured, and the length limit.

        Raises:
          RequestError: a value is out of its range, or a prompt cannot be tokenised.
        """
        arrival_time_s = time.monotonic()
        params = self.sampling_params()
        if self.priority and scheduler.scheduling != "priority":
            raise RequestError("priority needs a server started with --scheduling=priority", "priority")
        return [
            Request(f"{response_id}-{index}", tuple(ids), params, arrival_time_s, self.priority or 0)
            for index, ids in enumerate(self.prompt_ids(tokenizer, scheduler.max_model_len))
        ]


class CompletionRequest(_Body):
    """Body of POST /v1/completions."""

    unsupported = {"suffix": ("",)}

    prompt: str | FastList[str] | FastList[int] | FastList[FastList[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def check(self) -> None:
        """As in the base; `best_of` must say what `n` says."""
        super().check()
        if self.best_of is not None and self.best_of != self.num_choices:
            raise RequestError(
                f"best_of={self.best_of} must equal n={self.num_choices}, or be left out", "best_of"
            )

    def num_logprobs(self) -> int | None:
        """OpenAI's meaning is the engine's."""
        return self.logprobs

    def most_tokens(self) -> int:
        """16 where it is left out, as in OpenAI's API."""
        return 16 if self.max_tokens is None else self.max_tokens

    def num_prompt_logprobs(self) -> int | None:
        """With `echo`, the prompt's log-probabilities come with the answer's."""
        echoed = self.logprobs if self.echo else None
        asked = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return max(asked, default=None)

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as it was given: text or ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return prompt

    def prompt_ids(self, tokenizer: Tokenizer, limit: int) -> list[list[int]]:
        """Text is encoded, with the special tokens that the model wants; ids are taken as they are."""
        prompts = self.prompts()
        if not all(prompts) or not prompts:
            raise RequestError("prompt is empty; give at least one character or token id", "prompt")
        return [tokenizer.encode(p, limit=limit) if isinstance(p, str) else p for p in prompts]


class ContentPart(_Strict):
    """A part of a message: only text is supported."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A message of a conversation. `developer` is `system`, as OpenAI has it for older models."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | FastList[ContentPart]
    name: str | None = None
    # Null in what OpenAI's own client makes of an answer, which users send back as history.
    refusal: None = None
    audio: None = None
    tool_calls: None = None
    function_call: None = None
    annotations: None = None

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        message = self.model_dump(include={"role", "content", "name"}, exclude_none=True)
        return message | ({"role": "system"} if self.role == "developer" else {})


class ChatCompletionRequest(_Body):
    """Body of POST /v1/chat/completions."""

    unsupported = {
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "audio": (),
        "metadata": ({},),
        "moderation": (),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "safety_identifier": (),
        "verbosity": (),
        "web_search_options": (),
        "echo": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
    }

    messages: FastList[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def check(self) -> None:
        """As in the base; and for log-probabilities and limits that contradict each other."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError("max_tokens and max_completion_tokens differ; give one", "max_tokens")

    def num_logprobs(self) -> int | None:
        """`logprobs` alone asks for the sampled token's own."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def most_tokens(self) -> int | None:
        """Up to the length limit where it is left out."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompt_ids(self, tokenizer: Tokenizer, limit: int) -> list[list[int]]:
        """The conversation as the model's chat template writes it."""
        messages = [message.for_template() for message in self.messages]
        return [tokenizer.encode_chat(messages, limit=limit)]


B = TypeVar("B", bound=CompletionRequest | ChatCompletionRequest)


def parse(kind: type[B], data: bytes | Mapping[str, Any]) -> B:
    """Validates a body, JSON or parsed already; raises ApiError, which names the parameter at fault."""
    if isinstance(data, bytes):
        try:
            data = from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"The body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(data, Mapping):
        raise ApiError(400, "The body must be a JSON object", code="invalid_json")
    # Not left to pydantic, which makes an error of each.
    known = kind.model_fields.keys() | kind.unsupported.keys()
    unknown = next((name for name in data if name not in known), None)
    if unknown is not None:
        message = f"Unknown parameter: {unknown!r:.{MAX_ECHO}}; leave it out"
        raise ApiError(400, message, param=unknown[:MAX_ECHO], code="unknown_parameter")
    for name, harmless in kind.unsupported.items():
        if data.get(name) is not None and data[name] not in harmless:
            message = f"{name}={data[name]!r:.100} is not supported; leave it out"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    try:
        return kind.model_validate({k: v for k, v in data.items() if k not in kind.unsupported})
    except ValidationError as error:
        raise _api_error(error) from error


def refused(error: RequestError, kind: type[_Body]) -> ApiError:
    """The answer to a request that cannot be honoured."""
    param = error.param
    if kind is ChatCompletionRequest and param in ("prompt", "prompt_token_ids"):
        param = "messages"
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
    return ApiError(400, str(error), param=param, code=code)


def _api_error(error: ValidationError) -> ApiError:
    """One parameter's errors as one answer: pydantic lists each branch of a union on its own."""
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    name = str(first["loc"][0])[:MAX_ECHO]
    if first["type"] == "missing" and len(first["loc"]) == 1:
        message = f"Missing required parameter: {name!r}"
        return ApiError(400, message, param=name, code="missing_required_parameter")
    if name == "prompt":
        message = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
        return ApiError(400, message, param=name, code="invalid_type")
    # Of a union, the branch that went deepest into the value is the one that was meant.
    errors = [e for e in errors if e["loc"][0] == first["loc"][0]]
    param = _path(max(errors, key=lambda e: len(e["loc"]))["loc"])
    messages = [_message(e) for e in errors if _path(e["loc"]) == param]
    return ApiError(
        400,
        f"{param:.{MAX_ECHO}}: {' or '.join(dict.fromkeys(messages))}",
        param=param[:MAX_ECHO],
        code="invalid_value",
    )


def _message(error: ErrorDetails) -> str:
    """pydantic's words, but for those that only a Python programmer would understand."""
    if error["type"] in _MESSAGES:
        return _MESSAGES[error["type"]]
    return error["msg"].removeprefix("Value error, ")


_MESSAGES = {
    "model_type": "Input should be an object",
    "none_required": "This is not supported; leave it out",
    "extra_forbidden": "This is not known; leave it out",
    "too_short": "Input should not be empty",
}


def _path(loc: tuple[int | str, ...]) -> str:
    """A pydantic location as OpenAI writes one: messages[0].role. Names of union branches are left out."""
    path = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}"
    return path
