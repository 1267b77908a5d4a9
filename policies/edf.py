"""Earliest deadline first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, RequestView
from ._due_times import DueTimes
from ._patience import Patience


@dataclass(eq=False)
class EDF:
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
    feasibility: bool = True
    age_steps: int = 256

    def __post_init__(self) -> None:
        if self.age_steps < 1:
            raise ConfigError("edf: age_steps must be at least 1")
        self._times = DueTimes()
        self._patience = Patience(self.age_steps)

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """By due time, then those without one, then those that would be late; the latter two by arrival."""
        for number in self._patience.admitted(waiting):
            self._times.forget(number)
        self._times.look(waiting, view)
        return self._patience.order(self._ranked(waiting, view.now), waiting, view)

    def on_finish(self, request: RequestView) -> None:
        """Forget it, and learn from its length."""
        self._times.finish(request)

    def _ranked(self, waiting: Sequence[RequestView], now: float) -> Iterator[RequestView]:
        due, start = self._times.due, self._times.start
        late = []
        for request in sorted(waiting, key=lambda request: due[request.number]):
            if self.feasibility and start.get(request.number, now) < now:
                late.append(request)
            else:
                yield request
        yield from sorted(late, key=lambda request: request.number)
