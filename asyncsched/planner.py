"""The planner: turns the state into the next step's plan and hands it to the executor.

This is the one place where work crosses to the compute thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from .config import EngineConfig
from .contract import EMPTY_INTS, Executor, IntArray, PrefillChunk, RowJoin, StepPlan
from .errors import RequestTooLargeError
from .placement import Placement
from .policy import EngineView, PrefillBudget
from .recorder import Recorder
from .request import Request
from .service import StepService, output_by_tenant
from .state import ControlState, InFlight, PlannedChunk
from .wakeup import Signal

NO_PREFILL = PrefillBudget(0, 1)
"""The budget of a step for which no policy was asked, since there are no prompts."""


class Planner:
    """Builds plans while fewer than ``depth`` steps are in flight and something is runnable.

    It never waits for a token's value: a decode step names no tokens, and ends by length are known
    in advance. Loop thread only.

    Attributes:
        wake: Set it when something has changed.
        blocked: Why the first waiting request does not run; empty if nothing waits.
    """

    def __init__(
        self,
        state: ControlState,
        placement: Placement,
        view: EngineView,
        executor: Executor,
        config: EngineConfig,
        *,
        evict: Signal,
        watch: Signal,
    ) -> None:
        self.wake = Signal()
        self.blocked = ""
        self._state = state
        self._placement = placement
        self._view = view
        self._executor = executor
        self._evict = evict
        self._watch = watch
        self._limit = max(1, config.depth)
        self._budget = config.token_budget
        self._chunk_cap = config.chunk_cap or config.token_budget
        self._chunked = config.chunked_prefill
        self._decode_skipped = False
        self._low_pages = int(config.low_watermark * state.limits.pages)

    async def run(self) -> None:
        """Plan whenever something has changed."""
        while True:
            await self.wake.wait()
            self.top_up()

    def top_up(self) -> None:
        """Submit plans until ``depth`` are in flight or nothing is runnable."""
        state = self._state
        while state.outstanding < self._limit and state.mode != "frozen":
            plan = self.build() if state.recorder is None else self._recorded(state.recorder)
            if plan is None:
                return
            self._executor.submit(plan)
            if state.outstanding == 1:
                self._watch.set()
            if state.pool.free < self._low_pages:
                self._evict.set()

    def _recorded(self, recorder: Recorder) -> StepPlan | None:
        with recorder.working("planner", "plan"):
            return self.build()

    def build(self) -> StepPlan | None:
        """The next plan, or ``None`` if nothing is runnable."""
        state = self._state
        rows = state.rows
        budget = NO_PREFILL
        if state.prefilling or state.waiting:
            budget = state.policies.budget(self._view, self._budget, self._chunk_cap, len(rows.decode_rows()))
        order = self._make_way() if budget.tokens else None
        pages = self._placement.grow(rows.decode_rows())
        if pages is None:
            self.blocked = "pages"
            if not state.in_flight:  # nothing is in flight, so what was given up is free already
                pages = self._placement.grow(rows.decode_rows())
            if pages is None:
                return None
        decode = rows.decode_rows()
        if not len(decode):
            self._decode_skipped = False
        step = state.submitted + 1
        joins: list[RowJoin] = []
        chunks: list[PrefillChunk] = []
        planned: list[PlannedChunk] = []
        self.blocked = ""
        if state.prefilling or state.waiting:
            self._prefill(budget, step, order, joins, chunks, planned)
            if chunks and not budget.decode:
                decode = EMPTY_INTS
            if not chunks and not len(decode) and not state.in_flight:
                self._unblock(step, joins, chunks, planned)
        if not chunks and not len(decode):
            return None
        work = len(decode) + sum(chunk.size for chunk in planned)
        self._decode_skipped = bool(len(decode)) and work > self._budget
        if self._decode_skipped:  # an unchunked prompt that leaves no room beside it has the step to itself
            decode = EMPTY_INTS
        leaves = tuple(state.leaves)  # before this step's own endings, which leave with the next plan
        state.leaves.clear()
        if len(decode):
            for row in rows.plan_decode(decode).tolist():
                state.leave_device(row)
        sampled = [chunk.request for chunk in planned if chunk.sample]
        for request in sampled:
            self._begin_decode(request)
        all_rows = np.concatenate([decode, np.array([request.row for request in sampled], np.int32)]) if sampled else decode
        service = self._service(all_rows, planned) if state.policies.wants_steps else None
        context = int(rows.length[decode].sum()) if len(decode) else 0
        state.in_flight.append(
            InFlight(
                step,
                all_rows,
                rows.lease[all_rows],
                len(decode),
                context,
                planned,
                state.clock(),
                state.outstanding > 0,
                service,
            )
        )
        state.submitted = step
        return StepPlan(step, tuple(joins), leaves, pages, tuple(chunks), decode=bool(len(decode)))

    def _make_way(self) -> Iterator[Request] | None:
        """Ask the policy whether the first waiting request may take the place of running ones, if it does not fit.

        Returns the waiting requests in the policy's order, if it was asked for it.
        """
        state = self._state
        if not state.policies.makes_way or state.mode != "running" or not state.waiting:
            return None
        order = state.policies.order(state.waiting, self._view)
        first = next(order, None)
        if first is None:
            return order
        self._placement.make_way(first)
        return chain([first], order)

    def _prefill(
        self,
        budget: PrefillBudget,
        step: int,
        order: Iterator[Request] | None,
        joins: list[RowJoin],
        chunks: list[PrefillChunk],
        planned: list[PlannedChunk],
    ) -> None:
        """Fill the budget with chunks: prompts begun earlier first, then waiting requests in policy order."""
        state = self._state
        self.blocked = "token budget"
        left = budget.tokens
        if left <= 0:
            return
        for request in list(state.prefilling.values()):
            size = self._chunk_size(len(request.fill) - request.computed, left, budget.chunk, first=not chunks)
            if not size:
                return
            left -= size
            chunks.append(self._chunk(request, size, step, planned))
        waiting = state.admissible()
        if not waiting or not state.rows.free:
            self.blocked = "rows" if waiting else "paused"
            return
        for request in order or state.policies.order(waiting, self._view):
            if left <= 0 or not state.rows.free:
                self.blocked = "token budget" if left <= 0 else "rows"
                return
            if request.number not in waiting:
                continue  # it left the waiting set since the policy was asked
            size = self._admit(request, left, budget.chunk, step, joins, first=not chunks)
            if not size:
                return  # it does not fit now; going past it would let small requests starve large ones
            left -= size
            chunks.append(self._chunk(request, size, step, planned))
        self.blocked = "policy" if state.waiting else ""

    def _admit(self, request: Request, left: int, cap: int, step: int, joins: list[RowJoin], *, first: bool) -> int:
        """Place a waiting request; returns the size of its first chunk, or 0 if it must wait."""
        todo = len(request.fill) - self._placement.cached_tokens(request)
        size = self._chunk_size(todo, left, cap, first=first)
        if not size:
            self.blocked = "token budget"
            return 0
        join = self._placement.admit(request, step)
        if join is None:
            self.blocked = "pages"
            return 0
        joins.append(join)
        return size

    def _unblock(self, step: int, joins: list[RowJoin], chunks: list[PrefillChunk], planned: list[PlannedChunk]) -> None:
        """Nothing runs, nothing is in flight, and yet there is work: serve or fail the oldest, so that no one hangs."""
        state = self._state
        if state.prefilling:  # the policy's budget left nothing for a prompt that was begun
            request = next(iter(state.prefilling.values()))
            todo = len(request.fill) - request.computed
            chunks.append(
                self._chunk(request, self._chunk_size(todo, self._budget, self._chunk_cap, first=True), step, planned)
            )
            return
        waiting = state.admissible()
        if not waiting:
            return
        request = next(iter(waiting.values()))
        size = self._admit(request, self._budget, self._chunk_cap, step, joins, first=True)
        if size:
            chunks.append(self._chunk(request, size, step, planned))
            return
        needed, free = self._placement.pages_needed(request), state.pool.free + state.tree.evictable
        message = (
            f"needs {needed} pages, but only {free} of {state.limits.pages} can be freed: lower max_tokens or enlarge the pool"
        )
        state.release(request, "error", error=RequestTooLargeError(message))
        self.wake.set()

    def _chunk_size(self, todo: int, left: int, cap: int, *, first: bool) -> int:
        """Tokens of a prompt to compute now; 0 if it must wait for the next step."""
        if self._chunked:
            return max(0, min(todo, left, cap))
        if todo <= left:
            return todo
        # Unchunked: whole, and alone if it is over what is left; but the rows that decode get every other step.
        return todo if first and not self._decode_skipped else 0

    def _chunk(self, request: Request, size: int, step: int, planned: list[PlannedChunk]) -> PrefillChunk:
        """Plan the next ``size`` tokens of a request's fill, and share their whole pages from this step on."""
        state, row = self._state, request.row
        assert row is not None
        page_size = state.limits.page_size
        start = request.computed
        if start == request.inserted * page_size:
            request.page_since = step
        request.computed = end = start + size
        state.rows.length[row] = end
        if state.donate(request, request.fill, end, step, request.page_since) and end // page_size > start // page_size:
            request.page_since = step
        last = end == len(request.fill)
        sample = last and request.max_new > 0
        planned.append(PlannedChunk(request, request.lease, start, size, last, sample))
        if last:
            del state.prefilling[request.number]
        return PrefillChunk(row, start, request.fill[start:end], sample)

    def _begin_decode(self, request: Request) -> None:
        """The request's first token is planned: from the next step on it decodes, if it wants more."""
        rows, row = self._state.rows, request.row
        assert row is not None
        rows.remaining[row] -= 1
        if rows.remaining[row]:
            rows.set_decoding(row, True)
        else:
            self._state.leave_device(row)

    def _service(self, sampled: IntArray, planned: list[PlannedChunk]) -> StepService:
        """Whom this step serves: one output token per row of ``sampled``, and the chunks."""
        rows = self._state.rows
        prompt: dict[str, int] = {}
        for chunk in planned:
            tenant = chunk.request.submission.options.tenant
            prompt[tenant] = prompt.get(tenant, 0) + chunk.size
        output = output_by_tenant(rows.tenant[sampled], self._state.tenants)
        return StepService(rows.number[sampled], output, {chunk.request.number: chunk.size for chunk in planned}, prompt)
