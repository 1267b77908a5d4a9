"""Admission by a forecast of the memory that requests will need, from the lengths of past outputs."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, RequestView
from ._memory_forecast import Forecast, OutputLengths

_RECOUNT = 256
"""New requests after which who has ended meanwhile is left out of the forecast."""

_SHARE = 64
"""One in so many may have ended before they are counted again to refuse somebody: a thousand take half a millisecond."""


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
        self._added = 0  # to it since it was made
        self._tried: tuple[Forecast, int, Forecast] | None = None  # forecast, number of one more request, and the two together

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        """Refuse if the forecast peak is too high."""
        if not len(self._lengths):
            return None
        bound = self.factor * view.total_pages * view.page_size
        if self._ahead is not None and self._with(self._ahead, request).peak <= bound:
            return None
        present = view.waiting_count + view.total_rows - view.free_rows
        if self._ahead is None or len(self._ahead.left) - present > present // _SHARE:  # worth the time only now
            self._ahead, self._added = self._lengths.forecast([*view.running, *view.waiting]), 0
        peak = self._with(self._ahead, request).peak
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
        self._ahead = self._with(self._ahead, request)

    def on_finish(self, request: RequestView) -> None:
        """Remember its length, however it ended."""
        if request.generated_tokens:
            self._lengths.add(request.generated_tokens)

    def _with(self, ahead: Forecast, request: RequestView) -> Forecast:
        """The forecast with one request more; asked by ``admit``, and again when it has begun to wait."""
        if self._tried is None or self._tried[0] is not ahead or self._tried[1] != request.number:
            self._tried = ahead, request.number, ahead.plus(*self._lengths.one(request))
        return self._tried[2]
