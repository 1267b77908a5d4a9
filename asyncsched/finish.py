"""The finish task: applies step results, ends requests, wakes the consumers.

This is the one place where results come back from the compute thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio.lowlevel
import numpy as np

from .config import EngineConfig
from .contract import IntArray, StepResult
from .errors import EngineDeadError, EngineError, RequestFailedError, StepFailedError
from .events import StepCompleted
from .logs import get_logger
from .planner import Planner
from .request import Request
from .rows import WINDOW
from .state import ControlState, InFlight
from .wakeup import Signal


class Finisher:
    """Takes results in step order and brings the state up to date. Loop thread only.

    Args:
        on_fatal: Told when the device is lost.
    """

    def __init__(
        self, state: ControlState, planner: Planner, config: EngineConfig, on_fatal: Callable[[EngineDeadError], None]
    ) -> None:
        self._state = state
        self._planner = planner
        self._on_fatal = on_fatal
        self._serial = config.depth == 0
        self._slow = config.slow_step_seconds
        self._log = get_logger("finish")
        self._results: deque[StepResult] = deque()
        self._wake = Signal()
        self._last_completed_at: float | None = None

    def receive(self, result: StepResult) -> None:
        """Take a result from the inbox."""
        self._results.append(result)
        self._wake.set()

    async def run(self) -> None:
        """Apply results as they come."""
        while True:
            await self._wake.wait()
            while self._results:
                self.process(self._results.popleft())
                if self._results:  # let consumers run between two results
                    await anyio.lowlevel.checkpoint()

    def process(self, result: StepResult) -> None:
        """Apply one result and see that the device has something to do."""
        recorder = self._state.recorder
        if recorder is None:  # once per step: not even an empty context
            self._process(result)
            return
        with recorder.working("finish", f"step {result.step}"):
            self._process(result)

    def _process(self, result: StepResult) -> None:
        state = self._state
        state.complete_step(result.step)
        if not state.outstanding and not self._serial:
            self._planner.top_up()  # the device idles: feed it before the bookkeeping
        record = state.in_flight.popleft()
        self._measure(record, result)
        if result.error is None:
            self.apply(record, result)
        else:
            self._fail(record, result)
        if not result.fatal:
            self._planner.top_up()
        state.notify()
        if state.recorder is not None:
            state.recorder.step(record.work, result, state.counts())

    def apply(self, record: InFlight, result: StepResult) -> None:
        """Append the tokens, end what has ended, wake who waits."""
        state, table = self._state, self._state.rows
        rows, tokens = result.rows, result.tokens
        if not np.array_equal(rows, record.rows):
            raise EngineError(f"step {record.step}: the executor answered for rows {rows}, planned were {record.rows}")
        if len(rows):
            mine = table.lease[rows] == record.leases
            if not mine.all():  # released or given away since the plan was made: not theirs any more
                state.counters.dropped_tokens += int(len(rows) - np.count_nonzero(mine))
                rows, tokens = rows[mine], tokens[mine]
        if result.failed:
            rows, tokens = self._drop_failed(rows, tokens, result.failed)
        now = state.clock()
        for chunk in record.chunks:
            if not chunk.current:
                continue
            request = chunk.request
            if request.prompt_logprobs is not None and result.prompt_logprobs and request.row in result.prompt_logprobs:
                missing = len(request.prompt) - len(request.prompt_logprobs)  # output computed again is not prompt
                request.prompt_logprobs.extend(result.prompt_logprobs[request.row][:missing])
            if chunk.sample and request.first_token_at is None:
                request.first_token_at = now
            if chunk.last and not chunk.sample:
                state.release(request, "length")
        if len(rows):
            self._deliver(rows, tokens, result)
        if record.service is not None:
            state.policies.on_step(record.service.report(record.step, result.completed_at - result.launched_at))

    def _deliver(self, rows: IntArray, tokens: IntArray, result: StepResult) -> None:
        state, table = self._state, self._state.rows
        state.counters.generated_tokens += len(rows)
        received, stopped, whole = table.receive(rows, tokens)
        for index in np.flatnonzero(received % WINDOW == 0).tolist():
            self._request(rows[index]).flush()
        if table.eager.any():
            for index in np.flatnonzero(table.eager[rows]).tolist():
                self._attend(self._request(rows[index]), int(tokens[index]), int(received[index]), result)
        for index in np.flatnonzero(stopped | whole).tolist():
            request = state.by_row[rows[index]]
            if request is None:
                continue  # a stop string ended it just now
            if stopped[index]:
                token = int(tokens[index])
                state.release(request, "stop", stop_reason=token if token in request.params.stop_token_ids else None)
            else:
                state.release(request, "length")
        heard = table.listening[rows]
        if heard.any():
            table.listening[rows] = False
            for row, token in zip(rows[heard].tolist(), tokens[heard].tolist(), strict=True):
                self._request(row).submission.wake(token)

    def _request(self, row: int) -> Request:
        request = self._state.by_row[row]
        assert request is not None
        return request

    def _attend(self, request: Request, token: int, received: int, result: StepResult) -> None:
        """What the vectorised path cannot do: log-probabilities, many stop ids, stop strings."""
        state, params = self._state, request.params
        if request.logprobs is not None and result.logprobs is not None:
            request.logprobs.append(result.logprobs[int(request.row)])  # type: ignore[arg-type]
        if token in request.stop_ids and received >= params.min_tokens:
            state.release(request, "stop", stop_reason=token if token in params.stop_token_ids else None)
        elif params.stop and (stopped_by := request.feed_text()) is not None:
            state.release(request, "stop", stop_reason=stopped_by)

    def _drop_failed(self, rows: IntArray, tokens: IntArray, failed: dict[int, str]) -> tuple[IntArray, IntArray]:
        """End the rows whose own computation went wrong; the others keep their tokens."""
        bad = np.isin(rows, list(failed))
        for row in rows[bad].tolist():
            request = self._request(row)
            self._state.release(request, "error", error=RequestFailedError(f"no token could be sampled: {failed[row]}"))
        return rows[~bad], tokens[~bad]

    def _fail(self, record: InFlight, result: StepResult) -> None:
        """A step raised: its requests end with the cause; those that only shared its pages start over."""
        state = self._state
        state.counters.failed_steps += 1
        cause = result.error
        self._log.error("step_failed", step=result.step, fatal=result.fatal, error=repr(cause))
        if result.fatal:
            dead = EngineDeadError(f"the device was lost in step {result.step}: {cause!r}")
            dead.__cause__ = cause
            self._on_fatal(dead)
            return
        victims = [state.by_row[row] for row in record.rows[state.rows.lease[record.rows] == record.leases].tolist()]
        victims += [chunk.request for chunk in record.chunks if chunk.current]
        for request in victims:
            if request is not None and not request.ended:
                error = StepFailedError(f"step {result.step}, which computed this request, raised {cause!r}")
                error.__cause__ = cause
                state.release(request, "error", error=error)
        invalid = state.tree.spoilt_by(result.step)
        for request in [r for r in state.by_row if r is not None]:
            node = request.node
            while node is not None and node not in invalid:
                node = node.parent
            if node is not None:
                state.restart(request)
        for pages in state.tree.remove(invalid):
            state.pool.release(pages, state.submitted)

    def _measure(self, record: InFlight, result: StepResult) -> None:
        state = self._state
        counters = state.counters
        counters.device_busy += result.completed_at - result.launched_at
        if record.overlapped and self._last_completed_at is not None:
            counters.overlapped_steps += 1
            counters.device_idle += max(0.0, result.launched_at - self._last_completed_at)
        self._last_completed_at = result.completed_at
        if result.error is None and state.costs.learning is not None:
            state.costs.learning.observe(record.work, result.completed_at - result.launched_at)
        if result.completed_at - result.launched_at > self._slow:
            counters.slow_steps += 1
            self._log.warning("slow_step", step=result.step, seconds=round(result.completed_at - result.launched_at, 3))
        if state.events.listeners:
            state.events.emit(
                StepCompleted(
                    state.clock(), result.step, record.decode_rows, record.context_tokens,
                    tuple(record.work.prefill), result.launched_at, result.completed_at, result.error is not None,
                )
            )  # fmt: skip
