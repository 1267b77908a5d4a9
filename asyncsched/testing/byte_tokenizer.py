"""A small real tokenizer that needs no files: every byte is a token, plus specials and merges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ChatTemplateError
from ..tokenizer import Message

BOS, EOS, SYSTEM, USER, ASSISTANT = range(256, 261)
SPECIALS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
ROLES = ("system", "user", "assistant")

DEFAULT_MERGES: tuple[str | bytes, ...] = (
    " the",
    "ing",
    "hello",
    " world",
    "\n\n",
    "世界",  # two characters in one token
    b"\xe4\xb8",  # the first two bytes of "世" and many others: half a character
    b"\x80 a",  # the end of one character and the start of the next word
)


class ByteTokenizer:
    """Tokens 0 … 255 are the bytes, then five specials, then the merges. Implements ``Tokenizer``.

    Encoding takes the longest special or merge at each position. Any thread; keeps no state.

    Args:
        merges: Tokens of several bytes; they need not end on a character boundary.
        strips_leading_space: Decode as SentencePiece does, without one space at the start.
    """

    def __init__(self, merges: Sequence[str | bytes] = DEFAULT_MERGES, *, strips_leading_space: bool = False) -> None:
        self._table = [bytes([i]) for i in range(256)] + [s.encode() for s in SPECIALS]
        self._table += [m.encode() if isinstance(m, str) else bytes(m) for m in merges]
        self._ids = {piece: token for token, piece in reversed(list(enumerate(self._table)))}
        longest_first = sorted(self._table[256:], key=lambda piece: -len(piece))
        self._pattern = re.compile(b"|".join([re.escape(piece) for piece in longest_first if piece] + [b"."]), re.DOTALL)
        self._longest = max(len(piece.decode("utf-8", "replace")) for piece in self._table)
        self._strips_leading_space = strips_leading_space

    @property
    def vocab_size(self) -> int:
        """Valid ids are ``0 … vocab_size - 1``."""
        return len(self._table)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """``<|eos|>``."""
        return (EOS,)

    @property
    def special_ids(self) -> frozenset[int]:
        """The five specials."""
        return frozenset(range(BOS, BOS + len(SPECIALS)))

    @property
    def longest_token(self) -> int:
        """Most characters one token can stand for."""
        return self._longest

    @property
    def strips_leading_space(self) -> bool:
        """As asked for on construction."""
        return self._strips_leading_space

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, limit: int) -> list[list[int] | int]:
        """Ids per text (``<|bos|>`` first if asked), or their number where it is over ``limit``.

        A plain Python loop, so other threads get their turn during a long text.

        Raises:
            UnicodeEncodeError: a text holds a lone surrogate.
        """
        return [self._encode(text, add_special_tokens, limit) for text in texts]

    def _encode(self, text: str, add_special_tokens: bool, limit: int) -> list[int] | int:
        ids = [BOS] if add_special_tokens else []
        count = len(ids)
        for match in self._pattern.finditer(text.encode()):
            count += 1
            if count <= limit:
                ids.append(self._ids[match[0]])
        return ids if count <= limit else count

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""
        return self._table[token]

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once: what the pieces of a stream must add up to."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self._table[token] for token in tokens if token not in skipped)
        if self._strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool, **options: Any) -> str:
        """``<|role|>content<|eos|>`` per message, then ``<|assistant|>`` if asked; options are ignored.

        Raises:
            ChatTemplateError: an unknown role, or content that is not a string.
        """
        parts = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                raise ChatTemplateError(f"role {role!r} is unknown; use system, user or assistant")
            if not isinstance(content, str):
                raise ChatTemplateError(f"content of the {role} message must be a string")
            parts.append(f"<|{role}|>{content}<|eos|>")
        if add_generation_prompt:
            parts.append("<|assistant|>")
        return "".join(parts)
