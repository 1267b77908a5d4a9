"""Highest response ratio next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..policy import EngineView, RequestView, StepReport
from ._ageing import Ageing
from ._output_length import annotator, expected_output


@dataclass(eq=False)
class HRRN:
    """The request with the largest (time waited + service) / service goes first: short ones soon, long ones in time.

    Brinch Hansen, "Short-term scheduling in multiprogramming systems", SOSP 1971. Both times are in
    tokens: the service is what the request is expected to need, the wait is the service the engine has
    given since it came, so that the order does not depend on a clock. SGLang's ``hrrn`` looks at
    the part of the prompt that is not cached alone; this one looks at the whole job, and not at the cache.

    The ratio makes every request urgent in time, but under lasting overload the short ones that have
    waited, too, keep ahead of a long one for ever; so ``age_steps`` sets a bound.

    Not where the length is unknown: with ``max_tokens`` the same for all, the order is by prompt length
    and arrival. ``sjf`` has the smaller mean latency; this has the shorter tail.

    Args:
        prompt_weight: Output tokens that a prompt token counts for.
        age_steps: Steps after which a waiting request goes first, in arrival order.
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
        self._ageing = Ageing(self.age_steps)
        self._given = 0.0  # service of all steps so far, in tokens
        self._jobs: dict[int, tuple[float, float]] = {}  # request number → ``_given`` when it came, its own service

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """Highest response ratio first (ties by arrival); before that, those that have aged."""
        known, given = self._jobs.get, self._given
        jobs = [known(request.number) or self._meet(request) for request in waiting]
        aged = self._ageing.count(waiting, view.step)
        yield from waiting[:aged]
        ratio = np.array([(came - given) / service for came, service in jobs[aged:]])  # negative, and without the 1
        for place in np.argsort(ratio, kind="stable").tolist():
            yield waiting[aged + place]

    def on_submit(self, request: RequestView) -> None:
        """Its time begins."""
        self._meet(request)

    def on_step(self, report: StepReport) -> None:
        """Time goes by."""
        self._given += self.prompt_weight * sum(report.prefill.values()) + len(report.sampled)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request."""
        self._ageing.forget(request)
        self._jobs.pop(request.number, None)

    def _meet(self, request: RequestView) -> tuple[float, float]:
        self._ageing.meet(request)
        service = max(1.0, expected_output(request) + self.prompt_weight * request.prompt_tokens)
        job = self._jobs[request.number] = self._given, service
        return job
