"""The engine behind asyncio: a thread of its own steps it, queues carry requests in and tokens out."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from absl import logging

from jaxinfer.config import SchedulerConfig
from jaxinfer.memory.measured import MemoryReport
from jaxinfer.metrics import EngineStats, Metrics
from jaxinfer.parallel.hosts import HostsError
from jaxinfer.text import Tokenizer
from jaxinfer.types import Request, RequestError, TokenOutput


class EngineLike(Protocol):
    """What this module asks of an engine: `jaxinfer.engine.engine.Engine`, or a fake in tests."""

    tokenizer: Tokenizer
    metrics: Metrics
    scheduler_config: SchedulerConfig

    def add_request(self, request: Request) -> None:
        """Takes a request; raises RequestError for one it cannot honour."""
        ...

    def abort(self, request_id: str) -> None:
        """Drops a request, if it is there, and frees its pages."""
        ...

    def step(self) -> list[TokenOutput]:
        """One turn of the loop."""
        ...

    def has_unfinished(self) -> bool:
        """True while step() has work."""
        ...

    def stats(self) -> EngineStats:
        """The state now."""
        ...

    def memory(self) -> MemoryReport:
        """The ledger now; any thread may ask."""
        ...


class EngineUnavailableError(RuntimeError):
    """The engine failed or is shutting down: nobody's request is at fault."""


class ShuttingDownError(EngineUnavailableError):
    """The time that running requests have after a signal is up."""


class QueueFullError(RuntimeError):
    """Too many requests wait already; try again later."""


class OutputStream:
    """The outputs of requests that were submitted together, in the order they come.

    An async iterator that ends with the last request. Raises EngineUnavailableError where the
    engine fails. `close` aborts what is unfinished; closing twice, or at the end, does nothing.
    Belongs to the event loop's thread.
    """

    def __init__(self, requests: Sequence[Request], on_close: Callable[[OutputStream], None]) -> None:
        """on_close: called once, by `close`, with this stream."""
        self.unfinished = dict.fromkeys(r.request_id for r in requests)  # a set that keeps its order
        # Completions, as request_id and index, that wait for their first token.
        self.without_token = {(r.request_id, index) for r in requests for index in range(r.params.n)}
        self._on_close = on_close
        self._outputs: deque[TokenOutput] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._error: Exception | None = None

    def put(self, output: TokenOutput) -> None:
        """Takes an output of one of the requests."""
        self.without_token.discard((output.request_id, output.index))
        if output.request_finished:
            self.unfinished.pop(output.request_id, None)
        self._outputs.append(output)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """Makes the iteration raise `error` after the outputs that came before it."""
        self._error = error
        self._wake.set()

    def close(self) -> None:
        """Ends the iteration and aborts the requests that are unfinished."""
        if not self._closed:
            self._closed = True
            self._wake.set()
            self._on_close(self)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> TokenOutput:
        while not self._outputs or self._closed:
            if self._closed or (not self.unfinished and self._error is None):
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        return self._outputs.popleft()


