"""How much memory requests will need: shared by the past-future policies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ..policy import RequestView

Ints = NDArray[np.int64]
_GOLDEN = (5**0.5 - 1) / 2
_FACTS: tuple[Callable[[RequestView], int], ...] = tuple(
    attrgetter(fact) for fact in ("number", "prompt_tokens", "generated_tokens", "max_tokens")
)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The future of requests that all run at once, a token each per step, until each has reached its end.

    Memory peaks when a request ends: it and all that go on longer have grown by what it had left
    (Gong et al., ASPLOS 2025).

    Attributes:
        left: Output tokens that each has yet to generate, int64 ``[n]``, ascending.
        at_end: Tokens in memory when it ends, its own included, int64 ``[n]``.
    """

    left: Ints
    at_end: Ints

    @classmethod
    def of(cls, held: Ints, left: Ints) -> Forecast:
        """For requests that hold ``held`` tokens each now; both int64 ``[n]``, in any order."""
        order = np.argsort(left, kind="stable")
        left = left[order]
        together = np.cumsum(held[order][::-1])[::-1]  # what it and those that go on longer hold now
        return cls(left, together + left * np.arange(len(left), 0, -1))

    def plus(self, held: int, left: int) -> Forecast:
        """With one request more."""
        place = int(self.left.searchsorted(left))
        longer = len(self.left) - place
        theirs = int(self.at_end[place] - self.left[place] * longer) if longer else 0
        sooner = self.at_end[:place] + (self.left[:place] + held)
        return Forecast(
            np.concatenate((self.left[:place], (left,), self.left[place:])),
            np.concatenate((sooner, (theirs + held + left * (longer + 1),), self.at_end[place:])),
        )

    @property
    def peak(self) -> int:
        """Most tokens in memory at any time."""
        return int(self.at_end.max(initial=0))


class OutputLengths:
    """The output lengths of the requests that finished last, and what they say about the others.

    A request's length is forecast to be a quantile of the remembered ones above what it has generated.
    Which quantile depends on its number: multiples of the golden ratio cover the distribution more
    evenly than random draws do, and are the same every time. One that has outlived all that are
    remembered may go on to its limit.

    Args:
        window: How many are remembered.
    """

    def __init__(self, window: int) -> None:
        self._ring: Ints = np.zeros(window, np.int64)
        self._seen = 0
        self._sorted: Ints = np.full(window + 1, np.iinfo(np.int64).max)
        self._stale = False

    def __len__(self) -> int:
        return min(self._seen, len(self._ring))

    def add(self, length: int) -> None:
        """A request has ended after ``length`` output tokens."""
        self._ring[self._seen % len(self._ring)] = length
        self._seen += 1
        self._stale = True

    def one(self, request: RequestView) -> tuple[int, int]:
        """Tokens that a request holds, and output tokens that it has yet to generate."""
        known, generated, most = self._known(), request.generated_tokens, request.max_tokens
        shorter = int(known.searchsorted(generated, side="right"))
        rank = shorter + int(request.number * _GOLDEN % 1.0 * (len(known) - 1 - shorter))
        length = min(known.item(rank), most)
        return request.prompt_tokens + generated, length - generated

    def forecast(self, requests: Collection[RequestView]) -> Forecast:
        """How the requests will go on together: ``one`` for many, in one go."""
        number, prompt, generated, most = (np.fromiter(map(fact, requests), np.int64, len(requests)) for fact in _FACTS)
        known = self._known()
        shorter = np.searchsorted(known, generated, side="right")
        rank = shorter + (number * _GOLDEN % 1.0 * (len(known) - 1 - shorter)).astype(np.int64)
        return Forecast.of(prompt + generated, np.minimum(known[rank], most) - generated)

    def _known(self) -> Ints:
        """The remembered lengths, ascending, and one without end."""
        if self._stale:
            self._sorted[: len(self)] = np.sort(self._ring[: len(self)])
            self._stale = False
        return self._sorted[: len(self) + 1]
