"""Token ids to text, a piece at a time."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable

from .tokenizer import Tokenizer

_SPACE = 0x20


class Detokenizer:
    """Turns the output tokens of one request into text as they come.

    Works on the bytes of each token, so it needs no earlier tokens, never emits half a character,
    and never takes back what it gave: the pieces joined, with ``finish()``, are the one-shot decode
    of the output ids alone (a prompt that ends in half a character cannot leak into the answer).
    Bytes that can never become a character turn into U+FFFD at once, by the Unicode standard's
    "maximal subpart" practice (Unicode 15, section 3.9). At most three bytes are kept between
    calls, so time is linear in the tokens whatever the model says.

    Not thread-safe; one per request, any thread.

    Args:
        tokenizer: Gives the bytes per token.
        skip_special_tokens: Leave special tokens out of the text.
    """

    __slots__ = ("_at_start", "_pending", "_skipped", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._pending = bytearray()
        self._at_start = tokenizer.strips_leading_space

    def feed(self, tokens: Iterable[int]) -> str:
        """Take the next tokens and return the text that became final, possibly ``""``."""
        pending = self._pending
        token_bytes = self._token_bytes
        skipped = self._skipped
        for token in tokens:
            if token not in skipped:
                pending += token_bytes(token)
        if self._at_start and pending:
            self._at_start = False
            if pending[0] == _SPACE:
                del pending[0]
        # What codecs' incremental decoder does, without its two Python calls per token.
        text, used = utf_8_decode(pending, "replace", False)
        del pending[:used]
        return text

    def feed_one(self, token: int) -> str:
        """``feed`` of one token: as a rule it is whole characters, and nothing is pending."""
        if token in self._skipped:
            return ""
        if not self._pending and not self._at_start:
            try:
                return self._token_bytes(token).decode()
            except UnicodeDecodeError:
                pass  # a part of a character, or bytes that are none
        return self.feed((token,))

    def finish(self) -> str:
        """Return what an incomplete last character amounts to: U+FFFD once, or ``""``. Idempotent."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending.clear()
        return text

    def copy(self) -> Detokenizer:
        """An independent detokenizer in the same state."""
        twin = object.__new__(Detokenizer)
        twin._token_bytes = self._token_bytes
        twin._skipped = self._skipped
        twin._pending = self._pending.copy()
        twin._at_start = self._at_start
        return twin
