"""When waiting requests are due, and when they must start to be in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ..cost import StepWork
from ..policy import EngineView, RequestView
from ._output_length import expected_output
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

    def look(self, waiting: Sequence[RequestView], view: EngineView) -> None:
        """See to it that the times of every waiting request are known, and those of some are fresh."""
        pace, due = Pace.of(view), self.due
        for request in [one for one in waiting if one.number not in due]:
            self._set(request, pace, 0)  # its cached prefix counts from its first turn on: many may have come at once
        for request in self._rota.next(waiting):
            if due[request.number] < inf:
                self._set(request, pace, view.cached_prefix(request))

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
