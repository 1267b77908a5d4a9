"""The control plane's state and the one path by which a request leaves it.

Every structure here is touched on the loop thread only; the tasks (admission, planner, eviction,
finish) share this object and nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import anyio
import numpy as np
from numpy.typing import NDArray

from .arrivals import Arrivals
from .contract import EMPTY_INTS, ExecutorLimits, IntArray
from .cost import StepCosts, StepWork
from .events import Admitted, EventBus, Finished, Preempted
from .pages import PagePool
from .policy_host import PolicyHost
from .radix import RadixTree
from .recorder import IDLE, Counts, Recorder
from .request import FinishReason, Request, Submission
from .rows import RowTable
from .service import StepService, TenantIds
from .wakeup import Signal


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A prefill chunk of a submitted step.

    Attributes:
        request: Whose prompt.
        lease: The request's hold on its row when the plan was made.
        start, size: Tokens computed before it, and its own.
        last: The fill is complete with this chunk.
        sample: Its last position yields the request's next token.
    """

    request: Request
    lease: int
    start: int
    size: int
    last: bool
    sample: bool

    @property
    def current(self) -> bool:
        """False if the request has ended or lost its row since."""
        return self.request.lease == self.lease


@dataclass(slots=True)
class InFlight:
    """What a submitted step will bring back.

    Attributes:
        step: Its number.
        rows: Rows that get a token, in the order of the result, int32 ``[n]``.
        leases: Who held them when the plan was made, int64 ``[n]``.
        decode_rows: How many of ``rows`` decode; the others are chunks that sample.
        context_tokens: Tokens those attend to, summed.
        chunks: Its prefill chunks.
        submitted_at: When, on the engine's clock.
        overlapped: It was submitted while an earlier step was still in flight.
        service: Whom it serves, if a policy wants to know.
    """

    step: int
    rows: IntArray
    leases: NDArray[np.int64]
    decode_rows: int
    context_tokens: int
    chunks: list[PlannedChunk]
    submitted_at: float
    overlapped: bool
    service: StepService | None

    @property
    def work(self) -> StepWork:
        """What it computes."""
        return StepWork(self.decode_rows, self.context_tokens, tuple((chunk.start, chunk.size) for chunk in self.chunks))


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    submitted: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    dropped_tokens: int = 0
    evicted_pages: int = 0
    failed_steps: int = 0
    slow_steps: int = 0
    stuck_warnings: int = 0
    restarts: int = 0
    preemptions: int = 0
    device_busy: float = 0.0
    device_idle: float = 0.0
    overlapped_steps: int = 0


Mode = Literal["running", "finishing", "frozen"]


