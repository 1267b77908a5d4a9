"""First come, first served: the default order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..policy import EngineView, RequestView


class FCFS:
    """Arrival order. Fair and predictable; a long prompt delays the short ones behind it."""

    api_version = 1

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """The waiting requests as they arrived."""
        return waiting
