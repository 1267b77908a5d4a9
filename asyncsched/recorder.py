"""What the control plane notes about its own work while somebody records a timeline."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .contract import StepResult
    from .cost import StepWork

CAPACITY = 1_000_000
"""Spans, counts and events kept, each; beyond that the oldest are dropped."""

IDLE: AbstractContextManager[None] = nullcontext()
"""Stands in for a span while nobody records."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, in seconds on the recording's clock."""

    track: str
    name: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Counts:
    """How full the engine was at a moment (``time.monotonic``)."""

    at: float
    running: int
    waiting: int
    used_pages: int
    cached_pages: int
    in_flight: int


class Recorder:
    """Collects spans and counts. The control plane's loop writes, one reader takes them at the end."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=CAPACITY)
        self.counts: deque[Counts] = deque(maxlen=CAPACITY)

    def working(self, task: str, name: str) -> AbstractContextManager[None]:
        """Within: this control task is at work."""
        return _Working(self.spans, task, name)

    def step(self, work: StepWork, result: StepResult, counts: Counts) -> None:
        """A step came back, and left the engine this full."""
        parts = [f"{work.decode_rows} rows"] * bool(work.decode_rows) + [f"{work.prefill_tokens} prompt"] * bool(work.prefill)
        name = f"step {result.step}: {' + '.join(parts)}" + (", failed" if result.error is not None else "")
        self.spans.append(Span("device", name, result.launched_at, result.completed_at))
        if result.launching is not None:
            self.spans.append(Span("compute thread", f"step {result.step}", *result.launching))
        self.counts.append(counts)


class _Working:
    __slots__ = ("_began", "_name", "_spans", "_task")

    def __init__(self, spans: deque[Span], task: str, name: str) -> None:
        self._spans = spans
        self._task = task
        self._name = name

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._spans.append(Span(self._task, self._name, self._began, time.monotonic()))
