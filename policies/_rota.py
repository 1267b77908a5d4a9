"""Looking at some of the waiting requests per step, in turn."""

from __future__ import annotations

from collections.abc import Sequence

from ..policy import RequestView


class Rota:
    """Picks ``count`` of the waiting requests per step, in turn: for what is too dear to look up for all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._at = 0

    def next(self, waiting: Sequence[RequestView]) -> Sequence[RequestView]:
        """Those whose turn it is; all, if there are few."""
        if len(waiting) <= self._count:
            return waiting
        if self._at >= len(waiting):
            self._at = 0
        start, self._at = self._at, self._at + self._count
        return waiting[start : self._at]
