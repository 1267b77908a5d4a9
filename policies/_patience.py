"""A share for those that wait long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..policy import EngineView, RequestView


class Patience:
    """Mixes requests that have waited long into an order, so that it starves nobody.

    When the earliest of the waiting requests has waited ``age_steps`` steps, or has lost its row, it
    goes first, but no more than one in ``every`` admissions is given away like this. Under overload
    everybody waits long; to serve all who do by arrival would then turn any order into ``fcfs``.

    Args:
        age_steps: Steps that count as long.
        every: One in so many.
        group: Requests that it says the same of are a queue of their own: one in ``every`` admissions
            from it goes to its own earliest. ``None`` is one queue for all.
    """

    def __init__(self, age_steps: int, every: int = 4, group: Callable[[RequestView], str] | None = None) -> None:
        self._age_steps = age_steps
        self._every = every
        self._group = group or _together
        self._others: dict[str, int] = {}  # group → admitted since the last that had waited long
        self._pulled: dict[int, tuple[str, bool]] = {}  # number → its group, and whether it had waited long

    def admitted(self, gone: Iterable[int]) -> None:
        """Of the requests that were pulled last time, those with these numbers wait no more. Before every ``order``."""
        for number in gone:
            group, old = self._pulled[number]
            self._others[group] = 0 if old else self._others.get(group, 0) + 1
        self._pulled.clear()

    def order(self, ranked: Iterable[RequestView], waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """``ranked``, which are requests of ``waiting`` in some order, with one that has waited long where its turn is."""
        others, horizon, due = dict(self._others), view.step - self._age_steps, self._every - 1
        earliest: dict[str, Iterator[RequestView]] = {}
        served: set[int] = set()
        for request in ranked:
            group = self._group(request)
            if others.get(group, 0) >= due:
                if group not in earliest:
                    earliest[group] = self._of(group, waiting)
                first = next((one for one in earliest[group] if one.number not in served), None)
                if first is None or not (first.waiting_since_step <= horizon or first.preemptions):
                    earliest[group] = iter(())  # whoever is behind has arrived later
                else:
                    others[group] = 0
                    served.add(first.number)
                    self._pulled[first.number] = group, True
                    yield first
            if request.number not in served:
                others[group] = others.get(group, 0) + 1
                served.add(request.number)
                self._pulled[request.number] = group, False
                yield request

    def forget(self, group: str) -> None:
        """No request of this group is left."""
        self._others.pop(group, None)

    def _of(self, group: str, waiting: Sequence[RequestView]) -> Iterator[RequestView]:
        return (request for request in waiting if self._group(request) == group)


def _together(request: RequestView) -> str:
    return ""
