"""What a simulation writes down: per request, per step, and samples over time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..contract import IntArray, StepPlan
from ..cost import StepWork
from ..engine import Engine
from ..stream import TokenStream
from .executor import StepObserver
from .trace import Trace, TraceRequest

Floats = NDArray[np.float64]

SAMPLES = 2000
"""Samples that a timeline keeps, at most twice as many."""


@dataclass(slots=True)
class RequestRecord:
    """How one request fared. Times in virtual seconds from the first arrival; ``None``: it did not happen.

    Attributes:
        request: What was asked.
        arrived, admitted, first_token, finished: When.
        cached_tokens: Prompt tokens found in the cache.
        output_tokens: Tokens it got.
        error: Why it failed or was refused; empty if it did not.
    """

    request: TraceRequest
    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def e2e(self) -> float | None:
        """From arrival to the last token."""
        return None if self.finished is None else self.finished - self.arrived

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; ``None`` for outputs of one token."""
        if self.finished is None or self.first_token is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Samples over time; arrays of one length.

    Attributes:
        at: Virtual seconds from the first arrival.
        running, waiting: Requests with and without a row.
        used_pages, cached_pages: Pages held by requests, and pages of prefixes nobody uses.
        service: Tenant → tokens served so far (prompt tokens computed and output tokens).
        backlog: Tenant → requests that have arrived and have not been admitted yet.
    """

    at: Floats
    running: IntArray
    waiting: IntArray
    used_pages: IntArray
    cached_pages: IntArray
    service: dict[str, Floats]
    backlog: dict[str, IntArray]


@dataclass(slots=True)
class _Sample:
    at: float
    running: int
    waiting: int
    used: int
    cached: int
    service: list[int] = field(default_factory=list)
    backlog: list[int] = field(default_factory=list)


class Recorder(StepObserver):
    """Collects everything about one simulation.

    Args:
        trace: What arrives.
        max_rows: Rows of the device.
    """

    def __init__(self, trace: Trace, max_rows: int) -> None:
        self._start = trace.requests[0].at if trace.requests else 0.0
        self.requests = [RequestRecord(request, request.at - self._start) for request in trace.requests]
        self._tenants = sorted({request.tenant for request in trace.requests})
        ids = {tenant: index for index, tenant in enumerate(self._tenants)}
        self._tenant = np.array([ids[request.tenant] for request in trace.requests], np.int64)
        self._arrivals = np.array([record.arrived for record in self.requests])
        self._service = np.zeros(len(self._tenants), np.int64)
        self._admitted = np.zeros(len(trace.requests), np.bool_)
        self._served = np.zeros(len(self._tenants), np.int64)  # requests that are no longer waiting
        self._row_tenant = np.zeros(max_rows, np.int64)
        self._row_request = np.zeros(max_rows, np.int64)
        # When each output token came, request after request: one sampled again after a preemption comes later.
        self._outputs = np.array([request.output_tokens for request in trace.requests], np.int64)
        self._first = np.cumsum(self._outputs) - self._outputs
        self._token_at = np.full(int(self._outputs.sum()), np.nan)
        self._samples: list[_Sample] = []
        self._every = 0.25
        self._next = 0.0
        self._engine: Engine | None = None
        self._origin = 0.0

    def watch(self, engine: Engine, start: float) -> None:
        """Sample from this engine; the first request arrives at ``start``, on its clock."""
        self._engine, self._origin = engine, start

    def step(
        self,
        plan: StepPlan,
        rows: IntArray,
        places: NDArray[np.int64],
        work: StepWork,
        launched: float,
        completed: float,
    ) -> None:
        """Count service and note when tokens come."""
        for join in plan.joins:
            index = join.number - 1
            self._row_request[join.row] = index
            self._row_tenant[join.row] = self._tenant[index]
            self._leave_backlog(index)
        for chunk in plan.prefill:
            self._service[self._row_tenant[chunk.row]] += len(chunk.tokens)
        if len(rows):
            requests = self._row_request[rows]
            wanted = places <= self._outputs[requests]
            requests, places = requests[wanted], places[wanted]
            self._service += np.bincount(self._tenant[requests], minlength=len(self._service))
            self._token_at[self._first[requests] + places - 1] = completed
        if launched - self._origin >= self._next:
            self._sample(launched - self._origin)

    def finished(self, index: int, stream: TokenStream) -> None:
        """A request has ended well."""
        record, times, usage = self.requests[index], stream.times, stream.usage
        record.admitted = self._since(times.admitted)
        record.first_token = self._since(times.first_token)
        record.finished = self._since(times.finished)
        record.cached_tokens = usage.cached_tokens
        record.output_tokens = usage.completion_tokens

    def failed(self, index: int, error: Exception) -> None:
        """A request was refused or has failed."""
        self.requests[index].error = type(error).__name__
        self._leave_backlog(index)

    def gaps(self) -> Floats:
        """Seconds between two tokens of a request, of all requests."""
        gaps = np.diff(self._token_at)
        between = np.ones(len(self._token_at), np.bool_)
        between[self._first] = False  # from the last token of one request to the first of the next
        gaps = gaps[between[1:]]
        return gaps[~np.isnan(gaps)]

    def timeline(self) -> Timeline:
        """The samples."""
        samples = self._samples
        service = np.array([sample.service for sample in samples], np.float64).reshape(len(samples), len(self._tenants))
        backlog = np.array([sample.backlog for sample in samples], np.int32).reshape(len(samples), len(self._tenants))

        def column(values: list[int]) -> IntArray:
            return np.array(values, np.int32)

        return Timeline(
            np.array([sample.at for sample in samples]),
            column([sample.running for sample in samples]),
            column([sample.waiting for sample in samples]),
            column([sample.used for sample in samples]),
            column([sample.cached for sample in samples]),
            {tenant: service[:, index] for index, tenant in enumerate(self._tenants)},
            {tenant: backlog[:, index] for index, tenant in enumerate(self._tenants)},
        )

    def _leave_backlog(self, index: int) -> None:
        if not self._admitted[index]:
            self._admitted[index] = True
            self._served[self._tenant[index]] += 1

    def _since(self, at: float | None) -> float | None:
        return None if at is None else at - self._origin

    def _sample(self, now: float) -> None:
        assert self._engine is not None
        statistics = self._engine.statistics()
        arrived = np.bincount(self._tenant[: np.searchsorted(self._arrivals, now, "right")], minlength=len(self._tenants))
        self._samples.append(
            _Sample(
                now,
                statistics.running,
                statistics.waiting,
                statistics.total_pages - statistics.free_pages - statistics.cached_pages - statistics.limbo_pages,
                statistics.cached_pages,
                self._service.tolist(),
                (arrived - self._served).tolist(),
            )
        )
        if len(self._samples) >= 2 * SAMPLES:  # a long run: half as often from now on
            del self._samples[1::2]
            self._every = max(2 * self._every, now / SAMPLES)  # as dense as what is left, however long steps take
        self._next = now + self._every
