"""Offline inference over a file: `python -m jaxinfer.batch --model=demo --input=in.jsonl --output=out.jsonl`.

A row is a JSON object with `prompt`, `messages` or `prompt_token_ids`, sampling parameters and
whatever else, which is kept; or OpenAI's `{custom_id, method, url, body}`. Sampling flags stand in
for what a row leaves out. Rows come out in the order they went in, each with an answer or an error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from jaxinfer import cli
from jaxinfer.flags import BatchOptions, Sampling, batch_options
from jaxinfer.server.openai import ApiError, ChatCompletionRequest, CompletionRequest, parse, refused
from jaxinfer.server.responses import ChatAnswer, CompletionAnswer, make_answer
from jaxinfer.types import Request, RequestError, TokenOutput

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Engine

ROWS_IN_FLIGHT = 1024  # rows read ahead of the first one that has no answer yet

_URLS: Mapping[str, type[CompletionRequest] | type[ChatCompletionRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}
_INPUTS = ("prompt", "messages", "prompt_token_ids")
# A row's keys that are parameters; the others are columns of the data set, and kept.
_PARAMETERS = (set(CompletionRequest.model_fields) | set(ChatCompletionRequest.model_fields)) - {
    *("model", "prompt", "messages", "stream", "stream_options", "user", "best_of", "echo")
}


@dataclass
class Row:
    """One row between the file it came from and the file it goes to."""

    columns: dict[str, Any]
    is_openai: bool = False
    answer: CompletionAnswer | ChatAnswer | None = None
    requests: list[Request] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    error: ApiError | None = None

    def result(self) -> dict[str, Any]:
        """The row as it is written."""
        body = None if self.error or self.answer is None else self.answer.whole()
        if self.is_openai:
            return self._openai_result(body)
        error = None if self.error is None else self.error.body()["error"]
        if body is None:
            return {**self.columns, "outputs": None, "usage": None, "error": error}
        outputs = [_native_choice(choice) for choice in body["choices"]]
        prompt_logprobs = body.get("prompt_logprobs")
        extra = {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}
        return {**self.columns, "outputs": outputs, **extra, "usage": body["usage"], "error": None}

    def _openai_result(self, body: dict[str, Any] | None) -> dict[str, Any]:
        status = 200 if self.error is None else self.error.status
        body = body if self.error is None else self.error.body()
        response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
        error = None if self.error is None else {"code": self.error.code, "message": str(self.error)}
        kept = {k: v for k, v in self.columns.items() if k not in ("method", "url", "body")}
        return {"id": f"batch_req_{uuid.uuid4().hex}", **kept, "response": response, "error": error}


def _native_choice(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    output = {"text": text, "finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    for name in ("logprobs", "prompt_logprobs"):
        if choice.get(name) is not None:
            output[name] = choice[name]
    return output


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 also where rows have errors, which the last line counts."""
    return cli.run(batch_options, _batch, argv)


def _batch(options: BatchOptions) -> int:
    _check_files(options)
    with open(options.input, "rb") as source:
        num_rows = sum(1 for line in source if line.strip())
    with (
        cli.started(options.engine) as engine,
        open(options.input, "rb") as source,
        _written_whole(options.output) as target,
        # tqdm shows itself on a terminal only
        tqdm(total=num_rows, unit="row", disable=None, file=sys.stderr) as bar,
    ):
        num_errors = 0
        for row in run_rows(engine, _rows(source, engine, options)):
            target.write(json.dumps(row.result(), ensure_ascii=False) + "\n")
            num_errors += row.error is not None
            bar.update()
    print(f"{num_rows} rows, {num_errors} with an error, in {options.output}", file=sys.stderr)
    return 0


def _check_files(options: BatchOptions) -> None:
    if not options.input.is_file():
        raise cli.CommandError(f"--input={options.input}: no such file")
    if options.output.is_dir():
        raise cli.CommandError(f"--output={options.output} is a directory; name a file")
    if options.output.exists() and not options.overwrite:
        raise cli.CommandError(f"--output={options.output} exists; choose another, or give --overwrite")
    if options.output.exists() and options.output.samefile(options.input):
        raise cli.CommandError(f"--output={options.output} is the input; choose another")
    if not options.output.absolute().parent.is_dir():
        raise cli.CommandError(f"--output={options.output}: there is no such directory; make it first")
    if not os.access(options.output.absolute().parent, os.W_OK):
        raise cli.CommandError(
            f"--output={options.output}: the directory cannot be written to; choose another"
        )


