"""The FastAPI application: routes, errors in OpenAI's shape, streams, clients that hang up."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from absl import logging
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jaxinfer.engine.async_engine import (
    AsyncEngine,
    EngineUnavailableError,
    OutputStream,
    QueueFullError,
    ShuttingDownError,
)
from jaxinfer.server.openai import (
    MAX_ECHO,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    parse,
    refused,
)
from jaxinfer.server.responses import ChatAnswer, CompletionAnswer, make_answer
from jaxinfer.types import FinishReason, RequestError

MAX_BODY_BYTES = 32 << 20  # a prompt of some million tokens; larger bodies are answered with 413
RETRY_AFTER_S = 1

T = TypeVar("T")
Body = CompletionRequest | ChatCompletionRequest
Answer = CompletionAnswer | ChatAnswer


def create_app(engine: AsyncEngine, served_model_name: str) -> FastAPI:
    """The application. It starts `engine` when it comes up, and closes it when it goes down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.close()

    app = FastAPI(title="jaxinfer", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    handlers: dict[Any, Callable[..., Any]] = {
        ApiError: _on_api_error,
        HTTPException: _on_http_exception,
        ClientDisconnect: _on_disconnect,
        Exception: _on_exception,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    _add_state_routes(app, engine)
    _add_openai_routes(app, _OpenAiRoutes(engine, served_model_name))
    return app


def _add_state_routes(app: FastAPI, engine: AsyncEngine) -> None:
    @app.get("/health")
    async def health() -> Response:
        if engine.error is not None:
            return _error_response(ApiError(503, str(engine.error), code="engine_unavailable"))
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        instruments = engine.engine.metrics
        return Response(instruments.render(), headers={"Content-Type": instruments.content_type})

    @app.get("/v1/memory")
    async def memory() -> Response:
        return JSONResponse(engine.engine.memory().to_json())

    @app.get("/version")
    async def version_of_package() -> Response:
        return JSONResponse({"version": _version()})


def _add_openai_routes(app: FastAPI, routes: _OpenAiRoutes) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [routes.model_object()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        routes.check_model(name)
        return JSONResponse(routes.model_object())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await routes.answer(request, CompletionRequest, "cmpl")

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await routes.answer(request, ChatCompletionRequest, "chatcmpl")


class _OpenAiRoutes:
    """From a request's body to its answer."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._created = int(time.time())

    def model_object(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxinfer",
            "max_model_len": self._engine.engine.scheduler_config.max_model_len,
        }

    def check_model(self, name: str) -> None:
        if name != self._model:
            message = f"The model {name!r:.{MAX_ECHO}} does not exist; this server has {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def answer(
        self, request: Request, kind: type[CompletionRequest] | type[ChatCompletionRequest], prefix: str
    ) -> Response:
        body: Body = parse(kind, await _read_body(request))
        self.check_model(body.model)
        response_id = f"{prefix}-{uuid.uuid4().hex}"
        hung_up = asyncio.create_task(_hung_up(request.receive))
        streaming = False
        try:
            answer, stream = await _unless(hung_up, self._submit(body, response_id))
            hung_up.add_done_callback(lambda _: stream.close())
            if not body.stream:
                return JSONResponse(await _collect(answer, stream, hung_up))
            streaming = True
            return _EventStream(_events(body, answer, stream), hung_up)
        finally:
            if not streaming:
                hung_up.cancel()

    async def _submit(self, body: Body, response_id: str) -> tuple[Answer, OutputStream]:
        engine = self._engine.engine
        try:
            # A long prompt takes milliseconds, in which the loop must serve other requests' tokens.
            requests = await asyncio.to_thread(
                body.requests, engine.tokenizer, response_id, engine.scheduler_config
            )
            stream = await self._engine.submit(requests)
        except RequestError as error:
            raise refused(error, type(body)) from error
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full") from error
        except EngineUnavailableError as error:
            raise ApiError(503, str(error), code="engine_unavailable") from error
        return make_answer(body, response_id, self._model, requests, engine.tokenizer), stream


async def _read_body(request: Request) -> bytes:
    _check_headers(request)
    _check_size(int(request.headers.get("content-length", "0")))  # before any of it is read
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        _check_size(size)
        chunks.append(chunk)
    return b"".join(chunks)


def _check_headers(request: Request) -> None:
    """Refuses what isn't said to be JSON: a browser lets any page send the rest to a server on localhost."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        message = f"Content-Type is {kind!r:.{MAX_ECHO}}; it must be application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"Content-Encoding is {encoding!r:.{MAX_ECHO}}; send the body as it is"
        raise ApiError(415, message, code="unsupported_media_type")


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        message = f"The body is over {MAX_BODY_BYTES} bytes; send a shorter one"
        raise ApiError(413, message, code="body_too_large")


async def _collect(answer: Answer, stream: OutputStream, hung_up: asyncio.Task[None]) -> dict[str, Any]:
    try:
        async for output in stream:
            _check_not_aborted(output.finish_reason)
            answer.add(output)
    except EngineUnavailableError as error:
        raise _unfinished(error) from error
    finally:
        stream.close()
    if hung_up.done():
        raise ClientDisconnect
    return answer.whole()


async def _events(body: Body, answer: Answer, stream: OutputStream) -> AsyncGenerator[str, None]:
    """Server-sent events: the chunks and [DONE], or an error event in place of what is missing."""
    try:
        async for output in stream:
            _check_not_aborted(output.finish_reason)
            chunks = answer.chunks(output)
            if chunks:  # one write for all of them
                yield "".join(map(_event, chunks))
        if body.include_usage:
            yield _event(answer.usage_chunk())
        yield "data: [DONE]\n\n"
    except EngineUnavailableError as error:
        yield _event(_unfinished(error).body())
    except Exception as error:  # the status line is out: the stream is the only place left to say so
        logging.exception("A stream failed.")
        yield _event(ApiError(500, f"internal error: {error}", code="internal_error").body())
    finally:
        stream.close()


def _unfinished(error: EngineUnavailableError) -> ApiError:
    if isinstance(error, ShuttingDownError):
        return ApiError(503, str(error), code="engine_unavailable")
    return ApiError(500, str(error), code="engine_failed")


def _check_not_aborted(reason: FinishReason | None) -> None:
    if reason is FinishReason.ABORT:
        raise EngineUnavailableError("the request was aborted")


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class _EventStream(Response):
    """Sends events until they end or the client hangs up.

    Starlette's StreamingResponse reads `receive` for itself or, by the server's protocol version,
    not at all; here one task watches it, from the request's beginning to the answer's end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], hung_up: asyncio.Task[None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._hung_up = hung_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._hung_up.cancel()
            await self._events.aclose()


async def _hung_up(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(hung_up: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, or cancels it and raises ClientDisconnect where the client goes first."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task, hung_up), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()


# --- Errors ---------------------------------------------------------------------------------------


def _error_response(error: ApiError) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers=headers)


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return _error_response(error)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """404 and 405, which the router raises."""
    message = f"{error.detail}: {request.method} {request.url.path:.{MAX_ECHO}}"
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return JSONResponse(
        ApiError(error.status_code, message, code=code).body(), error.status_code, headers=error.headers
    )


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    """Nobody reads this; it only keeps a traceback out of the log."""
    return Response(status_code=499)


async def _on_exception(request: Request, error: Exception) -> Response:
    """A bug. The server's log has the traceback; the client gets none."""
    return _error_response(ApiError(500, "internal error; the server's log says more", code="internal_error"))


def _version() -> str:
    try:
        return version("jaxinfer")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
