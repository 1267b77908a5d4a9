"""Earliest deadline first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..policy import RequestView
from ._due_times import DueOrder


@dataclass(eq=False)
class EDF(DueOrder):
    """The request that is due first goes first; what cannot be in time any more goes last.

    Due is the ``deadline``, or, while there is no token, the ``ttft_target`` if that comes first;
    requests with neither follow by arrival. Earliest deadline first meets every deadline on one
    machine if any order does (Liu and Layland, JACM 1973), but under overload it makes everyone late,
    since it serves those first that are hopeless; so requests that would be late by the forecast of
    the cost model go behind all others. Those that have waited ``age_steps`` steps get every fourth
    admission.

    Not for requests of very different lengths: ``least-slack`` starts a long one earlier than a short
    one with the same deadline. Without deadlines and targets it is ``fcfs``.

    Args:
        feasibility: Put requests that are forecast to be late last.
        age_steps: Steps after which a waiting request counts as starved.
    """

    api_version = 1
    name = "edf"

    def _ranked(self, waiting: Sequence[RequestView], now: float) -> Iterator[RequestView]:
        due, start = self._times.due, self._times.start
        late = []
        for request in sorted(waiting, key=lambda request: due[request.number]):
            if self.feasibility and start.get(request.number, now) < now:
                late.append(request)
            else:
                yield request
        yield from sorted(late, key=lambda request: request.number)