class _written_whole:  # noqa: N801 (used as a function)
    """A text file that appears under its name when it is complete, or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> IO[str]:
        directory = self._path.absolute().parent
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}.", suffix=".tmp", dir=directory)
        self._temporary = Path(name)
        self._file = os.fdopen(handle, "w", encoding="utf-8")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            umask = os.umask(0)
            os.umask(umask)
            self._temporary.chmod(0o666 & ~umask)  # mkstemp's files are the owner's alone
            os.replace(self._temporary, self._path)
        else:
            self._temporary.unlink(missing_ok=True)


def _rows(source: IO[bytes], engine: Engine, options: BatchOptions) -> Iterator[Row]:
    for number, line in enumerate(source, 1):
        if line.strip():
            yield make_row(line, number, engine, options.sampling)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def make_row(line: bytes, number: int, engine: Engine, sampling: Sampling) -> Row:
    """Parses a line; a bad one becomes a row with an error.

    Args:
      line: a JSON object.
      number: its place in the file, from 1, by which a line that is not JSON is known.
      engine: its tokenizer and its policy decide what a request becomes.
      sampling: the flags, for what the row leaves out.
    """
    try:
        columns = json.loads(line, parse_constant=_refuse_constant)
        # What is kept must be writable: no lone surrogates, and no number that only Python calls JSON.
        json.dumps(columns, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return Row(
            {"line": number}, error=ApiError(400, f"line {number} is not JSON: {error}", code="invalid_json")
        )
    if not isinstance(columns, dict):
        message = f"line {number} is not a JSON object"
        return Row({"line": number}, error=ApiError(400, message, code="invalid_json"))
    row = Row(columns, is_openai="url" in columns and "body" in columns)
    try:
        body = (_openai_body if row.is_openai else _native_body)(columns, sampling, engine.config.model)
        kind = "chatcmpl" if isinstance(body, ChatCompletionRequest) else "cmpl"
        response_id = f"{kind}-{uuid.uuid4().hex}"
        row.requests = _requests(body, engine, response_id)
        row.answer = make_answer(body, response_id, body.model, row.requests, engine.tokenizer)
    except ApiError as error:
        row.error = error
        return row
    if not row.is_openai and body.max_tokens is None and getattr(body, "max_completion_tokens", None) is None:
        limit = engine.scheduler_config.max_model_len
        row.requests = [_with_default_max_tokens(request, sampling, limit) for request in row.requests]
    return row


def _with_default_max_tokens(request: Request, sampling: Sampling, max_model_len: int) -> Request:
    """OpenAI's defaults are for OpenAI's rows; the others have the flag's."""
    max_tokens = sampling.params_for(len(request.prompt_token_ids), max_model_len).max_tokens
    return replace(request, params=replace(request.params, max_tokens=max_tokens))


def _requests(
    body: CompletionRequest | ChatCompletionRequest, engine: Engine, response_id: str
) -> list[Request]:
    try:
        return body.requests(engine.tokenizer, response_id, engine.scheduler_config)
    except RequestError as error:
        raise refused(error, type(body)) from error


def _openai_body(
    columns: Mapping[str, Any], sampling: Sampling, model: str
) -> CompletionRequest | ChatCompletionRequest:
    kind = _URLS.get(columns["url"]) if isinstance(columns["url"], str) else None
    if kind is None:
        raise ApiError(400, f"url={columns['url']!r:.100} must be one of {', '.join(_URLS)}", param="url")
    if columns.get("method", "POST") != "POST":
        raise ApiError(400, f"method={columns['method']!r:.100} must be POST", param="method")
    if not isinstance(columns["body"], dict):
        raise ApiError(400, "body must be a JSON object", param="body")
    body = {**_defaults(sampling, columns["body"]), **columns["body"]}
    if body.get("stream"):
        raise ApiError(400, "stream=true has no meaning in a batch; leave it out", param="stream")
    parsed = parse(kind, body)
    if parsed.model != model:
        message = f"The model {parsed.model!r} does not exist; this batch runs {model!r}, its --model"
        raise ApiError(404, message, param="model", code="model_not_found")
    return parsed


def _native_body(
    columns: Mapping[str, Any], sampling: Sampling, model: str
) -> CompletionRequest | ChatCompletionRequest:
    """The same parameters as over HTTP, so the same rules, and answers of one shape."""
    inputs = [name for name in _INPUTS if columns.get(name) is not None]
    if len(inputs) != 1:
        found = " and ".join(inputs) or "none"
        raise ApiError(400, f"the row must have one of {', '.join(_INPUTS)}; it has {found}")
    row = {key: value for key, value in columns.items() if key in _PARAMETERS and value is not None}
    body = {"model": model, "temperature": sampling.params.temperature, **_defaults(sampling, row), **row}
    ids = columns.get("prompt_token_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        message = f"prompt_token_ids={ids!r:.100} must be a list of integers"
        raise ApiError(400, message, param="prompt_token_ids", code="invalid_type")
    if inputs == ["messages"]:
        return parse(ChatCompletionRequest, body | {"messages": columns["messages"]})
    return parse(CompletionRequest, body | {"prompt": columns[inputs[0]]})


def _defaults(sampling: Sampling, row: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling flags that were given, but for --max_tokens where the row says it by its other name."""
    hidden = {"max_tokens"} if "max_completion_tokens" in row else set()
    return {name: value for name, value in sampling.given.items() if name not in hidden}


def run_rows(engine: Engine, rows: Iterator[Row]) -> Iterator[Row]:
    """Answers rows; yields them in their order, reading at most ROWS_IN_FLIGHT ahead."""
    in_order: list[Row] = []
    by_request: dict[str, Row] = {}
    exhausted = False
    while True:
        while not exhausted and len(in_order) < ROWS_IN_FLIGHT:
            row = next(rows, None)
            if row is None:
                exhausted = True
            else:
                in_order.append(row)
                _submit(engine, row, by_request)
        num_done = next((i for i, row in enumerate(in_order) if row.unfinished), len(in_order))
        yield from in_order[:num_done]
        del in_order[:num_done]
        if not in_order and exhausted:
            return
        if not num_done:
            for output in engine.step():
                _take(output, by_request)


def _submit(engine: Engine, row: Row, by_request: dict[str, Row]) -> None:
    if row.error is not None or row.answer is None:
        return
    try:
        for request in row.requests:
            engine.add_request(request)
            row.unfinished.add(request.request_id)
            by_request[request.request_id] = row
    except RequestError as error:
        row.error = refused(error, type(row.answer.body))
        for request_id in row.unfinished:
            engine.abort(request_id)
            del by_request[request_id]
        row.unfinished.clear()


def _take(output: TokenOutput, by_request: dict[str, Row]) -> None:
    row = by_request.get(output.request_id)
    if row is None or row.answer is None:
        return
    row.answer.add(output)
    if output.request_finished:
        row.unfinished.discard(output.request_id)
        del by_request[output.request_id]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
