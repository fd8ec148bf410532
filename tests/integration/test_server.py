"""The server as a process, with the demo model, through OpenAI's own client; and its end, with a tiny one."""

from __future__ import annotations

import http.client
import json
import math
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.processes import ENGINE_FLAGS, assert_one_line, run, serving

pytestmark = pytest.mark.slow

PROMPTS = ["The capital of France is", "Once upon a time", "2, 4, 6, 8,", "def main():", "The sea is"]
Server = tuple[subprocess.Popen[str], str]


@pytest.fixture(scope="module")
def server(demo_path: Path) -> Iterator[Server]:
    with serving(f"--model={demo_path}", "--served_model_name=demo", *ENGINE_FLAGS) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: str | list[str], **options: Any) -> list[str]:
    options = {"max_tokens": 12, "temperature": 0.0, **options}
    return [c.text for c in client.completions.create(model="demo", prompt=prompt, **options).choices]


def metrics(address: str) -> dict[str, float]:
    text = httpx.get(f"{address}/metrics").text
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    return {"/".join([s.name, *s.labels.values()]): s.value for s in samples}


def test_greedy_text_is_the_models(client: openai.OpenAI) -> None:
    (text,) = complete(client, PROMPTS[0])
    assert text.startswith(" Paris")


def test_an_answer_does_not_depend_on_what_else_runs(client: openai.OpenAI) -> None:
    alone = [complete(client, prompt)[0] for prompt in PROMPTS]
    assert complete(client, PROMPTS) == alone
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: complete(client, prompt)[0], PROMPTS * 4))
    assert together == alone * 4


def test_streamed_is_whole(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Say hello in French, with an emoji."}],
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": 11,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**options)
    stream = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert stream[-1].usage is not None
    assert whole.usage is not None
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        parts = [c for chunk in stream for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        entries = [e for c in parts if c.logprobs for e in c.logprobs.content or []]
        assert [e.bytes for e in entries] == [e.bytes for e in choice.logprobs.content or []]


def test_seed_repeats_and_completions_differ(client: openai.OpenAI) -> None:
    options: Any = {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 16}
    texts = complete(client, PROMPTS[1], **options)
    assert len(set(texts)) == 3
    assert complete(client, PROMPTS[1], **options) == texts
    assert complete(client, PROMPTS[1], **options | {"seed": 6}) != texts


def test_stop_ends_the_text(client: openai.OpenAI) -> None:
    (whole,) = complete(client, PROMPTS[2], max_tokens=20)
    stop = whole[6:9]
    answer = client.completions.create(
        model="demo", prompt=PROMPTS[2], max_tokens=20, temperature=0, stop=stop
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_are_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=6, temperature=0, logprobs=5, echo=True
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == choice.text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    assert logprobs.token_logprobs[0] is None
    for logprob, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
        assert 5 <= len(top) <= 6
        assert sum(map(math.exp, top.values())) <= 1.0001
        assert logprob in top.values()
    assert [max(top, key=lambda t: top[t]) for top in logprobs.top_logprobs[-6:]] == logprobs.tokens[-6:]


def test_a_prompt_over_the_limit_is_refused_with_both_counts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, "word " * 600)
    assert "512" in refused.value.message
    assert "600" in refused.value.message or "601" in refused.value.message
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_hangs_up_frees_its_pages(server: Server, streaming: bool) -> None:
    address = server[1]
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    body = {"model": "demo", "prompt": "Tell me", "max_tokens": 480, "ignore_eos": True, "stream": streaming}
    before = metrics(address)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_for(lambda: metrics(address)["jaxinfer:kv_cache_usage_perc"] > 0)
    assert connection.sock is not None
    connection.sock.close()
    connection.close()
    wait_for(lambda: metrics(address)["jaxinfer:num_requests_running"] == 0)
    after = metrics(address)
    assert after["jaxinfer:kv_cache_usage_perc"] == 0
    assert after["jaxinfer:request_success_total/abort"] == before["jaxinfer:request_success_total/abort"] + 1
    assert after["jaxinfer:generation_tokens_total"] < before["jaxinfer:generation_tokens_total"] + 480


def test_serving_compiles_nothing(server: Server, client: openai.OpenAI) -> None:
    complete(
        client, PROMPTS, temperature=0.7, presence_penalty=0.5, logit_bias={"9": 3}, extra_body={"top_k": 5}
    )
    assert metrics(server[1])["jaxinfer:compilations_total/serving"] == 0


def test_a_port_in_use_ends_a_second_server(server: Server, demo_path: Path) -> None:
    port = urlsplit(server[1]).port
    assert_one_line(run("serve", f"--model={demo_path}", f"--port={port}"), 1, str(port), "in use")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end(tiny: tuple[str, ...], number: signal.Signals) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 120, "ignore_eos": True, "stream": True, "n": 4}
    argv = (*tiny, "--served_model_name=tiny")
    with serving(*argv) as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["length"] * 4
        assert process.wait(timeout=30) == 0


def wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "waited 30 s in vain"
        time.sleep(0.01)
