"""Requests in the order of a key, kept from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Iterator, Sequence
from math import inf

from ..policy import EngineView, RequestView
from ._roster import Roster


class Ranking:
    """Requests by a key, smallest first, ties by arrival.

    It stays sorted: to rank a request takes a bisection, and a step costs what is asked for. It may keep
    requests that do not wait; ``among`` passes over them.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, int, RequestView]] = {}
        self._sorted: list[tuple[float, int, RequestView]] = []

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, request: RequestView, key: float) -> None:
        """Rank a request, or rank it anew."""
        known = self._entries.get(request.number)
        if known is not None:
            if known[0] == key:
                return
            self.forget(request.number)
        entry = self._entries[request.number] = key, request.number, request
        insort(self._sorted, entry)

    def forget(self, number: int) -> None:
        """Drop a request, if it is ranked."""
        entry = self._entries.pop(number, None)
        if entry is not None:
            del self._sorted[bisect_left(self._sorted, entry)]

    def among(self, numbers: Container[int], least: float = -inf) -> Iterator[RequestView]:
        """The ranked requests with these numbers, and with a key of at least ``least``, lazily."""
        last: tuple[float, int, RequestView] | tuple[float] = (least,)
        while block := self._after(last):
            for last in block:
                if last[1] in numbers:
                    yield last[2]

    def groups(self, numbers: Container[int]) -> Iterator[list[RequestView]]:
        """The ranked requests with these numbers by key, lazily: those that share the smallest, then the next."""
        key = -inf
        while (start := bisect_right(self._sorted, (key, inf))) < len(self._sorted):
            key = self._sorted[start][0]
            group = self._sorted[start : bisect_right(self._sorted, (key, inf))]
            yield [request for _, number, request in group if number in numbers]

    def _after(self, entry: tuple[float, int, RequestView] | tuple[float]) -> list[tuple[float, int, RequestView]]:
        """The next few: a copy of all would have to touch each."""
        start = bisect_right(self._sorted, entry)
        return self._sorted[start : start + 32]


class KeyedQueue:
    """Waiting requests by a key that does not change while they wait, smallest first, ties by arrival.

    Args:
        key: The key of a request.
    """

    def __init__(self, key: Callable[[RequestView], float]) -> None:
        self._key = key
        self._ranking = Ranking()
        self._roster = Roster()

    def add(self, request: RequestView) -> None:
        """Compute the key of a request that begins to wait now, not in the step that first orders it."""
        self._ranking.put(request, self._key(request))
        self._roster.add(request)

    def forget(self, request: RequestView) -> None:
        """The request has ended."""
        self._ranking.forget(request.number)
        self._roster.forget(request)

    def order(self, waiting: Sequence[RequestView]) -> Iterator[RequestView]:
        """The waiting requests by key, lazily. The key of one that left and waits again is computed anew."""
        for number in self._roster.left(waiting):
            self._ranking.forget(number)
        for request in self._roster.newcomers(waiting):
            if request.number not in self._ranking:
                self._ranking.put(request, self._key(request))
        return self._roster.serve(self._ranking.among(self._roster.numbers), waiting)


class KeyedOrder(ABC):
    """An order that is nothing but such a key; those that derive from it make ``_queue`` when they are made."""

    _queue: KeyedQueue

    @abstractmethod
    def _key(self, request: RequestView) -> float:
        """The key of a request, smallest first."""

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """The waiting requests by key."""
        return self._queue.order(waiting)

    def on_submit(self, request: RequestView) -> None:
        """Work its key out ahead of the step that needs it."""
        self._queue.add(request)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request."""
        self._queue.forget(request)
