"""First come, first served: the default order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..policy import EngineView, RequestView


@dataclass(eq=False)
class FCFS:
    """Arrival order. Fair and predictable; a long prompt delays the short ones behind it."""

    api_version = 1

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """The waiting requests as they arrived."""
        return waiting
