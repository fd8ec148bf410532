"""What running requests see of a server's end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.fake_engine import MODEL, FakeEngine
from tests.fake_server import serving, wait_until

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 40, "ignore_eos": True}


def test_running_requests_may_end() -> None:
    engine = FakeEngine(step_s=0.005)
    with ThreadPoolExecutor(1) as pool:
        with serving(engine) as live:
            url = f"http://127.0.0.1:{live.port}/v1/completions"
            running = pool.submit(httpx.post, url, json=BODY)
            wait_until(lambda: engine.num_steps > 2)
        assert running.result().json()["usage"]["completion_tokens"] == 40


def test_requests_that_take_longer_end_with_an_error() -> None:
    engine = FakeEngine(step_s=0.1)
    with ThreadPoolExecutor(2) as pool:
        with serving(engine, shutdown_timeout_s=1) as live:
            base_url = f"http://127.0.0.1:{live.port}/v1"
            whole = pool.submit(httpx.post, f"{base_url}/completions", json={**BODY, "max_tokens": 400})
            client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
            options = {"max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
            stream = client.completions.create(model=MODEL, prompt="hi", **options)
            streamed = pool.submit(list, stream)
            wait_until(lambda: engine.stats().num_running == 2)
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "engine_unavailable"
        with pytest.raises(openai.APIError, match="shutting down"):
            streamed.result()
