"""Holds requests in the queue while the memory they are forecast to need would not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..policy import EngineView, RequestView
from ..registry import load_policy
from ._memory_forecast import OutputLengths


@dataclass(eq=False)
class PastFutureOrder:
    """Another policy's order, cut off where the forecast peak memory of what runs would exceed the pool.

    The past-future scheduler of LightLLM (Gong et al., ASPLOS 2025): the lengths of past outputs say
    how far each running request will probably grow, and a request starts only if the peak of the
    whole batch fits. More run at once than if ``max_tokens`` were reserved, and fewer are preempted
    than if nothing were. For ``reserve="prompt"``, which leaves the forecast to the policy; with
    ``"expected"`` and ``"full"`` the engine's own holds back besides. Shared prefixes count once per
    request: not for traffic that shares most of its prompts. Nobody is overtaken for not fitting, so
    waiting is as fair as the order within.

    Args:
        within: The policy whose order this is; its ``budget``, ``victims`` and ``preempt_for`` are kept.
        share: Part of the pool that the forecast may fill; the rest is for its errors.
        window: Finished requests whose output lengths are remembered.
    """

    api_version = 1
    within: Any = "fcfs"
    share: float = 0.95
    window: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.window < 1:
            raise ConfigError("past-future-order: share must be above 0 and at most 1, window at least 1")
        inner = load_policy(self.within, "order")
        self.parts = (inner,)
        for hook in ("budget", "victims", "preempt_for"):
            if hasattr(inner, hook):
                setattr(self, hook, getattr(inner, hook))
        self._order = inner.order
        self._lengths = OutputLengths(self.window)

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """The waiting requests up to the first that would not fit; always the first if nothing runs."""
        batch = self._lengths.forecast(view.running)
        room = self.share * view.total_pages * view.page_size
        peak, uncounted = batch.peak, []
        for request in self._order(waiting, view):
            held, left = self._lengths.one(request)
            uncounted.append((held, left))
            peak += held + left  # at most: where there is room enough, the exact peak need not be known
            if peak > room:
                for one in uncounted:
                    batch = batch.plus(*one)
                uncounted.clear()
                peak = batch.peak
                if peak > room and len(batch.left) > 1:
                    return
            yield request

    def on_finish(self, request: RequestView) -> None:
        """Remember its length, however it ended."""
        if request.generated_tokens:
            self._lengths.add(request.generated_tokens)