class ControlState:
    """Rows, pages, prefixes, requests and steps in flight. Loop thread only.

    Attributes:
        live: Submissions that have not ended, by the caller's id.
        arrivals: Those of them that are not in the waiting set yet, counted.
        waiting: Requests that want a row, in arrival order, by number; ``waiting_tokens`` is the sum of their prompts.
        prefilling: Requests with a row whose prompt is not planned to its end, in order of admission.
        by_row: The request that holds each row.
        leaves: Rows the device must forget with the next plan.
        in_flight: Steps submitted and not applied, oldest first.
        lobby: Wakes the admission task: a submission came in, or the waiting set has shrunk.
        submitted, completed: Numbers of the last step submitted and completed.
        over: The engine is closing or dead.
        recorder: Set while somebody records a timeline.
        mode: ``running``; ``finishing``: no new request is admitted; ``frozen``: nothing is planned.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        policies: PolicyHost,
        *,
        clock: Callable[[], float],
        events: EventBus,
        costs: StepCosts,
        prefix_cache: bool,
    ) -> None:
        self.limits = limits
        self.policies = policies
        self.clock = clock
        self.events = events
        self.costs = costs
        self.prefix_cache = prefix_cache
        self.rows = RowTable(limits.max_rows)
        self.pool = PagePool(limits.pages)
        self.tree = RadixTree(limits.page_size, policies.eviction_key, policies.on_evict)
        self.live: dict[str, Submission] = {}
        self.arrivals = Arrivals()
        self.waiting: dict[int, Request] = {}
        self.waiting_tokens = 0
        self.tenants = TenantIds()
        self.prefilling: dict[int, Request] = {}
        self.by_row: list[Request | None] = [None] * limits.max_rows
        self.leaves: list[int] = []
        self.in_flight: deque[InFlight] = deque()
        self.submitted = 0
        self.completed = 0
        self.mode: Mode = "running"
        self.over = False
        self._leases = 0
        self._watchers: list[anyio.Event] = []
        self.recorder: Recorder | None = None
        self.lobby = Signal()
        self.counters = Counters()

    def working(self, task: str, name: str) -> AbstractContextManager[None]:
        """Within: a control task is at work, for the timeline."""
        return IDLE if self.recorder is None else self.recorder.working(task, name)

    def counts(self) -> Counts:
        """How full everything is, for the timeline."""
        cached = self.tree.evictable
        used = self.limits.pages - self.pool.free - cached
        return Counts(time.monotonic(), self.rows.in_use, len(self.waiting), used, cached, self.outstanding)

    @property
    def outstanding(self) -> int:
        """Steps the device has not completed."""
        return self.submitted - self.completed

    @property
    def resumed(self) -> bool:
        """True while waiting requests may be admitted."""
        return self.mode == "running"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on this state, or for the end of the engine; looked at after every step and abort."""
        while not condition() and not self.over:
            event = anyio.Event()
            self._watchers.append(event)
            await event.wait()

    def notify(self) -> None:
        """Have ``until`` look again."""
        watchers, self._watchers = self._watchers, []
        for event in watchers:
            event.set()

    def enqueue(self, request: Request) -> None:
        """Put a request into the waiting set, in arrival order."""
        request.waiting_since_step = self.submitted + 1
        late = bool(self.waiting) and request.number < next(reversed(self.waiting))
        self.waiting[request.number] = request
        self.waiting_tokens += len(request.prompt)
        if late:  # its prompt took longer to tokenise than a later one's, or it lost its row
            self.waiting = dict(sorted(self.waiting.items()))

    def admissible(self) -> dict[int, Request]:
        """The waiting requests that may get a row: all, or while finishing those that have lost theirs."""
        if self.mode == "running":
            return self.waiting
        return {number: request for number, request in self.waiting.items() if request.admitted_at is not None}

    @property
    def finishing_done(self) -> bool:
        """True if nothing that was begun is left to finish."""
        return not self.rows.in_use and not self.admissible()

    def complete_step(self, step: int) -> None:
        """The device is through with ``step``: what was fenced by it is free."""
        self.completed = step
        self.rows.advance(step)
        self.pool.advance(step)

    def place(self, request: Request, pages: IntArray, donated: int) -> int:
        """Give a request a row and its block table, whose first ``donated`` pages are the tree's."""
        self._leases += 1
        request.lease = self._leases
        row = self.rows.take(request.lease)
        rows = self.rows
        request.row, request.rows = row, rows
        request.pages = pages
        request.donated = np.zeros(len(pages), np.bool_)
        request.donated[:donated] = True
        request.own_pages = len(pages) - donated
        self.by_row[row] = request
        self._leave_waiting(request)
        self.prefilling[request.number] = request
        produced = request.resumed_at = len(request.output)
        rows.number[row] = request.number
        rows.tenant[row] = self.tenants.take(request.submission.options.tenant)
        rows.length[row] = request.computed
        rows.capacity[row] = len(pages) * self.limits.page_size
        rows.received[row] = produced
        rows.max_new[row] = request.max_new
        rows.remaining[row] = request.max_new - produced
        rows.min_new[row] = request.params.min_tokens
        if len(request.stop_ids) <= rows.stop_ids.shape[1]:
            rows.stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        rows.eager[row] = request.eager
        rows.listening[row] = request.submission.attentive
        rows.joined[row] = True
        now = self.clock()
        if request.admitted_at is None:
            request.admitted_at = now
        if self.events.listeners:
            self.events.emit(Admitted(now, request.submission.request_id, request.number, row, request.computed))
        return row

    def leave_device(self, row: int) -> None:
        """Tell the device with the next plan that the row stops. Idempotent."""
        self.rows.set_decoding(row, False)
        if self.rows.joined[row]:
            self.rows.joined[row] = False
            self.leaves.append(row)

    def release(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: BaseException | None = None,
    ) -> None:
        """End a request, whatever its stage: the only way out. Idempotent."""
        if request.ended:
            return
        self._leave_waiting(request)
        self._vacate(request, keep=reason != "error")
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.error = error
        request.finished_at = self.clock()
        if request.eager:
            request.feed_text()
        self.counters.finished[reason] += 1
        self.policies.on_finish(request)
        submission = request.submission
        if submission.ended:
            self.retire(submission)
        if self.events.listeners:
            self.events.emit(Finished(request.finished_at, submission.request_id, request.number, reason, len(request.output)))
        submission.wake()

    def retire(self, submission: Submission) -> None:
        """Forget a submission that has ended; its id may be used again."""
        self.arrivals.remove(submission)
        self.lobby.set()
        if self.live.get(submission.request_id) is submission:
            del self.live[submission.request_id]
        if not self.prefix_cache and self.tree.pages:
            for pages in self.tree.clear():  # the shared prompt of an ``n > 1`` submission
                self.pool.release(pages, self.submitted)

    def restart(self, request: Request, *, keep: bool = False) -> None:
        """Take a request's row and pages and let it wait again; its output so far becomes part of the fill."""
        self._vacate(request, keep=keep)
        request.fill = (
            np.concatenate([request.prompt, np.array(request.output, np.int32)]) if request.output else request.prompt
        )
        request.computed = request.inserted = 0
        if request.prompt_logprobs is not None:
            request.prompt_logprobs.clear()
        self.counters.restarts += 1
        self.enqueue(request)

    def preempt(self, request: Request) -> None:
        """Take a request's row for others' sake; what it has computed stays cached while there is room."""
        request.preemptions += 1
        self.counters.preemptions += 1
        self.restart(request, keep=True)
        if self.events.listeners:
            self.events.emit(Preempted(self.clock(), request.submission.request_id, request.number, len(request.output)))

    def running(self) -> list[Request]:
        """Requests that hold a row, in order of admission."""
        return sorted((request for request in self.by_row if request is not None), key=lambda request: request.lease)

    def _leave_waiting(self, request: Request) -> None:
        if self.waiting.pop(request.number, None) is not None:
            self.waiting_tokens -= len(request.prompt)
            self.lobby.set()

    def _vacate(self, request: Request, *, keep: bool) -> None:
        """Give back row and pages, fenced by the last submitted step; with ``keep`` whole pages stay cached."""
        if request.row is None:
            return
        request.flush()
        row, fence = request.row, self.submitted
        self.prefilling.pop(request.number, None)
        self.leave_device(row)
        if keep and self.prefix_cache:
            self._cache_output(request)
        if request.node is not None:
            self.tree.unlock(request.node)
            request.node = None
        self.pool.release(request.pages[~request.donated], fence)
        request.pages = EMPTY_INTS
        request.own_pages = 0
        self.tenants.give_back(int(self.rows.tenant[row]))
        self.rows.release(row, fence)
        self.by_row[row] = None
        request.row = None
        request.lease = 0

    def _cache_output(self, request: Request) -> None:
        """Insert what is not in the tree yet, as far as its keys and values are certain.

        That is everything but the last token, once a token has arrived that was sampled after the
        whole fill.
        """
        if request.node is None or len(request.output) == request.resumed_at:
            return
        tokens = np.concatenate([request.prompt, np.array(request.output, np.int32)])
        self.donate(request, tokens, len(tokens) - 1, self.submitted, self.submitted + 1, over=True)

    def donate(self, request: Request, tokens: IntArray, upto: int, step: int, since: int, *, over: bool = False) -> bool:
        """Insert the whole pages of ``tokens[:upto]`` that are not in the tree yet; see ``RadixTree.extend``.

        While a request runs, it does not walk over runs that another one has inserted meanwhile: it
        would lock their pages beside its own copies, and hold more than its share of the pool.
        Returns False if such a run stands in the way.
        """
        full = upto // self.limits.page_size
        if request.node is None or full <= request.inserted:
            return True
        size, first = self.limits.page_size, request.inserted
        run = tokens[first * size : full * size].astype(np.int32).tobytes()
        node, taken = self.tree.extend(
            request.node, run, request.pages[first:full], step, since, over=over, use=request.use(self.clock())
        )
        if not taken and not over:
            return False
        self.tree.move_lock(request.node, node)
        request.node = node
        request.inserted = full
        for start, end in taken:
            request.donated[first + start : first + end] = True
            request.own_pages -= end - start
        return True
