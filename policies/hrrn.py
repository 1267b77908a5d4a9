"""Highest response ratio next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..policy import EngineView, RequestView, StepReport
from ._output_length import annotator, expected_output
from ._patience import Patience
from ._roster import Roster, number_of


@dataclass(eq=False)
class HRRN:
    """The request with the largest (time waited + service) / service goes first: short ones soon, long ones in time.

    Brinch Hansen, "Short-term scheduling in multiprogramming systems", SOSP 1971. Both times are in
    tokens: the service is what the request is expected to need, the wait is the service the engine has
    given since it came, so that the order does not depend on a clock. SGLang's ``hrrn`` looks at
    the part of the prompt that is not cached alone; this one looks at the whole job, and not at the cache.

    The ratio makes every request urgent in time, but under lasting overload the short ones that have
    waited, too, keep ahead of a long one for ever; so those that have waited ``age_steps`` steps get every
    fourth admission.

    Not where the length is unknown: with ``max_tokens`` the same for all, the order is by prompt length
    and arrival. ``sjf`` has the smaller mean latency; this has the shorter tail.

    Args:
        prompt_weight: Output tokens that a prompt token counts for.
        age_steps: Steps after which a waiting request counts as starved.
        predictor: ``async (RequestView) -> float``, the expected output tokens, or its dotted path
            ``"package.module:function"``. Asked once, before the request waits. The hint
            ``output_tokens`` goes before it, ``max_tokens`` stands in for it.
    """

    api_version = 1
    prompt_weight: float = 0.1
    age_steps: int = 1024
    predictor: Any = None

    def __post_init__(self) -> None:
        if not self.prompt_weight >= 0:
            raise ConfigError("hrrn: prompt_weight must be at least 0; 0 looks at the output only")
        if self.age_steps < 1:
            raise ConfigError("hrrn: age_steps must be at least 1")
        if self.predictor is not None:  # without one there is no such hook, which would cost every request a turn
            self.annotate = annotator(self.predictor, "hrrn")
        self._patience = Patience(self.age_steps)
        self._roster = Roster()
        self._given = 0.0  # service of all steps so far, in tokens
        self._jobs: dict[int, tuple[float, float]] = {}  # request number → ``_given`` when it came, its own service
        # Those that wait, by arrival, and their jobs side by side, float64 [n or more, 2]: all ratios change in every step,
        # and to work them out one by one would take longer than all the rest.
        self._requests: list[RequestView] = []
        self._queued: set[int] = set()
        self._queue = np.ones((64, 2))

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """Highest response ratio first, ties by arrival."""
        gone = self._roster.left(waiting)
        self._patience.admitted(gone)
        for number in gone:
            self._drop(number)
        for request in self._roster.newcomers(waiting):
            self._include(request)
        return self._roster.serve(self._patience.order(self._ranked(), waiting, view), waiting)

    def on_submit(self, request: RequestView) -> None:
        """Its time begins."""
        self._roster.add(request)
        self._jobs[request.number] = self._job(request)

    def on_step(self, report: StepReport) -> None:
        """Time goes by."""
        self._given += self.prompt_weight * sum(report.prefill.values()) + len(report.sampled)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request."""
        if request.number in self._queued:
            self._requests = list(self._requests)  # an order may be under way
            self._drop(request.number)
        self._roster.forget(request)
        self._jobs.pop(request.number, None)

    def _ranked(self) -> Iterator[RequestView]:
        requests, numbers = self._requests, self._roster.numbers
        came, service = self._queue[: len(requests)].T
        for place in np.argsort((came - self._given) / service, kind="stable"):  # negative, and without the 1
            if requests[place].number in numbers:
                yield requests[place]

    def _include(self, request: RequestView) -> None:
        """Put a request into the queue."""
        requests, number = self._requests, request.number
        if number in self._queued:
            return
        self._queued.add(number)
        count = len(requests)
        place = bisect_left(requests, number, key=number_of) if count and requests[-1].number >= number else count
        if count == len(self._queue):
            self._queue = np.concatenate((self._queue, self._queue))
        self._queue[place + 1 : count + 1] = self._queue[place:count]
        self._queue[place] = self._jobs[number] = self._jobs.get(number) or self._job(request)
        requests.insert(place, request)

    def _drop(self, number: int) -> None:
        """Take a request out of the queue, if it is in it."""
        if number not in self._queued:
            return
        self._queued.discard(number)
        requests = self._requests
        count, place = len(requests), bisect_left(requests, number, key=number_of)
        self._queue[place : count - 1] = self._queue[place + 1 : count]
        del requests[place]

    def _job(self, request: RequestView) -> tuple[float, float]:
        return self._given, max(1.0, expected_output(request) + self.prompt_weight * request.prompt_tokens)
