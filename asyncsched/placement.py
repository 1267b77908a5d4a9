"""Rows and pages for requests: prefix matching, allocation, growth, eviction and preemption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from .config import EngineConfig
from .contract import EMPTY_INTS, NO_PAGES, IntArray, PageAppends, RowJoin
from .policy import EngineView
from .prefix import Node
from .request import Request
from .reserve import ReserveEstimate
from .state import ControlState


class Placement:
    """Decides whether a request fits now, and finds pages. Loop thread only.

    With ``reserve="full"`` a request gets every page it may ever need when it is admitted, and never
    loses them. With ``reserve="expected"`` it gets the pages of its prompt and grows; when pages run
    out, victims give up their rows and are computed again later, with the same tokens.
    """

    def __init__(self, state: ControlState, config: EngineConfig) -> None:
        self._state = state
        self._full = config.reserve == "full"
        self._grows = config.reserve == "expected"
        self._protect_after = config.max_preemptions
        self.estimate = ReserveEstimate()
        self.view: EngineView | None = None  # set once the view, which needs this object, exists

    def pages_needed(self, request: Request) -> int:
        """Pages for prompt and whole output: the last token's own keys and values are never stored."""
        size = self._state.limits.page_size
        return -(-max(len(request.prompt), len(request.prompt) + request.max_new - 1) // size)

    def cached_tokens(self, request: Request) -> int:
        """Tokens of the request's fill that are in the cache now."""
        reusable = request.reusable(self._state.limits.page_size)
        return self._state.tree.peek(request.namespace, reusable) if reusable else 0

    def cached_path(self, request: Request) -> list[Node]:
        """The nodes of the tree that the request's fill would hit now, from the root on."""
        reusable = request.reusable(self._state.limits.page_size)
        return self._state.tree.path(request.namespace, reusable) if reusable else []

    def admit(self, request: Request, step: int) -> RowJoin | None:
        """Give a waiting request a row, its cached prefix and its pages, or ``None`` if it must wait.

        When it must wait nothing has changed but the pages that were evicted for it.
        """
        state = self._state
        tree, pool, size = state.tree, state.pool, state.limits.page_size
        total, spare, reusable, cached = self._needs(request)
        if not self._obtainable(total - cached // size, spare):
            return None
        pages: IntArray = EMPTY_INTS
        if request.shareable:
            node, pages = tree.match(request.namespace, reusable, step, request.use(state.clock()))
            tree.lock(node)
            # Its own prefix no longer counts as evictable. Nothing is evicted for it before this is known.
            if not self._obtainable(total - len(pages), spare) or not self.make_room(total - len(pages)):
                tree.unlock(node)
                return None
            request.node = node
        elif not self.make_room(total):
            return None
        request.inserted = len(pages)
        request.computed = len(pages) * size
        if request.admitted_at is None:  # what it finds of its own after a preemption is no hit
            request.cached = request.computed
            state.counters.prompt_tokens += len(request.fill)
            state.counters.cached_tokens += request.cached
        table = np.concatenate([pages, pool.take(total - len(pages))])
        row = state.place(request, table, len(pages))
        return RowJoin(
            row=row,
            number=request.number,
            pages=table,
            cached=request.computed,
            params=request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            generated=len(request.output),
            history=request.fill if request.params.counts_tokens else EMPTY_INTS,
        )

    def _needs(self, request: Request) -> tuple[int, int, bytes, int]:
        """Pages to give a waiting request, and to keep for growth; what it may reuse, and how much of that is cached."""
        size = self._state.limits.page_size
        total, spare = self.pages_needed(request), 0
        if not self._full:
            most, total = total, min(total, -(-(len(request.fill) + 1) // size))
            if self._grows:
                spare = min(self._growth(request.max_new - len(request.output)), most - total) + self._running_growth()
        reusable = request.reusable(size)
        return total, spare, reusable, self._state.tree.peek(request.namespace, reusable) if reusable else 0

    def make_way(self, request: Request) -> None:
        """Preempt whom the policy names, if a waiting request does not fit and would then.

        It is admitted when the steps in flight have completed; until then what was given up counts as free.
        """
        state = self._state
        rows = state.rows
        if rows.free + rows.limbo and self._fits(request):
            return
        running = state.running()
        named = state.policies.preempt_for(request, running, self.view)
        victims = [victim for victim in named if victim.preemptions < self._protect_after]
        if not victims or not self._fits(request, victims):
            return
        for victim in victims:
            state.preempt(victim)
            if self._fits(request):
                return

    def _fits(self, request: Request, victims: Sequence[Request] = ()) -> bool:
        """True if the request's pages could be had, if ``victims`` lost their rows."""
        total, spare, reusable, cached = self._needs(request)
        users: dict[Node, int] = {}  # how many of the victims use each cached run
        for victim in victims:
            node = victim.node
            while node is not None:
                users[node] = users.get(node, 0) + 1
                node = node.parent
        unused = sum(len(node.pages) for node, count in users.items() if node.refs == count)
        gain = unused + sum(victim.own_pages for victim in victims)
        left = hit = cached // self._state.limits.page_size
        for node in self._state.tree.path(request.namespace, reusable) if reusable else ():
            pages = min(left, len(node.pages))
            left -= pages
            if node.refs == users.get(node, 0):
                gain -= pages  # nobody would use these but the request itself: it cannot have them evicted, too
        return self._obtainable(total - hit - gain, spare)

    def grow(self, decode: IntArray) -> PageAppends | None:
        """Pages for the rows of a decode step that have none left, or ``None`` if the step must wait for them.

        May preempt; read the decode rows again afterwards.
        """
        if self._full:
            return NO_PAGES
        state = self._state
        rows = state.rows
        short = decode[rows.length[decode] >= rows.capacity[decode]]
        if not len(short):
            self.estimate.step()
            return NO_PAGES
        if not self.make_room(len(short)):
            if not self._obtainable(len(short)):
                self._preempt(len(short))
            return None  # what was given up is free when the steps in flight have completed
        taken = state.pool.take(len(short))
        indices = rows.capacity[short] // state.limits.page_size
        for row, page in zip(short.tolist(), taken.tolist(), strict=True):
            request = state.by_row[row]
            assert request is not None
            request.pages = np.append(request.pages, np.int32(page))
            request.donated = np.append(request.donated, False)
            request.own_pages += 1
        rows.capacity[short] += state.limits.page_size
        return PageAppends(short, indices.astype(np.int32), taken)

    def make_room(self, needed: int) -> bool:
        """See to ``needed`` free pages, evicting what is missing. False if they cannot be had, or not yet."""
        pool = self._state.pool
        if pool.free < needed and self._obtainable(needed):
            missing = needed - pool.free - pool.limbo
            if missing > 0:
                self.evict(missing)
        return pool.free >= needed

    def _obtainable(self, needed: int, spare: int = 0) -> bool:
        """True if ``needed`` pages and ``spare`` more are free, in limbo, or can be evicted."""
        state = self._state
        return state.pool.free + state.pool.limbo + state.tree.evictable >= needed + spare

    def evict(self, count: int) -> int:
        """Drop up to ``count`` pages of unused prefixes; returns how many went to the pool."""
        state = self._state
        freed = 0
        if state.policies.begin_eviction(self.view):
            state.tree.requeue()
        for pages in state.tree.evict(count):
            state.pool.release(pages, state.submitted)
            freed += len(pages)
        state.counters.evicted_pages += freed
        return freed

    def _growth(self, tokens: int) -> int:
        """Pages expected to be needed for up to ``tokens`` more output tokens."""
        return int(self.estimate.share * tokens) // self._state.limits.page_size

    def _running_growth(self) -> int:
        """Pages that the running requests are expected to need beyond those they have."""
        rows = self._state.rows
        return self._growth(int(rows.remaining[rows.lease != 0].sum()))

    def _preempt(self, needed: int) -> None:
        """Take rows from victims until the need is covered; the last running request keeps its row.

        A request that was preempted often is spared while there is another victim.
        """
        state = self._state
        running = state.running()
        generated = sum(request.received for request in running)
        self.estimate.shortage(generated, sum(request.max_new for request in running))
        for request in islice(self._victims(running, needed), len(running) - 1):
            state.preempt(request)
            needed_rows = state.rows.decode_rows()
            needed = int(np.count_nonzero(state.rows.length[needed_rows] >= state.rows.capacity[needed_rows]))
            if self._obtainable(needed):
                return

    def _victims(self, running: list[Request], needed: int) -> Iterator[Request]:
        """The running requests in the policy's order, pulled lazily; those that are protected last."""
        spared = []
        for request in self._state.policies.victims(running, needed, self.view):
            if request.preemptions < self._protect_after:
                yield request
            else:
                spared.append(request)
        yield from spared
