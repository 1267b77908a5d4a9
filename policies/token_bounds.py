"""A bound on how many prompt tokens wait, in all and per tenant."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, RequestView
from ._tenant_load import TenantLoad


@dataclass(eq=False)
class TokenBounds:
    """Refuses a request if too many prompt tokens would wait with it, altogether or of its tenant.

    Like ``queue-bounds``, but by work: prompt tokens are what stands between a request and its first
    token. If nothing waits (of its tenant), any length is accepted, as it could never enter otherwise.
    Cached prefixes are not deducted, so this is not for traffic that hits the cache most of the time.

    Args:
        tokens: Most prompt tokens that wait; ``None`` is unbounded.
        per_tenant: The same for each tenant.
    """

    api_version = 1
    tokens: int | None = None
    per_tenant: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is None and self.per_tenant is None:
            raise ConfigError("token-bounds: nothing is bounded; give tokens, per_tenant or both")
        if any(bound is not None and bound < 1 for bound in (self.tokens, self.per_tenant)):
            raise ConfigError("token-bounds: tokens and per_tenant must be at least 1; leave one out for no bound")
        self._load = TenantLoad()

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        """Refuse if a bound would be crossed."""
        if self.tokens is not None and _over(view.waiting_tokens, request, self.tokens):
            return (
                f"{view.waiting_tokens} prompt tokens wait already; {request.prompt_tokens} more are over the bound of "
                f"{self.tokens}; retry later"
            )
        if self.per_tenant is not None:
            _, waiting = self._load.of(request.tenant, view)
            if _over(waiting, request, self.per_tenant):
                return (
                    f"{waiting} prompt tokens of tenant {request.tenant!r} wait already; {request.prompt_tokens} more are over "
                    f"its bound of {self.per_tenant}; retry later"
                )
        return None

    def on_submit(self, request: RequestView) -> None:
        """Count it."""
        if self.per_tenant is not None:
            self._load.add(request)


def _over(waiting: int, request: RequestView, bound: int) -> bool:
    return waiting > 0 and waiting + request.prompt_tokens > bound
