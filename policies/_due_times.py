"""When waiting requests are due, when they must start to be in time, and what orders by such times share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ..cost import StepWork
from ..errors import ConfigError
from ..policy import EngineView, RequestView
from ._keyed import Ranking
from ._output_length import expected_output
from ._patience import Patience
from ._roster import Roster
from ._rota import Rota

LOOKUPS = 8
"""Waiting requests per step whose times are looked at again: a few µs each."""

WINDOW = 128
"""About how many finished requests the mean output length is taken over."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the engine is with the rows that decode now.

    Attributes:
        step: Seconds of a step without prompts, one more row decoding: the time of an output token.
        prompt: Seconds per prompt token, in steps that are full of them.
    """

    step: float
    prompt: float

    @classmethod
    def of(cls, view: EngineView) -> Pace:
        """What the cost model says; 0 while it has seen nothing."""
        cost, rows, context = view.cost, view.decoding, view.context_tokens
        chunk = max(1, view.token_budget - rows)
        return cls(cost.seconds(StepWork(rows + 1, context)), cost.seconds(StepWork(rows, context, ((0, chunk),))) / chunk)


class DueTimes:
    """Due and latest starting times of waiting requests, by number.

    A request is due at its ``deadline``, or, while it has no token, when its ``ttft_target`` says if
    that is earlier. It must start early enough for its uncached prompt, one step that is in flight
    already, and for a deadline the output it is expected to generate: what its hint ``output_tokens``
    says, or else the mean of those that have finished, but no more than ``max_tokens``.

    Both times change with the load and the cache, so ``LOOKUPS`` requests are looked at again per step.

    Attributes:
        due: Time on the engine's clock by which it should be done; infinite for those without a target.
        start: Time by which it must start for that.
    """

    def __init__(self) -> None:
        self.due: dict[int, float] = {}
        self.start: dict[int, float] = {}
        self._rota = Rota(LOOKUPS)
        self._output = inf  # mean output tokens
        self._finished = 0

    def look(self, waiting: Sequence[RequestView], newcomers: Sequence[RequestView], view: EngineView) -> list[RequestView]:
        """See to it that the times of every waiting request are known, and those of some are fresh; returns whose changed."""
        pace, due = Pace.of(view), self.due
        new = [request for request in newcomers if request.number not in due]
        for request in new:
            self._set(request, pace, 0)  # its cached prefix counts from its first turn on: many may have come at once
        again = [request for request in self._rota.next(waiting) if due.get(request.number, inf) < inf]
        for request in again:
            self._set(request, pace, view.cached_prefix(request))
        return new + again

    def forget(self, number: int) -> None:
        """It runs, or has ended. Should it come back, its first token is behind it, and more is to be computed."""
        self.due.pop(number, None)
        self.start.pop(number, None)

    def finish(self, request: RequestView) -> None:
        """It has ended: learn from its length."""
        self.forget(request.number)
        if request.generated_tokens:
            self._finished = min(self._finished + 1, WINDOW)
            before = 0.0 if self._finished == 1 else self._output
            self._output = before + (request.generated_tokens - before) / self._finished

    def _set(self, request: RequestView, pace: Pace, cached: int) -> None:
        due = start = inf
        if request.deadline is not None or request.ttft_target is not None:
            generated = request.generated_tokens
            first = pace.step + pace.prompt * max(0, request.prompt_tokens + generated - cached)
            if request.deadline is not None:
                due = request.deadline
                output = expected_output(request)
                if output == request.max_tokens:  # nothing more precise is known
                    output = min(output, self._output)
                start = due - first - pace.step * max(0.0, output - generated)
            if request.ttft_target is not None and not generated:
                token = request.arrived_at + request.ttft_target
                due, start = min(due, token), min(start, token - first)
        self.due[request.number], self.start[request.number] = due, start


@dataclass(eq=False)
class DueOrder(ABC):
    """Requests by due or starting time; of those that have waited long, every fourth admission.

    Args:
        feasibility: Put requests that are forecast to be late last.
        age_steps: Steps after which a waiting request counts as starved.
    """

    name = ""  # for messages
    feasibility: bool = True
    age_steps: int = 256

    def __post_init__(self) -> None:
        if self.age_steps < 1:
            raise ConfigError(f"{self.name}: age_steps must be at least 1")
        self._times = DueTimes()
        self._ranking = Ranking()
        self._roster = Roster()
        self._patience = Patience(self.age_steps)

    @abstractmethod
    def _urgency(self, number: int) -> float:
        """The time by which a request is ranked, earliest first; not before it must start."""

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """The most urgent first, then those without a time, then those that would be late; the latter two by arrival."""
        gone = self._roster.left(waiting)
        self._patience.admitted(gone)
        for number in gone:
            self._times.forget(number)
            self._ranking.forget(number)
        for request in self._times.look(waiting, self._roster.newcomers(waiting), view):
            self._ranking.put(request, self._urgency(request.number))
        ranked = self._ranked(waiting, view.now)
        return self._roster.serve(self._patience.order(ranked, waiting, view), waiting)

    def on_submit(self, request: RequestView) -> None:
        """It begins to wait."""
        self._roster.add(request)

    def on_finish(self, request: RequestView) -> None:
        """Forget it, and learn from its length."""
        self._times.finish(request)
        self._ranking.forget(request.number)
        self._roster.forget(request)

    def _ranked(self, waiting: Sequence[RequestView], now: float) -> Iterator[RequestView]:
        numbers = self._roster.numbers
        if not self.feasibility:
            yield from self._ranking.among(numbers)
            return
        start = self._times.start  # without an entry it has ended meanwhile
        for request in self._ranking.among(numbers, least=now):  # who should be done by now should have started, too
            if start.get(request.number, -inf) >= now:
                yield request
        for request in waiting:
            if start.get(request.number, inf) < now:
                yield request
