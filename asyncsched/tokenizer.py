"""What the engine needs of a tokenizer. Implementations live with the model loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """Text ↔ token ids. Every method may be called from a worker thread and must not keep state."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Token ids that ``skip_special_tokens`` leaves out of the text."""
        ...

    @property
    def longest_token(self) -> int:
        """Most characters one token can stand for: a text of ``c`` characters has at least ``c / longest_token`` tokens."""
        ...

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, limit: int) -> list[list[int] | int]:
        """Encode several texts. Must release the GIL for long ones.

        Returns for each text its ids, or, if there are more than ``limit``, only their number (so
        that a hopeless prompt never becomes a Python list).
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token contributes to the text (special tokens included, as their literal text)."""
        ...

    @property
    def strips_leading_space(self) -> bool:
        """True if decoding drops one space at the very start of a text (SentencePiece style)."""
        ...

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool, **options: Any) -> str:
        """Apply the model's chat template.

        Raises:
            ChatTemplateError: there is none, or it refused the messages.
        """
        ...
