"""A share for those that wait long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from ..policy import EngineView, RequestView


def waits(number: int, waiting: Sequence[RequestView]) -> bool:
    """True if the request of this number is one of ``waiting``, which is in arrival order."""
    index = bisect_left(waiting, number, key=_number)
    return index < len(waiting) and waiting[index].number == number


class Patience:
    """Mixes requests that have waited long into an order, so that it starves nobody.

    When the earliest of the waiting requests has waited ``age_steps`` steps, or has lost its row, it
    goes first, but no more than one in ``every`` admissions is given away like this. Under overload
    everybody waits long; to serve all who do by arrival would then turn any order into ``fcfs``.

    Args:
        age_steps: Steps that count as long.
        every: One in so many.
    """

    def __init__(self, age_steps: int, every: int = 4) -> None:
        self._age_steps = age_steps
        self._every = every
        self._others = 0  # admitted since the last that had waited long
        self._pulled: list[tuple[int, bool]] = []

    def admitted(self, waiting: Sequence[RequestView]) -> list[int]:
        """Numbers of the requests that were pulled last time and wait no more. To be asked before every ``order``."""
        gone = [(number, old) for number, old in self._pulled if not waits(number, waiting)]
        for _, old in gone:
            self._others = 0 if old else self._others + 1
        self._pulled = []
        return [number for number, _ in gone]

    def order(self, ranked: Iterable[RequestView], waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """``ranked``, which is all of ``waiting`` in some order, with one that has waited long where its turn is."""
        others, horizon = self._others, view.step - self._age_steps
        oldest = iter(waiting)
        served: set[int] = set()
        for request in ranked:
            if others >= self._every - 1:
                first = next((one for one in oldest if one.number not in served), None)
                if first is None or not (first.waiting_since_step <= horizon or first.preemptions):
                    oldest = iter(())  # whoever is behind has arrived later
                else:
                    others = 0
                    served.add(first.number)
                    self._pulled.append((first.number, True))
                    yield first
            if request.number not in served:
                others += 1
                served.add(request.number)
                self._pulled.append((request.number, False))
                yield request


def _number(request: RequestView) -> int:
    return request.number
