"""What the engine tells observers: one frozen record per event, nothing per token."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType

from .cost import StepWork
from .request import FinishReason, Request
from .wakeup import Signal


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request entered the waiting set.

    ``arrived_at`` is when the caller submitted it, ``max_tokens`` its limit after the model's length was
    taken into account, ``deadline`` in seconds from ``arrived_at``. ``prefix`` has one number per whole page
    of the prompt: two prompts of one engine agree up to the end of a page if and only if that number is the
    same (but for collisions of 64 bits) and they may share it (``cache_salt``). No token can be told from it.
    """

    at: float
    request_id: str
    number: int
    prompt_tokens: int
    max_tokens: int
    arrived_at: float
    tenant: str
    priority: int
    deadline: float | None
    ttft_target: float | None
    tpot_target: float | None
    program_id: str | None
    prefix: tuple[int, ...]

    @classmethod
    def of(cls, request: Request, at: float, prefix: tuple[int, ...]) -> Submitted:
        """The event for ``request``. Loop thread only."""
        submission = request.submission
        options = submission.options
        return cls(
            at, submission.request_id, request.number, len(request.prompt), request.max_new, submission.arrived_at,
            options.tenant, options.priority, options.deadline, options.ttft_target, options.tpot_target, options.program_id,
            prefix,
        )  # fmt: skip


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
        return self.work.prefill_tokens

    @property
    def work(self) -> StepWork:
        """What it computed."""
        return StepWork(self.decode_rows, self.context_tokens, self.prefill)


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

    async def batch(self) -> list[Event]:
        """All queued events, at least one; empty when the stream is closed and read to the end."""
        await self._filled()
        events = list(self._events)
        self._events.clear()
        return events

    async def __anext__(self) -> Event:
        await self._filled()
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    async def _filled(self) -> None:
        """Return when an event is queued or none will come."""
        while not self._events and not self._closed:
            await self._signal.wait()

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
        self._key = secrets.token_bytes(16)  # nobody outside can try which tokens give a hash

    def prefix(self, request: Request, page_size: int) -> tuple[int, ...]:
        """``Submitted.prefix`` of a request: keyed hashes of its prompt up to the end of each whole page.

        BLAKE2b (Aumasson et al., RFC 7693), run on over the prompt and read after every page; 0.6 µs a page.
        """
        salt = request.submission.options.cache_salt.encode("utf-8", "surrogatepass")
        state = blake2b(key=blake2b(salt, key=self._key, digest_size=16).digest(), digest_size=8)
        data = memoryview(request.prompt.tobytes())
        size = page_size * request.prompt.itemsize
        hashes = []
        for end in range(size, len(data) + 1, size):
            state.update(data[end - size : end])
            hashes.append(int.from_bytes(state.digest(), "little"))
        return tuple(hashes)

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
