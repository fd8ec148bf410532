"""uvicorn's server, but one whose last requests end with an answer when the time for them is up."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from jaxinfer.engine.async_engine import AsyncEngine

_GRACE_S = 5  # to send what the requests end with, before uvicorn cancels them


class DrainingServer(uvicorn.Server):
    """Lets running requests go on for some seconds after a signal, then ends them with an error.

    uvicorn alone would cancel them: their clients would see the connection break off.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, timeout_s: int) -> None:
        config.timeout_graceful_shutdown = timeout_s + _GRACE_S
        super().__init__(config)
        self._engine = engine
        self._timeout_s = timeout_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when all requests have ended."""
        closing = asyncio.create_task(self._close_late())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_late(self) -> None:
        await asyncio.sleep(self._timeout_s)
        await self._engine.close()
