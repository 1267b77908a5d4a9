"""Who waits, without looking at each of them in every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from ..policy import RequestView

number_of: Callable[[RequestView], int] = attrgetter("number")


def waits(number: int, waiting: Sequence[RequestView]) -> bool:
    """True if the request of this number is one of ``waiting``, which is in arrival order."""
    index = bisect_left(waiting, number, key=number_of)
    return index < len(waiting) and waiting[index].number == number


class Roster:
    """The numbers of the waiting requests, kept from what a policy is told and from what the engine took.

    With a thousand requests waiting, most of a step's time would go into reading the number of each,
    which is no longer in the processor's caches. So this looks at all of them only if there are not as
    many as it knows of, or if one of three that it does look at is unknown: the first, the last, and
    another one in turn, so that nobody is missed for long. What it gives out is checked one by one: a
    request that it wrongly believes to wait is never answered.

    Every ``order`` begins with ``left`` and ``newcomers``, and ends with ``serve``.

    Attributes:
        numbers: Of those that wait, to the best of its knowledge after ``newcomers``.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._fresh: dict[int, RequestView] = {}  # told of, and not in ``newcomers`` yet
        self._turn = 0
        self._pulled: list[int] = []  # in the last order; those that have ended since may have had a row, too

    def add(self, request: RequestView) -> None:
        """It begins to wait: for ``on_submit``."""
        self.numbers.add(request.number)
        self._fresh[request.number] = request

    def forget(self, request: RequestView) -> None:
        """It has ended: for ``on_finish``."""
        self.numbers.discard(request.number)
        self._fresh.pop(request.number, None)

    def left(self, waiting: Sequence[RequestView]) -> list[int]:
        """Numbers of those that were served in the last order and wait no more."""
        gone = [number for number in self._pulled if not waits(number, waiting)]
        self._pulled = []
        self.numbers.difference_update(gone)
        return gone

    def newcomers(self, waiting: Sequence[RequestView]) -> list[RequestView]:
        """Those that were not among the waiting requests of the last order."""
        fresh, self._fresh = self._fresh, {}
        if len(self.numbers) == len(waiting) and self._known(waiting):
            return list(fresh.values())
        known = self.numbers.difference(fresh)
        self.numbers = {request.number for request in waiting}
        return [request for request in waiting if request.number not in known]

    def serve(self, order: Iterable[RequestView], waiting: Sequence[RequestView]) -> Iterator[RequestView]:
        """``order``, as far as it waits."""
        for request in order:
            if waits(request.number, waiting):
                self._pulled.append(request.number)
                yield request
            else:
                self.numbers.discard(request.number)

    def _known(self, waiting: Sequence[RequestView]) -> bool:
        """True if some of the waiting requests are known."""
        if not waiting:
            return True
        self._turn = (self._turn + 1) % len(waiting)
        return all(waiting[index].number in self.numbers for index in (0, self._turn, -1))
