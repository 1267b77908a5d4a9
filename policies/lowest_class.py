"""Preempts the least important first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..policy import EngineView, RequestView


@dataclass(eq=False)
class LowestClass:
    """The highest ``priority`` number gives way first; within a class, who was admitted last.

    As vLLM does with its priority scheduling. For ``priority`` classes, with an order that knows them,
    too: else the victim is the next to be admitted again. Not if every request has the same priority:
    it is ``latest`` then. How often one request may be preempted before others are preferred is the
    engine's ``max_preemptions``: it protects the lowest class from being preempted for ever.
    """

    api_version = 1

    def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]:
        """Highest priority number first, then latest admitted."""
        latest_first = running[::-1]
        return sorted(latest_first, key=lambda request: -request.priority)
