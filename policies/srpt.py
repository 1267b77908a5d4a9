"""Shortest remaining processing time first, with limited preemption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ..errors import ConfigError
from ..policy import EngineView, RequestView
from ._keyed import KeyedQueue
from ._output_length import annotator, expected_output


@dataclass(slots=True)
class _Job:
    """What is known of a request.

    Attributes:
        expected: Output tokens in all.
        since: Step in which its present wait began.
        before: Steps it waited before that, until it was preempted.
        waited: Steps it had waited in all when it was chosen last.
    """

    expected: float
    since: int
    before: int = 0
    waited: int = 0


@dataclass(eq=False)
class SRPT:
    """The request with least output left goes first, and takes the row of one that has much left and little done.

    The limited preemption of TRAIL (Shahout et al., "Don't Stop Me Now", ICLR 2025): a running request
    may lose its row only until it has generated ``preempt_until`` of its expected output, since later on
    it holds much memory and has little left. Weaker than the paper in one point: TRAIL predicts what is
    left anew at every token, from the model's own activations, which policies do not see; here it is the
    hint ``output_tokens``, else what ``predictor`` says, else ``max_tokens``, less what was generated.

    Not without a length that can be trusted: by ``max_tokens`` alone requests lose rows for nothing. What
    a victim has computed is used again only as far as it stays cached.

    Args:
        preempt_factor: A running request gives way only if it has more than this many times as much left.
        preempt_until: Share of its expected output, in generated tokens, after which it does so no more
            (the paper's C); 0 never preempts.
        age_tokens: Output tokens by which a request counts as shorter for each step it has waited.
        predictor: ``async (RequestView) -> float``, the expected output tokens in all, or its dotted path
            ``"package.module:function"``. Asked once, before the request waits.
    """

    api_version = 1
    preempt_factor: float = 2.0
    preempt_until: float = 0.8
    age_tokens: float = 1.0
    predictor: Any = None

    def __post_init__(self) -> None:
        if not self.preempt_factor >= 1:
            raise ConfigError("srpt: preempt_factor must be at least 1, or two requests could preempt each other in turn")
        if not 0 <= self.preempt_until <= 1:
            raise ConfigError("srpt: preempt_until is a share of the expected output; use 0 … 1")
        if not self.age_tokens > 0:
            raise ConfigError("srpt: age_tokens must be above 0, or long requests would starve")
        if self.predictor is not None:  # without one there is no such hook, which would cost every request a turn
            self.annotate = annotator(self.predictor, "srpt")
        self._queue = KeyedQueue(self._key)
        self._jobs: dict[int, _Job] = {}

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """Least left first."""
        for request in self._queue.order(waiting):
            job = self._job(request)
            job.waited = job.before + view.step - job.since
            yield request

    def preempt_for(self, request: RequestView, running: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """Those that have much more left and were not begun long ago, most left first."""
        least, key = self.preempt_factor * self._left(request), self._key(request)
        victims: list[tuple[float, RequestView]] = []
        for other in reversed(running):
            job = self._job(other)
            # By key, too: a victim that would stand before ``request`` in the order takes its row back at once.
            age = self.age_tokens * (view.step - job.waited)
            if job.expected <= least or job.expected + age <= key:
                continue  # so much for what it had at first; asking how much it has generated takes longer
            left = job.expected - other.generated_tokens
            if job.expected - left < self.preempt_until * job.expected and left > least and left + age > key:
                victims.append((left, other))
        victims.sort(key=itemgetter(0), reverse=True)
        return [other for _, other in victims]

    def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]:
        """Most left first; of equals, the latest admitted."""
        left = [(self._job(request).expected - request.generated_tokens, request) for request in reversed(running)]
        left.sort(key=itemgetter(0), reverse=True)
        return [request for _, request in left]

    def on_submit(self, request: RequestView) -> None:
        """Work its key out ahead of the step that needs it."""
        self._queue.add(request)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request."""
        self._queue.forget(request)
        self._jobs.pop(request.number, None)

    def _job(self, request: RequestView) -> _Job:
        job = self._jobs.get(request.number)
        if job is None:
            job = self._jobs[request.number] = _Job(expected_output(request), request.waiting_since_step)
        return job

    def _left(self, request: RequestView) -> float:
        return max(0.0, self._job(request).expected - request.generated_tokens)

    def _key(self, request: RequestView) -> float:
        """The key of a waiting request. All age alike, so that the order of two that wait never changes."""
        job = self._job(request)
        if job.since != request.waiting_since_step:
            job.since, job.before = request.waiting_since_step, job.waited
        return self._left(request) + self.age_tokens * (job.since - job.before)
