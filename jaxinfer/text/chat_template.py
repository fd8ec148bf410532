"""Chat templates: a conversation to the prompt that the model was trained on.

Templates are code that comes with a checkpoint, so they run in Jinja's immutable sandbox, with the
environment that Hugging Face gives them (transformers.utils.chat_template_utils).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.types import RequestError

_PARAM = "messages"


class ChatTemplate:
    """One checkpoint's template, or several by name, of which `tool_use` serves requests with tools."""

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """source: Jinja text, or name -> text. special_tokens: variables such as bos_token -> its text."""
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        # Compiled at first use, so that a broken template leaves plain completions alone.
        return {name: self._environment.from_string(source) for name, source in self._sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Returns the prompt's text; special tokens that the template writes are part of it.

        Args:
          messages: OpenAI's, with `role` and `content`, a string or a list of text parts, which are
            joined by line ends. Other parts are refused.
          tools: OpenAI's tool definitions.
          add_generation_prompt: end with what begins the assistant's answer.
          kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
          RequestError: the messages are malformed, or the template refuses them.
        """
        plain = [_plain_message(index, message) for index, message in enumerate(_checked(messages))]
        variables = {**self._special_tokens, "documents": None, **kwargs}
        variables |= {"messages": plain, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._choose(bool(tools)).render(variables)
        except RequestError:
            raise
        except Exception as error:  # a template is foreign code, which may raise anything
            message = f"messages: the model's chat template refuses them: {error}"
            raise RequestError(message, _PARAM) from error

    def _choose(self, with_tools: bool) -> jinja2.Template:
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            known = ", ".join(sorted(self._sources))
            raise RequestError(f"messages: the model has no default chat template, only {known}", _PARAM)
        return self._compiled[name]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it only holds its body."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and sorts keys, which templates do not expect.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _checked(messages: object) -> Sequence[object]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        kind = type(messages).__name__
        raise RequestError(f"messages is of type {kind}; give a list of messages", _PARAM)
    if not messages:
        raise RequestError("messages is empty; give at least one message", _PARAM)
    return messages


def _plain_message(index: int, message: object) -> dict[str, Any]:
    """The message with its content as one string; raises RequestError for one that cannot be."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is of type {type(message).__name__}; give an object", _PARAM)
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where} has no role; give it one, such as 'user'", _PARAM)
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise RequestError(f"{where} has no content; give it a string", _PARAM)
        return dict(message)
    return {**message, "content": content if isinstance(content, str) else _joined(where, content)}


def _joined(where: str, content: object) -> str:
    if not isinstance(content, Sequence):
        kind = type(content).__name__
        raise RequestError(f"{where}.content is of type {kind}; give a string or text parts", _PARAM)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text":
            message = f"{where}.content[{index}] is of type {kind!r}; only 'text' is supported"
            raise RequestError(message, _PARAM)
        if not isinstance(text, str):
            raise RequestError(f"{where}.content[{index}] has no text", _PARAM)
        texts.append(text)
    return "\n".join(texts)
