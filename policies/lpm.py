"""Longest cached prefix first, with ageing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import ConfigError
from ..policy import EngineView, RequestView


class LPM:
    """Requests whose prompt is cached furthest go first, so that shared prefixes are used while they last.

    The cache-aware order of SGLang (Zheng et al., NeurIPS 2024). Alone it starves cold requests
    under a flood of hot ones (sgl-project/sglang 31954), so a request that has waited
    ``age_steps`` steps goes before all younger ones, in arrival order.

    Not for workloads without shared prefixes: it then costs a look-up per waiting request and
    orders like ``fcfs``.

    Args:
        age_steps: Steps after which a waiting request goes first.
        refresh_steps: How many steps a look-up of the cached length stays good. The cache changes
            with every step; a somewhat old answer orders nearly as well.
    """

    api_version = 1

    def __init__(self, age_steps: int = 256, refresh_steps: int = 8) -> None:
        if age_steps < 1 or refresh_steps < 1:
            raise ConfigError("lpm: age_steps and refresh_steps must be at least 1")
        self.age_steps = age_steps
        self.refresh_steps = refresh_steps
        self._known: dict[int, tuple[int, int]] = {}  # request number → (cached tokens, step of the look-up)

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """Aged requests by arrival, then the others by cached prefix, longest first (ties by arrival)."""
        oldest_young = view.step - self.age_steps
        aged = [request for request in waiting if request.waiting_since_step <= oldest_young]
        young = [request for request in waiting if request.waiting_since_step > oldest_young]
        young.sort(key=lambda request: (-self._cached(request, view), request.number))
        return aged + young

    def on_finish(self, request: RequestView) -> None:
        """Forget the request."""
        self._known.pop(request.number, None)

    def _cached(self, request: RequestView, view: EngineView) -> int:
        known = self._known.get(request.number)
        if known is None or view.step - known[1] >= self.refresh_steps:
            known = self._known[request.number] = (view.cached_prefix(request), view.step)
        return known[0]
