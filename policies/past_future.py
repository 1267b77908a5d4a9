"""Admission by a forecast of the memory that requests will need, from the lengths of past outputs."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, RequestView
from ._memory_forecast import Forecast, OutputLengths

_RECOUNT = 256
"""New requests after which who has ended meanwhile is left out of the forecast."""


@dataclass(eq=False)
class PastFuture:
    """Refuses a request if the memory that it and all before it are forecast to need exceeds ``factor`` pools.

    The past-future scheduler of LightLLM (Gong et al., ASPLOS 2025) forecasts the peak memory of a
    batch from the lengths of past outputs instead of ``max_tokens``. There the scheduler holds the
    request in the queue until it fits (``past-future-order`` does that); at the door it can only be
    refused, so here the whole queue counts as if it ran, and ``factor`` says how many pools' worth may
    pile up. Shared prefixes count once per request: not for traffic that shares most of its prompts.
    Refuses nobody before the first request has finished, and nobody if nothing else runs or waits.

    Args:
        factor: Pools' worth of memory that running and waiting requests may be forecast to need.
        window: Finished requests whose output lengths are remembered.
    """

    api_version = 1
    factor: float = 2.0
    window: int = 1000

    def __post_init__(self) -> None:
        if self.factor <= 0 or self.window < 1:
            raise ConfigError("past-future: factor must be above 0 and window at least 1")
        self._lengths = OutputLengths(self.window)
        self._ahead: Forecast | None = None  # may still contain requests that have ended: never too little
        self._mark = (-1, -1)  # step and length of the queue for which it is exact
        self._added = 0  # to it since it was made

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        """Refuse if the forecast peak is too high."""
        if not len(self._lengths):
            return None
        one = self._lengths.one(request)
        bound = self.factor * view.total_pages * view.page_size
        if self._ahead is not None and self._ahead.plus(*one).peak <= bound:
            return None
        mark = (view.step, view.waiting_count)
        if self._ahead is None or mark != self._mark:  # worth the time only now that it matters
            self._ahead = self._lengths.forecast([*view.running, *view.waiting])
            self._mark, self._added = mark, 0
        peak = self._ahead.plus(*one).peak
        if peak <= bound or not len(self._ahead.left):
            return None
        pools = self.factor * peak / bound
        return f"with it {pools:.2f} pools' worth of memory would be needed, the bound is {self.factor}; retry later"

    def on_submit(self, request: RequestView) -> None:
        """Count it in."""
        self._added += 1
        if self._ahead is None or self._added > _RECOUNT:
            self._ahead = None
            return
        self._ahead = self._ahead.plus(*self._lengths.one(request))
        self._mark = self._mark[0], self._mark[1] + 1

    def on_finish(self, request: RequestView) -> None:
        """Remember its length, however it ended."""
        if request.generated_tokens:
            self._lengths.add(request.generated_tokens)
