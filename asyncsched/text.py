"""The text side of one request: detokenizing and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .detokenizer import Detokenizer
from .stop_strings import StopStrings
from .tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What some tokens added to the text.

    Attributes:
        text: Text that is final now, possibly ``""``.
        stopped_by: The stop string that ended the text, if one did.
        used: How many of the tokens belong to the answer: all, or those up to and including the one
            that completed the stop string.
    """

    text: str
    stopped_by: str | None
    used: int


class TextAssembler:
    """Output tokens of one request in, text to emit out; says when a stop string ends it.

    Not thread-safe; one per request, any thread.

    Args:
        tokenizer: Gives the bytes per token.
        skip_special_tokens: Leave special tokens out of the text.
        stop: Strings that end the text.
        include_stop: Keep the stop string in the text.
        min_tokens: Stop strings that are complete before this many tokens exist are let pass; one
            that becomes complete with token ``min_tokens`` or later counts, wherever it began.
    """

    __slots__ = ("_detokenizer", "_stops", "_unchecked")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop, include_stop) if stop else None
        self._unchecked = max(min_tokens - 1, 0)  # tokens whose text is not checked, still to come

    def feed(self, tokens: Sequence[int]) -> TextDelta:
        """Take the next tokens. After a stop, further tokens are ignored (``used`` is 0)."""
        stops = self._stops
        if stops is None:
            return TextDelta(self._detokenizer.feed(tokens), None, len(tokens))
        if stops.stopped_by is not None:
            return TextDelta("", stops.stopped_by, 0)
        if not self._unchecked:
            return self._checked(stops, tokens)
        free = tokens[: self._unchecked]
        self._unchecked -= len(free)
        text, _ = stops.feed(self._detokenizer.feed(free), check=False)
        if len(free) == len(tokens):
            return TextDelta(text, None, len(free))
        delta = self._checked(stops, tokens[len(free) :])
        return TextDelta(text + delta.text, delta.stopped_by, len(free) + delta.used)

    def feed_one(self, token: int) -> str:
        """The text that ``feed`` gives for one token where there are no stop strings."""
        assert self._stops is None
        return self._detokenizer.feed_one(token)

    def finish(self) -> str:
        """Return what is still held back, when the request ended for another reason. Idempotent.

        An incomplete last character becomes U+FFFD. The end cannot complete a stop string.
        """
        if self._stops is None:
            return self._detokenizer.finish()
        if self._stops.stopped_by is not None:
            return ""
        return self._stops.finish() + self._detokenizer.finish()

    def _checked(self, stops: StopStrings, tokens: Sequence[int]) -> TextDelta:
        if len(tokens) == 1:
            text, stopped_by = stops.feed(self._detokenizer.feed(tokens))
            return TextDelta(text, stopped_by, 1)
        before = self._detokenizer.copy()
        text, stopped_by = stops.feed(self._detokenizer.feed(tokens))
        if stopped_by is None:
            return TextDelta(text, None, len(tokens))
        used = characters = 0
        while characters < stops.consumed:  # once per request: replay to find the token that completed it
            characters += len(before.feed(tokens[used : used + 1]))
            used += 1
        return TextDelta(text, stopped_by, used)
