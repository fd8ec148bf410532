"""The HTTP app over a fake engine, on a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import uvicorn

from jaxinfer.engine.async_engine import AsyncEngine
from jaxinfer.server.app import create_app
from jaxinfer.server.draining import DrainingServer
from tests.fake_engine import MODEL, FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def hi(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


class Server:
    """The app on a free port, in a thread."""

    def __init__(
        self,
        engine: FakeEngine,
        max_waiting_requests: int = 1024,
        model: str = MODEL,
        shutdown_timeout_s: int = 5,
    ) -> None:
        self.engine = engine
        self.async_engine = AsyncEngine(engine, max_waiting_requests)
        config = uvicorn.Config(create_app(self.async_engine, model), log_level="critical", ws="none")
        self._server = DrainingServer(config, self.async_engine, shutdown_timeout_s)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=10)
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0
        )

    def close(self) -> None:
        self.http.close()
        self.client.close()
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._listener.close()
        assert not self._thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s, "waited 5 s in vain"
        time.sleep(0.001)


@contextlib.contextmanager
def serving(engine: FakeEngine, **options: Any) -> Iterator[Server]:
    """Options as `Server` has them."""
    server = Server(engine, **options)
    try:
        yield server
    finally:
        server.close()
