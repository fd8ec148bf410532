"""Chat templates against transformers, and what they refuse."""

from __future__ import annotations

from datetime import datetime

import pytest

from jaxinfer.text import ChatTemplate
from jaxinfer.types import RequestError
from tests.unit.text_samples import golden

_GOLDEN = golden("text/chat_templates.json")
_HI = [{"role": "user", "content": "Hi"}]
_ECHO = ChatTemplate("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")


@pytest.mark.parametrize("case", _GOLDEN["cases"], ids=lambda case: case["template"])
def test_renders_as_transformers(case):
    template = ChatTemplate(_GOLDEN["templates"][case["template"]], _GOLDEN["special_tokens"])
    text = template.render(
        case["messages"],
        tools=case["tools"],
        add_generation_prompt=case["add_generation_prompt"],
        **case["kwargs"],
    )
    assert text == case["expected"]


def test_strftime_now_is_today():
    year = ChatTemplate("{{ strftime_now('%Y') }}").render(_HI)
    assert int(year) - datetime.now().year in (-1, 0)


def test_the_tool_template_serves_requests_with_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(_HI) == "plain"
    assert template.render(_HI, tools=[{"type": "function"}]) == "tools"
    with pytest.raises(RequestError, match="only tool_use"):
        ChatTemplate({"tool_use": "tools"}).render(_HI)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _ECHO.render([{"role": "user", "content": parts}]) == "user=a\nb;"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "empty"),
        ("hi", "type str"),
        (["hi"], r"messages\[0\] is of type str"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([*_HI, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is of type int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[0\] is of type 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] has no text"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages, named):
    with pytest.raises(RequestError, match=named) as error:
        _ECHO.render(messages)
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "refuses them"),
        ("{{ messages[7].content }}", "refuses them"),
        ("{{ 'a' + 1 }}", "refuses them"),
        ("{{ messages.append(1) }}", "refuses them"),  # immutable
        ("{{ ''.__class__.__mro__ }}", "unsafe"),  # sandboxed
    ],
)
def test_what_goes_wrong_in_a_template_is_a_request_error(source, named):
    with pytest.raises(RequestError, match=named) as error:
        ChatTemplate(source).render(_HI)
    assert error.value.param == "messages"
