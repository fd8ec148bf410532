"""Bodies and routes that the server refuses whatever they ask for; a busy server, and one that fails."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from jaxinfer.config import SchedulerConfig
from tests.fake_engine import MODEL, FakeEngine
from tests.fake_server import CHAT, COMPLETIONS, JSON, Server, hi, serving, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(FakeEngine()) as live:
        yield live


@pytest.fixture
def slow() -> Iterator[Server]:
    """A step takes 5 ms, and three sequences fit in a batch."""
    with serving(
        FakeEngine(scheduler_config=SchedulerConfig(3, 512, 1 << 20), step_s=0.005), max_waiting_requests=4
    ) as live:
        yield live


# --- Completions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'"x"', b'{"model": NaN}', b'{"model": "\xff"}'])
def test_malformed_bodies(server: Server, body: bytes) -> None:
    response = server.http.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_what_is_not_said_to_be_json_is_415(server: Server, headers: dict[str, str]) -> None:
    """A page of anywhere may send text/plain to a server on localhost, without asking it first."""
    response = server.http.post(COMPLETIONS, content=json.dumps(hi()).encode(), headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"
    wanted = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.http.post(COMPLETIONS, content=json.dumps(hi()).encode(), headers=wanted).status_code == 200


def test_unknown_routes_and_methods(server: Server) -> None:
    for method, path, status, code in (
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", f"{CHAT}/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
    ):
        response = server.http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert path in response.json()["error"]["message"]


def test_body_over_the_limit(server: Server) -> None:
    blanks = b" " * (1 << 20)
    for content in (blanks * 33, (blanks for _ in range(33))):  # with a Content-Length, and in chunks without
        response = server.http.post(CHAT, content=content, headers=JSON)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


def test_errors_are_the_clients_own(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        server.client.completions.create(model=MODEL, prompt="hi", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        server.client.completions.create(model="other", prompt="hi")
    assert missing.value.code == "model_not_found"


# --- State ----------------------------------------------------------------------------------------


def test_models(server: Server) -> None:
    assert [m.id for m in server.client.models.list()] == [MODEL]
    assert server.client.models.retrieve(MODEL).owned_by == "jaxinfer"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("a/b")


def test_health_version_metrics(server: Server) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json().keys() == {"version"}
    metrics = server.http.get("/metrics")
    assert metrics.headers["content-type"] == server.engine.metrics.content_type
    assert 'jaxinfer:request_success_total{finished_reason="stop"}' in metrics.text


def test_memory_is_the_engines_ledger(server: Server) -> None:
    body = server.http.get("/v1/memory").json()
    assert body["planned"]["weights"] == 2000
    assert body["planned"]["device_bytes"] == 2800  # host staging is not on the device
    assert body["measured"] == {"weights": 2001, "kv_cache": 800, "device_bytes": 2801}
    assert (body["budget_bytes"], body["device"]) == (4000, None)
    assert body["kv_cache"] == {
        "page_size": 16,
        "num_pages": 8,
        "num_groups": 1,
        "backend": "xla",
        "dtype": "float32",
        "page_bytes": 100,
        "num_tokens": 112,
        "num_used_pages": 3,
        "num_cached_pages": 2,
    }


def test_one_thread_owns_the_engine(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(
            pool.map(lambda i: server.http.post(COMPLETIONS, json=hi(prompt=f"p{i}")).json(), range(32))
        )
    assert [t["choices"][0]["text"] for t in texts] == [f"p{i}" for i in range(32)]
    assert len(server.engine.threads) == 1


def test_idle_engine_takes_no_cpu(server: Server) -> None:
    steps = server.engine.num_steps
    start_s = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - start_s < 0.05
    assert server.engine.num_steps == steps


# --- Trouble --------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_hangs_up_is_aborted(slow: Server, streaming: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", slow.port)
    body = hi(max_tokens=500, ignore_eos=True, stream=streaming, n=2)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: slow.engine.num_steps > 3)
    steps_before = slow.engine.num_steps
    assert connection.sock is not None
    connection.sock.close()
    connection.close()
    wait_until(lambda: bool(slow.engine.aborted))
    ((_, step),) = slow.engine.aborted
    assert step <= steps_before + 20  # of 500: what passes until the loop sees the socket
    assert not slow.engine.has_unfinished()
    wait_until(lambda: "jaxinfer:num_requests_running 0.0" in slow.http.get("/metrics").text)


def test_a_full_queue_is_429_and_others_go_on(slow: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        body = hi(prompt=["a", "b", "c", "d"], max_tokens=50, ignore_eos=True)
        running = pool.submit(slow.http.post, COMPLETIONS, json=body)
        wait_until(lambda: slow.engine.num_steps > 1)  # three of four have a token, one waits
        assert slow.http.post(COMPLETIONS, json=hi(prompt=["x"] * 5)).status_code == 400
        refused = slow.http.post(COMPLETIONS, json=hi(prompt=["x"] * 4))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert slow.http.post(COMPLETIONS, json=hi()).status_code == 200
        assert len(running.result().json()["choices"]) == 4


def test_a_bad_prompt_among_good_ones_takes_them_all_back(slow: Server) -> None:
    limited = FakeEngine(scheduler_config=SchedulerConfig(3, 512, 16))
    with serving(limited) as live:
        response = live.http.post(COMPLETIONS, json=hi(prompt=["ok", "x" * 16]))
        assert response.status_code == 400
        assert "16 tokens, over the limit of 16" in response.json()["error"]["message"]
        wait_until(lambda: not limited.has_unfinished())


def test_a_failed_engine_answers_everybody() -> None:
    engine = FakeEngine(step_s=0.005)
    with serving(engine) as live, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(live.http.post, COMPLETIONS, json=hi(max_tokens=500, ignore_eos=True))
        stream = live.client.completions.create(
            **hi(max_tokens=500, stream=True), extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        engine.fail = True
        with pytest.raises(openai.APIError, match="out of luck"):
            list(stream)
        assert whole.result().status_code == 500
        assert whole.result().json()["error"]["code"] == "engine_failed"
        assert live.http.get("/health").status_code == 503
        late = live.http.post(COMPLETIONS, json=hi())
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
