"""Serving the waiting requests by a key that does not change while they wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop

from ..policy import EngineView, RequestView


class KeyedQueue:
    """Waiting requests by key, smallest first, ties by arrival.

    The key is computed once per request: a step costs one look-up per waiting request, and a heap,
    from which only what is asked for is taken.

    Args:
        key: The key of a request.
    """

    def __init__(self, key: Callable[[RequestView], float]) -> None:
        self._key = key
        self._entries: dict[int, tuple[float, int, RequestView]] = {}

    def add(self, request: RequestView) -> tuple[float, int, RequestView]:
        """Compute the key of a request now, not in the step that first orders it."""
        entry = self._entries[request.number] = self._key(request), request.number, request
        return entry

    def forget(self, request: RequestView) -> None:
        """Drop the request's key. If it waits again, the key is computed anew."""
        self._entries.pop(request.number, None)

    def order(self, waiting: Sequence[RequestView]) -> Iterator[RequestView]:
        """The waiting requests by key, lazily."""
        known = self._entries.get
        heap = [known(request.number) or self.add(request) for request in waiting]
        heapify(heap)
        while heap:
            yield heappop(heap)[2]


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
