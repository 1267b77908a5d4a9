"""What waits, by tenant: shared by the admission policies that bound it."""

from __future__ import annotations

from ..policy import EngineView, RequestView


class TenantLoad:
    """Waiting requests and their prompt tokens per tenant, counted at most once per step.

    A burst of submissions between two steps must not look at the whole queue for each: what was
    accepted meanwhile is added (``add``), and anything else that changes the queue's size has it
    counted again.
    """

    def __init__(self) -> None:
        self._load: dict[str, tuple[int, int]] = {}
        self._mark = (-1, -1, -1)  # step, requests and prompt tokens of the queue that `_load` belongs to

    def of(self, tenant: str, view: EngineView) -> tuple[int, int]:
        """Requests of ``tenant`` that wait, and their prompt tokens."""
        mark = (view.step, view.waiting_count, view.waiting_tokens)
        if mark != self._mark:
            self._load.clear()
            for request in view.waiting:
                self._count(request)
            self._mark = mark
        return self._load.get(tenant, (0, 0))

    def add(self, request: RequestView) -> None:
        """A request has begun to wait."""
        self._count(request)
        step, requests, tokens = self._mark
        self._mark = step, requests + 1, tokens + request.prompt_tokens

    def _count(self, request: RequestView) -> None:
        requests, tokens = self._load.get(request.tenant, (0, 0))
        self._load[request.tenant] = requests + 1, tokens + request.prompt_tokens
