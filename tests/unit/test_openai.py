"""OpenAI's API over a fake engine, through real sockets and, where it can be, OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_engine import EOS, MODEL, FakeEngine
from tests.fake_server import CHAT, COMPLETIONS, Server, chat, hi, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(FakeEngine()) as live:
        yield live


# --- Completions ----------------------------------------------------------------------------------


def test_completion(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt="hé")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in answer.choices] == [
        (0, "hé", "stop", None)
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        4,
        7,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "cde"], ["ab", "cde"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_every_form_of_prompt(server: Server, prompt: Any, texts: list[str]) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=prompt)
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(texts))


def test_choices_are_numbered_by_prompt_and_completion(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=["ab", "cd"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ab"), (1, "b"), (2, "cd"), (3, "d")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4


def test_completion_stops(server: Server) -> None:
    choice = server.client.completions.create(model=MODEL, prompt="abcdef", stop=["de", "zz"]).choices[0]
    assert (choice.text, choice.finish_reason) == ("abc", "stop")
    assert choice.model_extra == {"stop_reason": "de"}
    extra = {"include_stop_str_in_output": True}
    choice = server.client.completions.create(
        model=MODEL, prompt="abcdef", stop="de", extra_body=extra
    ).choices[0]
    assert choice.text == "abcde"
    choice = server.client.completions.create(model=MODEL, prompt="abcdef", max_tokens=2).choices[0]
    assert (choice.text, choice.finish_reason) == ("ab", "length")


def test_completion_has_sixteen_tokens_at_most_unless_told(server: Server) -> None:
    assert server.client.completions.create(model=MODEL, prompt="x" * 40).choices[0].text == "x" * 16


def test_completion_logprobs(server: Server) -> None:
    choice = server.client.completions.create(model=MODEL, prompt="hé", logprobs=3).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert choice.logprobs.token_logprobs == [-1.5] * 4
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {"!": -0.25, "h": -1.5, "?": -9999.0}
    assert choice.logprobs.text_offset == [0, 1, 1, 2]
    one = server.client.completions.create(model=MODEL, prompt="h", logprobs=1).choices[0].logprobs
    assert one is not None
    assert one.top_logprobs is not None
    assert one.top_logprobs[0] == {"!": -0.25, "h": -1.5}  # the sampled token comes in any case


def test_completion_echo_with_logprobs(server: Server) -> None:
    choice = server.client.completions.create(model=MODEL, prompt="ab", echo=True, logprobs=1).choices[0]
    assert choice.text == "abab"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "a", "b", "<eos>"]
    assert choice.logprobs.token_logprobs == [None, -1.5, -1.5, -1.5, -1.5]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.model_extra == {"stop_reason": None}  # prompt_logprobs were not asked for


def test_prompt_logprobs(server: Server) -> None:
    choice = server.client.completions.create(
        model=MODEL, prompt="ab", extra_body={"prompt_logprobs": 1}
    ).choices[0]
    assert choice.model_extra is not None
    assert choice.model_extra["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
            "33": {"logprob": -0.25, "rank": 1, "decoded_token": "!"},
        },
    ]


def test_streamed_completion_is_the_whole_one(server: Server) -> None:
    options: Any = {
        "model": MODEL,
        "prompt": ["hé you", "ab"],
        "n": 2,
        "logprobs": 2,
        "echo": True,
        "stop": "o",
    }
    whole = server.client.completions.create(**options)
    chunks = list(
        server.client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])
    for expected in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert "".join(c.text for c in parts) == expected.text
        assert [c.finish_reason for c in parts][-1] == expected.finish_reason
        assert expected.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [x for c in parts for x in getattr(c.logprobs, name)]
            assert joined == getattr(expected.logprobs, name)


# --- Chat -----------------------------------------------------------------------------------------


def test_chat(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert "system:be;" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_can_be_sent_back_as_history(server: Server) -> None:
    first = server.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    history: Any = [{"role": "user", "content": "hi"}, first.choices[0].message]
    again = server.client.chat.completions.create(model=MODEL, messages=history)
    assert again.choices[0].message.content == "user:hi;assistant:user:hi;;"


def test_chat_logprobs(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hé"}], logprobs=True, top_logprobs=2, max_tokens=7
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert [e.bytes for e in entries][-1] == [0xC3]
    assert (entries[0].token, entries[0].logprob, entries[0].bytes) == ("u", -1.5, [ord("u")])
    assert [(t.token, t.logprob) for t in entries[0].top_logprobs] == [("!", -0.25), ("u", -1.5)]
    assert answer.choices[0].message.content == "user:h\ufffd"


def test_streamed_chat(server: Server) -> None:
    options: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hé"}], "n": 2, "logprobs": True}
    whole = server.client.chat.completions.create(**options)
    chunks = list(server.client.chat.completions.create(**options, stream=True))
    for expected in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert (parts[0].delta.role, parts[0].delta.content) == ("assistant", "")
        assert [c.delta.role for c in parts[1:]] == [None] * (len(parts) - 1)
        assert "".join(c.delta.content or "" for c in parts) == expected.message.content
        assert [c.finish_reason for c in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert expected.logprobs is not None
        entries = [e for c in parts if c.logprobs for e in c.logprobs.content or []]
        assert entries == expected.logprobs.content
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_is_server_sent_events(server: Server) -> None:
    with server.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = response.read().decode()
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert {json.loads(e.removeprefix("data: "))["object"] for e in events[:-2]} == {"chat.completion.chunk"}


# --- What cannot be honoured ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (COMPLETIONS, hi(temprature=1), 400, "temprature", "unknown_parameter"),
        (COMPLETIONS, hi(max_completion_tokens=1), 400, "max_completion_tokens", "unknown_parameter"),
        (COMPLETIONS, hi(suffix="x"), 400, "suffix", "unsupported_parameter"),
        (COMPLETIONS, hi(best_of=2), 400, "best_of", "invalid_value"),
        (COMPLETIONS, hi(temperature="1"), 400, "temperature", "invalid_value"),
        (COMPLETIONS, hi(temperature=-1), 400, "temperature", "invalid_value"),
        (COMPLETIONS, hi(top_p=0), 400, "top_p", "invalid_value"),
        (COMPLETIONS, hi(n=0), 400, "n", "invalid_value"),
        (COMPLETIONS, hi(n=True), 400, "n", "invalid_value"),
        (COMPLETIONS, hi(max_tokens=0), 400, "max_tokens", "invalid_value"),
        (COMPLETIONS, hi(logprobs=21), 400, "logprobs", "invalid_value"),
        (COMPLETIONS, hi(stop=[1]), 400, "stop[0]", "invalid_value"),
        (COMPLETIONS, hi(stop=""), 400, "stop", "invalid_value"),
        (COMPLETIONS, hi(logit_bias={"x": 1}), 400, "logit_bias", "invalid_value"),
        (COMPLETIONS, hi(logit_bias={"1": 101}), 400, "logit_bias", "invalid_value"),
        (COMPLETIONS, hi(logit_bias={"9" * 5000: 1}), 400, "logit_bias", "invalid_value"),
        (COMPLETIONS, hi(logit_bias={"01": 1, "1": 2}), 400, "logit_bias", "invalid_value"),
        (COMPLETIONS, hi(logit_bias={str(i): 1 for i in range(301)}), 400, "logit_bias", "invalid_value"),
        (COMPLETIONS, hi(stop=["a"] * 65), 400, "stop", "invalid_value"),
        (COMPLETIONS, hi(repetition_penalty=1e-45), 400, "repetition_penalty", "invalid_value"),
        (COMPLETIONS, hi(**{"k" * 10**6: 1}), 400, "k" * 100, "unknown_parameter"),
        (COMPLETIONS, hi(model="m" * 10**6), 404, "model", "model_not_found"),
        (COMPLETIONS, hi(priority=1), 400, "priority", "invalid_value"),
        (COMPLETIONS, hi(stream_options={"include_usage": True}), 400, "stream_options", "invalid_value"),
        (COMPLETIONS, hi(stream=True, prompt_logprobs=1), 400, "prompt_logprobs", "invalid_value"),
        (COMPLETIONS, hi(prompt=""), 400, "prompt", "invalid_value"),
        (COMPLETIONS, hi(prompt=[]), 400, "prompt", "invalid_value"),
        (COMPLETIONS, hi(prompt=["a", ""]), 400, "prompt", "invalid_value"),
        (COMPLETIONS, hi(prompt=["a", 1]), 400, "prompt", "invalid_type"),
        (COMPLETIONS, hi(prompt={"a": 1}), 400, "prompt", "invalid_type"),
        (COMPLETIONS, hi(prompt="x" * 600), 400, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"model": MODEL}, 400, "prompt", "missing_required_parameter"),
        (COMPLETIONS, {"prompt": "hi"}, 400, "model", "missing_required_parameter"),
        (COMPLETIONS, hi(model="other"), 404, "model", "model_not_found"),
        (CHAT, chat(tools=[{"type": "function"}]), 400, "tools", "unsupported_parameter"),
        (
            CHAT,
            chat(response_format={"type": "json_object"}),
            400,
            "response_format",
            "unsupported_parameter",
        ),
        (CHAT, chat(reasoning_effort="low"), 400, "reasoning_effort", "unsupported_parameter"),
        (CHAT, chat(prompt="x"), 400, "prompt", "unknown_parameter"),
        (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "invalid_value"),
        (CHAT, chat(logprobs=1), 400, "logprobs", "invalid_value"),
        (CHAT, chat(max_tokens=1, max_completion_tokens=2), 400, "max_tokens", "invalid_value"),
        (CHAT, chat(messages=[]), 400, "messages", "invalid_value"),
        (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), 400, "messages[0].role", "invalid_value"),
        (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", "invalid_value"),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            400,
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": "x" * 600}]),
            400,
            "messages",
            "context_length_exceeded",
        ),
    ],
)
def test_refusals_name_the_parameter(
    server: Server, path: str, body: dict[str, Any], status: int, param: str, code: str
) -> None:
    for streaming in ({}, {"stream": True}) if "stream_options" not in body else ({},):
        response = server.http.post(path, json=body | streaming)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
        assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"best_of": 1, "suffix": None, "stop": None, "n": None, "user": "me", "top_k": -1}),
        (COMPLETIONS, {"temperature": 1, "seed": -5, "logit_bias": {"104": -100}, "stop_token_ids": [9]}),
        (
            COMPLETIONS,
            {"min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "presence_penalty": 2, "top_p": 1},
        ),
        (
            CHAT,
            {
                "tools": None,
                "tool_choice": "none",
                "response_format": {"type": "text"},
                "modalities": ["text"],
            },
        ),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 5, "store": False, "skip_special_tokens": False}),
    ],
)
def test_what_asks_for_nothing_more_is_let_through(server: Server, path: str, fields: dict[str, Any]) -> None:
    response = server.http.post(path, json=(hi() if path == COMPLETIONS else chat()) | fields)
    assert response.status_code == 200, response.text


def test_special_tokens_are_shown_if_asked_for(server: Server) -> None:
    body = hi(skip_special_tokens=False)
    assert server.http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "hi<eos>"
    body = hi(ignore_eos=True, max_tokens=4, skip_special_tokens=False, prompt=[104, EOS], echo=True)
    assert server.http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "h<eos>h<eos><eos>h"
