"""Chat templates: the model's own Jinja text, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import ChatTemplateError
from ...tokenizer import Message

DEFAULT = "default"
TOOL_USE = "tool_use"


class ChatTemplate:
    """The chat templates of one model. Any thread; keeps no state between calls.

    Args:
        templates: Name → Jinja text. ``"default"`` is used, or ``"tool_use"`` if there is one and tools
            are given. Empty: the model has none.
        variables: What the templates may refer to besides the messages: ``bos_token``, ``eos_token`` …
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._variables = dict(variables)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, **options: Any) -> str:
        """The prompt for a conversation.

        Args:
            messages: Role and content each, as the template expects them.
            add_generation_prompt: End with the beginning of the assistant's answer.
            options: Further template variables; ``tools`` and ``documents`` are ``None`` unless given.

        Raises:
            ChatTemplateError: there is no template, or it refused the messages (the cause is chained).
        """
        name = TOOL_USE if options.get("tools") and TOOL_USE in self._templates else DEFAULT
        text = self._templates.get(name)
        if text is None:
            raise ChatTemplateError("this model has no chat template; pass one prompt string in the format it was trained on")
        given = {"tools": None, "documents": None, **self._variables, **options}
        try:
            return _compiled(text).render(given, messages=list(messages), add_generation_prompt=add_generation_prompt)
        # A template is a program of the model's author: indexing, arithmetic and attribute errors of
        # any type mean that it cannot take these messages.
        except Exception as error:
            raise ChatTemplateError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's words for training; the text stays as it is."""

    tags = {"generation"}  # noqa: RUF012 - declared as an instance attribute by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: no HTML escapes, no ASCII escapes (Jinja's own filter has both)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
