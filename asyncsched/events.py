"""What the engine tells observers: one frozen record per event, nothing per token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from .request import FinishReason
from .wakeup import Signal


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request entered."""

    at: float
    request_id: str
    number: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got its row; ``cached_tokens`` of its prompt were in the cache."""

    at: float
    request_id: str
    number: int
    row: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request lost its row for want of pages, after ``output_tokens``; it waits again."""

    at: float
    request_id: str
    number: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended."""

    at: float
    request_id: str
    number: int
    finish_reason: FinishReason
    output_tokens: int


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """A step came back. ``launched_at`` and ``completed_at`` are the device's stamps (``time.monotonic``).

    ``context_tokens`` is what its decoding rows attended to, summed; ``prefill`` has ``(start, size)`` of
    each prompt chunk.
    """

    at: float
    step: int
    decode_rows: int
    context_tokens: int
    prefill: tuple[tuple[int, int], ...]
    launched_at: float
    completed_at: float
    failed: bool

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens, summed over the chunks."""
        return sum(size for _, size in self.prefill)


Event = Submitted | Admitted | Preempted | Finished | StepCompleted


class EventStream:
    """An async iterator over engine events, oldest first. Close it, or leave its ``async with``.

    A reader that falls more than ``capacity`` events behind loses the oldest; ``dropped`` counts them.
    """

    def __init__(self, bus: EventBus, capacity: int) -> None:
        self.dropped = 0
        self._bus = bus
        self._events: deque[Event] = deque(maxlen=capacity)
        self._signal = Signal()
        self._closed = False
        bus.listeners.append(self)

    def put(self, event: Event) -> None:
        """Add an event. The engine calls this."""
        if len(self._events) == self._events.maxlen:
            self.dropped += 1
        self._events.append(event)
        self._signal.set()

    def close(self) -> None:
        """Stop listening; events already queued can still be read. Idempotent."""
        if not self._closed:
            self._closed = True
            self._bus.listeners.remove(self)
            self._signal.set()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            await self._signal.wait()
        return self._events.popleft()

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Forwarder:
    """Takes events to another loop."""

    def __init__(self, put: Callable[[Event], None]) -> None:
        self.put = put

    def close(self) -> None:
        """Nothing to end here; the other side is closed by its owner."""


class EventBus:
    """Fans events out; costs one truth test where nobody listens."""

    def __init__(self) -> None:
        self.listeners: list[EventStream | Forwarder] = []

    def emit(self, event: Event) -> None:
        """Give ``event`` to every listener."""
        for listener in self.listeners:
            listener.put(event)

    def forward(self, put: Callable[[Event], None]) -> None:
        """Give every event to ``put`` from now on."""
        self.listeners.append(Forwarder(put))

    def close(self) -> None:
        """End every listener's iteration."""
        for listener in list(self.listeners):
            listener.close()
