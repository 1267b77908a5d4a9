"""The planner: turns the state into the next step's plan and hands it to the executor.

This is the one place where work crosses to the compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .config import EngineConfig
from .contract import EMPTY_INTS, Executor, IntArray, PrefillChunk, RowJoin, StepPlan
from .errors import RequestTooLargeError
from .policy import RequestView
from .request import Request
from .state import ControlState, InFlight, PlannedChunk
from .wakeup import Signal


class Planner:
    """Builds plans while fewer than ``depth`` steps are in flight and something is runnable.

    It never waits for a token's value: a decode step names no tokens, and ends by length are known
    in advance. Loop thread only. It is also the ``EngineView`` that policies see.
    """

    def __init__(self, state: ControlState, executor: Executor, config: EngineConfig, evict: Signal) -> None:
        self.wake = Signal()
        self._state = state
        self._executor = executor
        self._evict = evict
        self._limit = max(1, config.depth)
        self._budget = config.token_budget
        self._chunk_cap = config.chunk_cap or config.token_budget
        self._chunked = config.chunked_prefill
        self._low_pages = int(config.low_watermark * state.limits.pages)

    async def run(self) -> None:
        """Plan whenever something has changed."""
        while True:
            await self.wake.wait()
            self.top_up()

    def top_up(self) -> None:
        """Submit plans until ``depth`` are in flight or nothing is runnable."""
        state = self._state
        while state.outstanding < self._limit:
            plan = self.build()
            if plan is None:
                return
            self._executor.submit(plan)
            if state.pool.free < self._low_pages:
                self._evict.set()

    def build(self) -> StepPlan | None:
        """The next plan, or ``None`` if nothing is runnable."""
        state = self._state
        rows = state.rows
        decode = rows.decode_rows()
        step = state.submitted + 1
        joins: list[RowJoin] = []
        chunks: list[PrefillChunk] = []
        planned: list[PlannedChunk] = []
        if state.prefilling or (state.waiting and rows.free):
            self._prefill(step, joins, chunks, planned)
            if not chunks and not len(decode) and state.waiting and not state.outstanding:
                self._unblock(step, joins, chunks, planned)
        if not chunks and not len(decode):
            return None
        leaves = tuple(state.leaves)  # before this step's own endings, which leave with the next plan
        state.leaves.clear()
        if len(decode):
            for row in rows.plan_decode(decode).tolist():
                state.leave_device(row)
        sampled = [chunk.request for chunk in planned if chunk.sample]
        for request in sampled:
            self._begin_decode(request)
        all_rows = np.concatenate([decode, np.array([request.row for request in sampled], np.int32)]) if sampled else decode
        served = self._served(decode, planned) if state.policies.wants_steps else None
        state.in_flight.append(
            InFlight(step, all_rows, rows.lease[all_rows], len(decode), planned, state.outstanding > 0, served)
        )
        state.submitted = step
        return StepPlan(step, tuple(joins), leaves, prefill=tuple(chunks), decode=bool(len(decode)))

    def _prefill(self, step: int, joins: list[RowJoin], chunks: list[PrefillChunk], planned: list[PlannedChunk]) -> None:
        """Fill the token budget with chunks: prompts begun earlier first, then waiting requests in policy order."""
        state = self._state
        room = self._budget - len(state.rows.decode_rows())
        if room <= 0:
            return
        budget = state.policies.budget(self, room, self._chunk_cap)
        left = budget.tokens
        for request in list(state.prefilling.values()):
            if left <= 0:
                return
            size = self._chunk_size(len(request.fill) - request.computed, left, budget.chunk, first=not chunks)
            if not size:
                return
            left -= size
            chunks.append(self._chunk(request, size, step, planned))
        if not state.waiting or not state.rows.free:
            return
        for request in state.policies.order(state.waiting, self):
            if left <= 0 or not state.rows.free:
                return
            size = self._admit(request, left, budget.chunk, step, joins, first=not chunks)
            if not size:
                return  # it does not fit now; going past it would let small requests starve large ones
            left -= size
            chunks.append(self._chunk(request, size, step, planned))

    def _unblock(self, step: int, joins: list[RowJoin], chunks: list[PrefillChunk], planned: list[PlannedChunk]) -> None:
        """Nothing runs, nothing is in flight, and yet requests wait: serve or fail the oldest, so that no one hangs."""
        state = self._state
        request = next(iter(state.waiting.values()))
        size = self._admit(request, self._budget, self._chunk_cap, step, joins, first=True)
        if size:
            chunks.append(self._chunk(request, size, step, planned))
            return
        needed = self._pages_for(request)
        message = f"needs {needed} pages but only {state.pool.free + state.tree.evictable} of {state.limits.pages} can be freed"
        state.release(request, "error", error=RequestTooLargeError(f"{message}; lower max_tokens or enlarge the pool"))
        self.wake.set()

    def _chunk_size(self, todo: int, left: int, cap: int, *, first: bool) -> int:
        """Tokens of a prompt to compute now; 0 if it must wait for the next step."""
        if self._chunked:
            return min(todo, left, cap)
        return todo if todo <= left or first else 0  # unchunked: whole, and alone if it is over the budget

    def _pages_for(self, request: Request) -> int:
        """Pages for prompt and output: the last token's own keys and values are never stored."""
        size = self._state.limits.page_size
        return -(-max(len(request.prompt), len(request.prompt) + request.max_new - 1) // size)

    def _admit(
        self, request: Request, left: int, cap: int, step: int, joins: list[RowJoin], *, first: bool
    ) -> int:
        """Give a waiting request a row, its cached prefix and all the pages it may need.

        Returns the size of its first chunk, or 0 if it must wait; then nothing has changed but the
        pages that were evicted for it.
        """
        state = self._state
        tree, pool, size = state.tree, state.pool, state.limits.page_size
        total = self._pages_for(request)
        reusable = self._reusable(request)
        cached = tree.peek(request.namespace, reusable) if reusable else 0
        chunk = self._chunk_size(len(request.fill) - cached, left, cap, first=first)
        if not chunk or not self._make_room(total - cached // size):
            return 0
        pages: IntArray = EMPTY_INTS
        if request.shareable:
            node, pages = tree.match(request.namespace, reusable, step)
            tree.lock(node)
            if not self._make_room(total - len(pages)):  # its own prefix no longer counts as evictable
                tree.unlock(node)
                return 0
            request.node = node
        request.inserted = len(pages)
        request.computed = request.cached = len(pages) * size
        table = np.concatenate([pages, pool.take(total - len(pages))])
        row = state.place(request, table, len(pages))
        counters = state.counters
        counters.prompt_tokens += len(request.fill)
        counters.cached_tokens += request.cached
        joins.append(
            RowJoin(
                row=row,
                number=request.number,
                pages=table,
                cached=request.cached,
                params=request.params,
                seed=request.seed,
                stop_ids=request.stop_ids,
                generated=len(request.output),
                history=request.fill if request.params.counts_tokens else EMPTY_INTS,
            )
        )
        return chunk

    def _reusable(self, request: Request) -> bytes:
        """The part of the fill that may come from the cache: whole pages, and never the last token."""
        if not request.shareable or request.prompt_logprobs is not None:
            return b""
        size = self._state.limits.page_size
        return request.fill[: (len(request.fill) - 1) // size * size].tobytes()

    def _make_room(self, needed: int) -> bool:
        """See to ``needed`` free pages; evicts what is missing. False if they are not free yet."""
        state = self._state
        pool = state.pool
        if pool.free >= needed:
            return True
        coming = pool.free + pool.limbo
        if coming + state.tree.evictable < needed:
            return False
        if coming < needed:
            self.evict(needed - coming)
        return pool.free >= needed

    def evict(self, count: int) -> int:
        """Drop ``count`` pages of unused prefixes; returns how many went to the pool."""
        state = self._state
        freed = 0
        for pages in state.tree.evict(count):
            state.pool.release(pages, state.submitted)
            freed += len(pages)
        state.counters.evicted_pages += freed
        if not state.outstanding:
            state.pool.advance(state.completed)
        return freed

    def _chunk(self, request: Request, size: int, step: int, planned: list[PlannedChunk]) -> PrefillChunk:
        """Plan the next ``size`` tokens of a request's fill, and share their whole pages from this step on."""
        state, row = self._state, request.row
        assert row is not None
        start = request.computed
        request.computed = end = start + size
        state.rows.length[row] = end
        state.donate(request, request.fill, end, step)
        last = end == len(request.fill)
        sample = last and request.max_new > 0
        planned.append(PlannedChunk(request, request.lease, size, last, sample))
        state.counters.computed_prompt_tokens += size
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

    def _served(self, decode: IntArray, planned: list[PlannedChunk]) -> dict[int, int]:
        """Tokens per request number in this step."""
        by_row = self._state.by_row
        served = {request.number: 1 for row in decode.tolist() if (request := by_row[row]) is not None}
        for chunk in planned:
            served[chunk.request.number] = chunk.size
        return served

    # What policies see of the engine (policy.EngineView).

    @property
    def step(self) -> int:
        """Number of the step being planned."""
        return self._state.submitted + 1

    @property
    def now(self) -> float:
        """The engine's clock, seconds."""
        return self._state.clock()

    @property
    def token_budget(self) -> int:
        """Most tokens a step may compute."""
        return self._budget

    @property
    def decoding(self) -> int:
        """Rows that decode in this step."""
        return len(self._state.rows.decode_rows())

    @property
    def free_rows(self) -> int:
        """Rows a new request could take."""
        return self._state.rows.free

    @property
    def free_pages(self) -> int:
        """Pages that are free now."""
        return self._state.pool.free

    @property
    def evictable_pages(self) -> int:
        """Pages of cached prefixes that nobody uses."""
        return self._state.tree.evictable

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""
        return self._state.limits.pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._state.limits.page_size

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a row, in order of admission."""
        return [request.view for request in sorted_by_admission(self._state)]

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        return len(self._state.waiting)

    def cached_prefix(self, request: RequestView) -> int:
        """Prompt tokens of a waiting request that are in the cache now; 0 if it does not wait."""
        found = self._state.waiting.get(request.number)
        return 0 if found is None else self._state.tree.peek(found.namespace, self._reusable(found))


def sorted_by_admission(state: ControlState) -> list[Request]:
    """Requests that hold a row, in order of admission, then of arrival."""
    running = [request for request in state.by_row if request is not None]
    return sorted(running, key=lambda request: (request.admitted_at or 0.0, request.number))
