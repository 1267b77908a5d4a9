"""What policies see of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from .config import EngineConfig
from .placement import Placement
from .policy import RequestView
from .state import ControlState


class PlanningView:
    """The engine at a planning moment (``policy.EngineView``); reads the live state, changes nothing."""

    def __init__(self, state: ControlState, placement: Placement, config: EngineConfig) -> None:
        self._state = state
        self._placement = placement
        self._budget = config.token_budget

    @property
    def step(self) -> int:
        """Number of the step being planned."""
        return self._state.submitted + 1

    @property
    def now(self) -> float:
        """The engine's clock, seconds."""
        return self._state.clock()

    @property
    def token_budget(self) -> int:
        """Most tokens a step may compute."""
        return self._budget

    @property
    def decoding(self) -> int:
        """Rows that decode in this step."""
        return len(self._state.rows.decode_rows())

    @property
    def free_rows(self) -> int:
        """Rows a new request could take."""
        return self._state.rows.free

    @property
    def free_pages(self) -> int:
        """Pages that are free now."""
        return self._state.pool.free

    @property
    def evictable_pages(self) -> int:
        """Pages of cached prefixes that nobody uses."""
        return self._state.tree.evictable

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""
        return self._state.limits.pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._state.limits.page_size

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a row, in order of admission."""
        return [request.view for request in self._state.running()]

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        return len(self._state.waiting)

    def cached_prefix(self, request: RequestView) -> int:
        """Prompt tokens of a waiting request that are in the cache now; 0 if it does not wait."""
        found = self._state.waiting.get(request.number)
        return 0 if found is None else self._placement.cached_tokens(found)
