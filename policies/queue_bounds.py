"""A bound on how many requests wait, in all and per tenant."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, RequestView
from ._tenant_load import TenantLoad


@dataclass(eq=False)
class QueueBounds:
    """Refuses a request if too many wait already, altogether or of its tenant.

    Load shedding at the door: a queue that grows without end helps nobody, and one tenant's flood must
    not fill it for the others. The engine option ``max_queued_requests`` bounds the whole queue, too,
    and earlier (``QueueFullError`` from the call itself); this adds tenants. Not for prompts of very
    different length: ``token-bounds`` weighs them. A submission of ``n`` completions is one decision
    and may go over the bound by ``n - 1``.

    Args:
        requests: Most requests that wait; ``None`` is unbounded.
        per_tenant: The same for each tenant.
    """

    api_version = 1
    requests: int | None = None
    per_tenant: int | None = None

    def __post_init__(self) -> None:
        if self.requests is None and self.per_tenant is None:
            raise ConfigError("queue-bounds: nothing is bounded; give requests, per_tenant or both")
        if any(bound is not None and bound < 1 for bound in (self.requests, self.per_tenant)):
            raise ConfigError("queue-bounds: requests and per_tenant must be at least 1; leave one out for no bound")
        self._load = TenantLoad()

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        """Refuse if a bound is reached."""
        if self.requests is not None and view.waiting_count >= self.requests:
            return f"{view.waiting_count} requests wait already, the bound is {self.requests}; retry later"
        if self.per_tenant is not None:
            waiting, _ = self._load.of(request.tenant, view)
            if waiting >= self.per_tenant:
                return f"{waiting} requests of tenant {request.tenant!r} wait, its bound is {self.per_tenant}; retry later"
        return None

    def on_submit(self, request: RequestView) -> None:
        """Count it."""
        if self.per_tenant is not None:
            self._load.add(request)
