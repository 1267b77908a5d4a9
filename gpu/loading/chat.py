"""Chat templates: the model's own Jinja text, in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
        from .chat_jinja import compiled  # here, because most programs never render a conversation

        given = {"tools": None, "documents": None, **self._variables, **options}
        try:
            return compiled(text).render(given, messages=list(messages), add_generation_prompt=add_generation_prompt)
        # A template is a program of the model's author: indexing, arithmetic and attribute errors of
        # any type mean that it cannot take these messages.
        except Exception as error:
            raise ChatTemplateError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error
