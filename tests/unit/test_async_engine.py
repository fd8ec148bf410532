from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from jaxinfer.config import SchedulerConfig
from jaxinfer.engine.async_engine import AsyncEngine, EngineUnavailableError, OutputStream, QueueFullError
from jaxinfer.types import Request, RequestError, SamplingParams
from tests.fake_engine import FakeEngine


def make_engine(**options: Any) -> FakeEngine:
    return FakeEngine(scheduler_config=SchedulerConfig(64, 512, 1 << 20), **options)


def request(name: str, prompt: str = "hello", **params: Any) -> Request:
    return Request(name, tuple(prompt.encode()), SamplingParams(**params), time.monotonic())


def forever(name: str) -> Request:
    return request(name, ignore_eos=True, max_tokens=100_000)


def run(engine: AsyncEngine, work: Coroutine[Any, Any, None]) -> None:
    async def inner() -> None:
        engine.start()
        try:
            await asyncio.wait_for(work, 20)
        finally:
            await engine.close()

    asyncio.run(inner())


async def text(stream: OutputStream) -> dict[str, str]:
    texts: dict[str, str] = {}
    async for output in stream:
        texts[output.request_id] = texts.get(output.request_id, "") + output.text
    return texts


def test_requests_submitted_together_end_together() -> None:
    engine = AsyncEngine(make_engine())

    async def work() -> None:
        one, two = (
            await engine.submit([request("a", "abc"), request("b", "de")]),
            await engine.submit([request("c")]),
        )
        assert await text(one) == {"a": "abc", "b": "de"}
        assert await text(two) == {"c": "hello"}

    run(engine, work())


def test_closing_a_stream_aborts_within_a_step() -> None:
    fake = make_engine(step_s=0.002)
    engine = AsyncEngine(fake)

    async def work() -> None:
        stream = await engine.submit([forever("a"), forever("b")])
        await anext(stream)
        other = await engine.submit([request("c")])
        steps = fake.num_steps
        stream.close()
        stream.close()
        assert await text(other) == {"c": "hello"}
        assert [name for name, _ in fake.aborted] == ["a", "b"]
        assert all(step <= steps + 1 for _, step in fake.aborted)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(engine, work())


def test_a_refused_request_takes_back_those_submitted_with_it() -> None:
    fake = FakeEngine(scheduler_config=SchedulerConfig(4, 512, 8))
    engine = AsyncEngine(fake, max_waiting_requests=2)

    async def work() -> None:
        for _ in range(3):  # more often than there is room for, so that none of it may stay
            with pytest.raises(RequestError, match="9 tokens, over the limit of 8"):
                await engine.submit([request("a", "ok"), request("b", "too long!")])
        assert await text(await engine.submit([request("c", "ok")])) == {"c": "ok"}

    run(engine, work())


def test_a_cancelled_submit_leaves_nothing() -> None:
    fake = make_engine(step_s=0.02)
    engine = AsyncEngine(fake, max_waiting_requests=1)

    async def work() -> None:
        first = await engine.submit([forever("a")])
        await anext(first)
        task = asyncio.create_task(engine.submit([forever("b")]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await text(await engine.submit([request("c")])) == {"c": "hello"}
        assert "b" in dict(fake.aborted)
        first.close()

    run(engine, work())


def test_the_queue_is_bounded_by_requests_without_a_token() -> None:
    engine = AsyncEngine(FakeEngine(scheduler_config=SchedulerConfig(1, 512, 512)), max_waiting_requests=1)

    async def work() -> None:
        running = await engine.submit([forever("a")])
        await anext(running)
        waiting = await engine.submit([request("b")])
        with pytest.raises(QueueFullError, match="1 completions wait"):
            await engine.submit([request("c")])
        running.close()
        assert await text(waiting) == {"b": "hello"}
        assert await text(await engine.submit([request("c")])) == {"c": "hello"}

    run(engine, work())


def test_a_request_waits_as_its_n() -> None:
    """Each completion is one of those that wait, until its own first token."""
    fake = FakeEngine(scheduler_config=SchedulerConfig(1, 512, 512), step_s=0.002)
    engine = AsyncEngine(fake, max_waiting_requests=5)

    async def work() -> None:
        with pytest.raises(RequestError, match="n times prompts is 6, over the server's limit of 5"):
            await engine.submit([request("a", n=3), request("b", n=3)])
        stream = await engine.submit([request("a", ignore_eos=True, max_tokens=50, n=4)])
        await anext(stream)  # of completion 0; three have nothing yet
        with pytest.raises(QueueFullError, match="3 completions wait"):
            await engine.submit([request("b", n=3)])
        other = await engine.submit([request("c", n=2)])
        stream.close()
        async for _ in other:
            pass
        assert len([o async for o in await engine.submit([request("d", "x", n=5)])]) == 2 + 4 * 1

    run(engine, work())


def test_after_a_failure_and_after_close_nothing_is_taken() -> None:
    fake = make_engine(step_s=0.002)
    engine = AsyncEngine(fake)

    async def work() -> None:
        stream = await engine.submit([forever("a")])
        await anext(stream)
        fake.fail = True
        with pytest.raises(EngineUnavailableError, match="out of luck"):
            await text(stream)
        with pytest.raises(EngineUnavailableError, match="out of luck"):
            await engine.submit([request("b")])

    run(engine, work())
    healthy = AsyncEngine(make_engine())

    async def close() -> None:
        stream = await healthy.submit([forever("a")])
        await healthy.close()
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await text(stream)
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await healthy.submit([request("b")])

    run(healthy, close())


def test_a_failure_is_heard_while_the_engine_hangs() -> None:
    """As of another host, which the engine's thread may wait for."""
    fake = make_engine(step_s=0.5)
    engine = AsyncEngine(fake)

    async def work() -> None:
        stream = await engine.submit([forever("a")])
        start_s = time.monotonic()
        await asyncio.to_thread(engine.fail, "host 1 has gone")
        with pytest.raises(EngineUnavailableError, match="the engine failed: host 1 has gone"):
            async for _ in stream:
                pass
        assert time.monotonic() - start_s < 0.5
        with pytest.raises(EngineUnavailableError, match="host 1 has gone"):
            await engine.submit([request("b")])

    run(engine, work())
