"""Time limits of requests, and a watch over steps that take too long. Neither runs while nothing is pending."""

from __future__ import annotations

import heapq

import anyio

from .config import EngineConfig
from .errors import DeadlineExpiredError, QueueTimeoutError, RequestTimeoutError
from .logs import get_logger
from .planner import Planner
from .request import Request, Submission
from .state import ControlState
from .wakeup import Signal


class Timekeeper:
    """Ends requests that wait too long, take too long, or can no longer meet their deadline. Loop thread only.

    The clock only ever ends a request; it never orders anything, so plans stay a function of arrivals
    and results.
    """

    def __init__(self, state: ControlState, planner: Planner, config: EngineConfig) -> None:
        self._state = state
        self._planner = planner
        self._queue_timeout = config.queue_timeout
        self._request_timeout = config.request_timeout
        self._heap: list[tuple[float, int, str, Submission]] = []
        self._wake = Signal()

    def watch(self, submission: Submission) -> None:
        """Start the clocks of a new submission."""
        if len(self._heap) > 64 + 4 * len(self._state.live):  # long limits must not keep what has ended
            self._heap = [entry for entry in self._heap if not entry[3].ended]
            heapq.heapify(self._heap)
        options = submission.options
        limits = {
            "queue": options.queue_timeout if options.queue_timeout is not None else self._queue_timeout,
            "deadline": options.deadline,
            "request": options.timeout if options.timeout is not None else self._request_timeout,
        }
        for kind, seconds in limits.items():
            if seconds is not None:
                entry = (submission.arrived_at + seconds, submission.number, kind, submission)
                heapq.heappush(self._heap, entry)
                if self._heap[0] is entry:
                    self._wake.set()

    async def run(self) -> None:
        """Expire what is due; sleep until the next limit, or until there is one."""
        while True:
            while self._heap and (self._heap[0][3].ended or self._heap[0][0] <= self._state.clock()):
                self._expire(*heapq.heappop(self._heap)[2:])
            pause = self._heap[0][0] - self._state.clock() if self._heap else None
            with anyio.move_on_after(pause):
                await self._wake.wait()

    def _expire(self, kind: str, submission: Submission) -> None:
        if submission.ended:
            return
        waited = round(self._state.clock() - submission.arrived_at, 3)
        error: RequestTimeoutError
        if kind == "request":
            error = RequestTimeoutError(f"the request took longer than its limit: {waited} s")
        elif kind == "queue":
            error = QueueTimeoutError(
                f"the request waited {waited} s without being admitted; retry later or raise queue_timeout"
            )
        else:
            error = DeadlineExpiredError(f"the deadline passed after {waited} s of waiting; nothing was computed")
        due = [request for request in submission.requests if kind == "request" or _never_ran(request)]
        for request in due:
            self._state.release(request, "error", error=error)
        if not submission.requests:
            submission.error = error
            self._state.retire(submission)
            submission.wake()
        if due:
            self._planner.wake.set()
            self._state.notify()


class Watchdog:
    """Warns when no step has completed for a while although some are in flight. A slow step is not a dead one."""

    def __init__(self, state: ControlState, config: EngineConfig) -> None:
        self.wake = Signal()
        self._state = state
        self._seconds = config.slow_step_seconds
        self._log = get_logger("watchdog")

    async def run(self) -> None:
        """Look every ``slow_step_seconds`` while steps are in flight."""
        state = self._state
        while True:
            await self.wake.wait()
            while state.outstanding:
                seen = state.completed
                await anyio.sleep(self._seconds)
                if state.outstanding and state.completed == seen:
                    state.counters.stuck_warnings += 1
                    self._log.warning("no_step_completed", step=seen + 1, seconds=self._seconds, in_flight=state.outstanding)


def _never_ran(request: Request) -> bool:
    return request.admitted_at is None
