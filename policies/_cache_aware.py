"""The common part of the orders that look at the prefix cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, RequestView, StepReport
from ._ageing import Ageing
from ._prefixes import Deferral, Turns


@dataclass(eq=False)
class CacheAware(ABC):
    """Aged requests by arrival, then the others in an order that depends on what is cached.

    Args:
        age_steps: Steps after which a waiting request goes first.
        refresh_steps: Steps for which a look-up in the cache stays good.
        lookups: Most look-ups in one step.
        defer_tokens: Shared tokens for which a request waits while another computes them, or ``None``.
    """

    name = ""  # for messages
    age_steps: int = 256
    refresh_steps: int = 8
    lookups: int = 32
    defer_tokens: int | None = 32

    def __post_init__(self) -> None:
        if self.age_steps < 1 or self.refresh_steps < 1 or self.lookups < 1:
            raise ConfigError(f"{self.name}: age_steps, refresh_steps and lookups must be at least 1")
        if self.defer_tokens is not None and self.defer_tokens < 1:
            raise ConfigError(f"{self.name}: defer_tokens must be at least 1; None turns deferral off")
        self._ageing = Ageing(self.age_steps)
        self._turns = Turns(self.lookups, self.refresh_steps)
        self._deferral = Deferral(self.defer_tokens, self.lookups)

    @abstractmethod
    def _look_up(self, request: RequestView, view: EngineView) -> None:
        """Ask the cache about a request and keep the answer."""

    @abstractmethod
    def _drop(self, number: int) -> None:
        """Drop the answer about a request, if there is one."""

    @abstractmethod
    def _sorted(self, young: Sequence[RequestView], held: AbstractSet[int]) -> Iterator[RequestView]:
        """The requests that have not aged in their order, without those whose number is in ``held``."""

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """Aged requests by arrival, then the others."""
        for request in self._turns.next(waiting, view.step):
            self._ageing.meet(request)  # it may have come before this policy did
            self._look_up(request, view)
        held = self._deferral.held()
        aged = self._ageing.count(waiting, view.step)
        yield from self._deferral.sift(waiting[:aged], view, hold=False)
        yield from self._deferral.sift(self._sorted(waiting[aged:], held), view)

    def on_submit(self, request: RequestView) -> None:
        """Its time begins."""
        self._ageing.meet(request)

    def on_step(self, report: StepReport) -> None:
        """Drop the answers about requests that wait no longer: theirs are the prompts that are computed."""
        for number in report.prefill:
            self._drop(number)
            self._turns.forget(number)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request."""
        self._drop(request.number)
        self._ageing.forget(request)
        self._turns.forget(request.number)
        self._deferral.forget(request)
