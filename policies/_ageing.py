"""Ageing for orders that would let some requests starve."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ..policy import RequestView


class Ageing:
    """Tells which waiting requests have waited so long that they go first, in arrival order.

    A request's time counts from when it first began to wait: one that is preempted later does not
    become young again. Whoever arrived before an aged request counts as aged, too, so that the aged
    ones are always a leading part of the waiting requests.

    Args:
        steps: Steps after which a request has aged.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._young: dict[int, int] = {}  # request number → step in which it began to wait, first met first
        self._aged = -1  # the highest number that has aged

    def meet(self, request: RequestView) -> None:
        """Take note of a request that waits. Idempotent."""
        if request.number > self._aged:
            self._young.setdefault(request.number, request.waiting_since_step)

    def forget(self, request: RequestView) -> None:
        """The request has ended."""
        self._young.pop(request.number, None)

    def count(self, waiting: Sequence[RequestView], step: int) -> int:
        """How many of ``waiting``, which is in arrival order, have aged by ``step``; they are at its front."""
        while self._young:
            number = next(iter(self._young))
            if self._young[number] > step - self._steps:
                break
            del self._young[number]
            self._aged = max(self._aged, number)
        return bisect_right(waiting, self._aged, key=lambda request: request.number)
