"""The common part of the orders that look at the prefix cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, RequestView, StepReport
from ._patience import Patience
from ._prefixes import Deferral, Turns
from ._roster import Roster


@dataclass(eq=False)
class CacheAware(ABC):
    """An order that depends on what is cached; of those that have waited long, every fourth admission.

    Args:
        age_steps: Steps after which a waiting request counts as starved.
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
        self._patience = Patience(self.age_steps)
        self._roster = Roster()
        self._turns = Turns(self.lookups, self.refresh_steps)
        self._deferral = Deferral(self.defer_tokens, self.lookups)

    @abstractmethod
    def _look_up(self, request: RequestView, view: EngineView) -> None:
        """Ask the cache about a request and keep the answer."""

    @abstractmethod
    def _drop(self, number: int) -> None:
        """Drop the answer about a request, if there is one."""

    @abstractmethod
    def _sorted(self, waiting: Sequence[RequestView], wanted: AbstractSet[int]) -> Iterator[RequestView]:
        """Those of the waiting requests whose number is in ``wanted``, in their order; perhaps some that do not wait."""

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """By what is cached, and one that has waited long where its turn is, held back or not."""
        gone = self._roster.left(waiting)
        self._patience.admitted(gone)
        for number in gone:
            self._drop(number)
            self._turns.forget(number)
        for request in self._turns.next(self._roster.newcomers(waiting), view.step):
            self._look_up(request, view)
        held = self._deferral.held()
        ranked = self._sorted(waiting, self._roster.numbers - held if held else self._roster.numbers)
        mixed = self._patience.order(self._deferral.sift(ranked, view), waiting, view)
        return self._deferral.watch(self._roster.serve(mixed, waiting))

    def on_submit(self, request: RequestView) -> None:
        """It begins to wait."""
        self._roster.add(request)

    def on_step(self, report: StepReport) -> None:
        """Drop the answers about requests that wait no longer, however they got their row."""
        for number in report.prefill:
            self._drop(number)
            self._turns.forget(number)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request."""
        self._drop(request.number)
        self._turns.forget(request.number)
        self._deferral.forget(request)
        self._roster.forget(request)
