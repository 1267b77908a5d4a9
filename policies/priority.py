"""Strict classes by priority, with ageing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..policy import EngineView, RequestView
from ..registry import load_policy
from ._keyed import Ranking
from ._roster import Roster
from ._rota import Rota


@dataclass(eq=False)
class Priority:
    """Lower ``priority`` numbers go first, strictly; within a class another policy decides.

    A waiting request gains one class per ``age_steps`` steps, so that the lowest class is served even
    if higher ones never pause. With ``preempt`` a request that does not fit takes the rows of lower
    classes, without which a full batch of these holds it up until one of them ends (sgl-project/sglang
    14872, vllm-project/vllm 40004). A class earned by waiting lets it keep its row, but take none: else
    two requests could take it from each other in turn. If pages run out, the lowest class gives way
    (``victims``). Cached prefixes of a higher class are protected by the eviction policy
    ``priority-eviction``; the two are for use together.

    Not for sharing between equals: who may choose his class chooses the highest; use ``vtc``.

    Args:
        age_steps: Steps of waiting that are worth a class; 0 is never, and may starve low classes.
        within: The policy that orders each class; it is asked once per class and step.
        preempt: Whether a waiting request may take the row of one of a lower class.
    """

    api_version = 1
    age_steps: int = 256
    within: Any = "fcfs"
    preempt: bool = False

    def __post_init__(self) -> None:
        if self.age_steps < 0:
            raise ConfigError("priority: age_steps must be at least 1, or 0 for no ageing")
        self._inner = load_policy(self.within, "order")
        self.parts = (self._inner,)
        self._classes: dict[int, int] = {}
        self._roster = Roster()
        self._ranking = Ranking()
        self._rota = Rota(64)
        if self.preempt:  # else there is no such hook: with it the order is asked for in full steps, too
            self.preempt_for = self._lower_classes
        if not self.age_steps:
            self.starvation = "waived: without age_steps a higher class always goes first"

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """Class by class; within one as the inner policy says."""
        for number in self._roster.left(waiting):
            self._ranking.forget(number)
        for request in self._roster.newcomers(waiting):
            self._ranking.put(request, self._classes.setdefault(request.number, request.priority))
        if self.age_steps:
            for request in self._rota.next(waiting):
                waited = view.step - request.waiting_since_step
                earned = self._classes[request.number] = request.priority - waited // self.age_steps
                self._ranking.put(request, earned)
        return self._roster.serve(self._by_class(view), waiting)

    def _by_class(self, view: EngineView) -> Iterator[RequestView]:
        for members in self._ranking.groups(self._roster.numbers):
            yield from self._inner.order(members, view)

    def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]:
        """Lowest class first, then latest admitted."""
        latest_first = running[::-1]
        return sorted(latest_first, key=lambda request: -self._class_of(request))

    def on_submit(self, request: RequestView) -> None:
        """It begins to wait."""
        self._roster.add(request)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request."""
        self._roster.forget(request)
        self._ranking.forget(request.number)
        self._classes.pop(request.number, None)

    def _lower_classes(self, request: RequestView, running: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        return [one for one in self.victims(running, 0, view) if self._class_of(one) > request.priority]

    def _class_of(self, request: RequestView) -> int:
        """Its class, with what it has earned by waiting: while it runs, what it had when it was admitted."""
        return self._classes.get(request.number, request.priority)
