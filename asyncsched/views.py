"""What policies see of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from .config import EngineConfig
from .cost import CostModel
from .placement import Placement
from .policy_views import PrefixView, RequestView
from .request import Request
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
    def total_rows(self) -> int:
        """Rows of the engine."""
        return self._state.limits.max_rows

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
    def context_tokens(self) -> int:
        """Tokens that the decoding rows attend to in this step, summed."""
        rows = self._state.rows
        decode = rows.decode_rows()
        return int(rows.length[decode].sum()) + len(decode)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together."""
        return self._state.limits.max_model_len

    @property
    def cost(self) -> CostModel:
        """Predicts step times."""
        return self._state.costs.model()

    @property
    def waiting(self) -> Sequence[RequestView]:
        """Requests that wait, in arrival order."""
        return [request.view for request in self._state.waiting.values()]

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return self._state.waiting_tokens

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        return len(self._state.waiting)

    def cached_prefix(self, request: RequestView) -> int:
        """Prompt tokens of a waiting request that are in the cache now; 0 if it does not wait."""
        found = self._state.waiting.get(request.number)
        return 0 if found is None else self._placement.cached_tokens(found)

    def prefixes(self, request: RequestView) -> Sequence[PrefixView]:
        """The cached runs that a waiting request would hit now."""
        found = self._state.waiting.get(request.number)
        return () if found is None else self._placement.cached_path(found)

    def shared_prefix(self, first: RequestView, second: RequestView) -> int:
        """Leading tokens that two requests have in common and may share through the cache."""
        one, other = self._computable(first), self._computable(second)
        if one is None or other is None or one.namespace != other.namespace:
            return 0
        size = min(len(one.fill), len(other.fill))
        differs = one.fill[:size] != other.fill[:size]
        where = int(differs.argmax())  # prompts are never empty
        return where if differs[where] else size

    def _computable(self, request: RequestView) -> Request | None:
        """The request if it waits or its prompt is being computed, and if it may use what is cached."""
        found = self._state.waiting.get(request.number) or self._state.prefilling.get(request.number)
        return found if found is not None and found.shareable and found.prompt_logprobs is None else None