class AsyncEngine:
    """Owns the thread that steps an engine. Its public methods belong to one event loop."""

    def __init__(self, engine: EngineLike, max_waiting_requests: int = 1024) -> None:
        """max_waiting_requests: completions without a first token, over which `submit` refuses more.
        A request counts as its `n`.
        """
        self.engine = engine
        self.max_waiting_requests = max_waiting_requests
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}
        self._num_waiting = 0
        self._error: EngineUnavailableError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        self._stopping = False  # only the engine's thread looks at it

    @property
    def error(self) -> EngineUnavailableError | None:
        """Why no request is taken, or None while all is well."""
        return self._error

    def start(self) -> None:
        """Starts the thread. Call it once, on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self.engine.metrics.observe_step(self.engine.stats())
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hands the requests to the engine, all or none; returns once it has taken them.

        Raises:
          RequestError: the engine cannot honour one of them.
          QueueFullError: too many requests wait.
          EngineUnavailableError: the engine failed or is shutting down.
        """
        if self._error is not None:
            raise EngineUnavailableError(str(self._error))
        stream = OutputStream(requests, self._close_stream)
        num_new, limit = len(stream.without_token), self.max_waiting_requests
        if num_new > limit:
            raise RequestError(
                f"n times prompts is {num_new}, over the server's limit of {limit}; ask for less"
            )
        if self._num_waiting + num_new > limit:
            raise QueueFullError(f"{self._num_waiting} completions wait already; try again later")
        self._streams.update(dict.fromkeys(stream.unfinished, stream))
        self._num_waiting += num_new
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put(lambda: self._add(requests, accepted))
        try:
            await accepted
        except BaseException:  # refused, or the client went away: nothing of it stays behind
            stream.close()
            raise
        return stream

    async def close(self) -> None:
        """Aborts what still runs and ends the thread; what is submitted from now on is refused."""
        self._fail_all(ShuttingDownError("the server is shutting down"))
        self._inbox.put(self._stop)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def fail(self, message: str) -> None:
        """Ends all requests with an error, and refuses those that come; any thread may call it, also while
        the engine's own waits for what never comes.
        """
        self._error = EngineUnavailableError(f"the engine failed: {message}")
        if self._loop is not None:
            self._call(self._fail_all, self._error)

    # --- On the event loop's thread -------------------------------------------------------------

    def _close_stream(self, stream: OutputStream) -> None:
        request_ids = tuple(stream.unfinished)
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        self._num_waiting -= len(stream.without_token)
        stream.without_token.clear()
        if request_ids:
            self._inbox.put(lambda: self._abort(request_ids))

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # closed meanwhile
                continue
            self._num_waiting -= (output.request_id, output.index) in stream.without_token
            stream.put(output)
            if output.request_finished:
                del self._streams[output.request_id]

    def _fail_all(self, error: EngineUnavailableError) -> None:
        self._error = self._error or error
        for stream in set(self._streams.values()):
            stream.fail(self._error)

    # --- On the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._read_inbox()
                if self.engine.has_unfinished():
                    outputs = self.engine.step()
                    self.engine.metrics.observe_step(self.engine.stats())
                    if outputs:
                        self._call(self._deliver, outputs)
        except Exception as error:  # whatever it is, the clients must hear of it
            # That a host has gone is no fault of ours to be found by a traceback.
            logging.error("The engine failed: %s", error, exc_info=not isinstance(error, HostsError))
            # Set here already: what the inbox holds must not reach an engine that nobody steps.
            self._error = EngineUnavailableError(f"the engine failed: {error}")
            self._call(self._fail_all, self._error)
            while not self._stopping:  # answers those that came before they could know
                self._inbox.get()()

    def _read_inbox(self) -> None:
        """Does what the inbox asks for; waits for something where the engine has nothing to do."""
        if not self.engine.has_unfinished() and self._inbox.empty():
            self.engine.metrics.observe_step(self.engine.stats())  # what an abort has changed
            self._inbox.get()()
        while not self._inbox.empty():  # nobody else takes from it
            self._inbox.get()()

    def _add(self, requests: Sequence[Request], accepted: asyncio.Future[None]) -> None:
        error: Exception | None = self._error
        if error is None:
            try:
                for request in requests:
                    self.engine.add_request(request)
            except RequestError as refusal:  # the stream's close aborts those added before it
                error = refusal
        self._call(_resolve, accepted, error)

    def _abort(self, request_ids: Sequence[str]) -> None:
        if self._error is None:
            for request_id in request_ids:
                self.engine.abort(request_id)

    def _stop(self) -> None:
        self._stopping = True

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Calls back on the event loop's thread, once for all of a step's outputs."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed without `close`: nobody listens any more
            self._stopping = True


def _resolve(accepted: asyncio.Future[None], error: Exception | None) -> None:
    if accepted.done():  # cancelled
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)
