"""Miniatures of the engine that let one policy decide, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from ..policy import PrefillBudget, Service, StepReport
from .fake_views import FakePrefix, FakeRequest, FakeView, change
from .questions import Questions

MOST_PREEMPTIONS = 3
PAGE_SIZE = 16


class Rehearsal:
    """Requests that wait, run and end on fake views, as a policy decides. No clock but its own.

    It asks in the engine's order: ``preempt_for`` with the first of ``order``, ``victims`` if pages
    are missing, ``budget``, then ``order`` as far as there is room. Reports reach ``on_step`` one step
    late, after ``on_finish`` of what has ended meanwhile.

    Args:
        policy: Answers.
        rows: Requests that run at once.
        pages: Pages of ``PAGE_SIZE`` tokens.
        token_budget: Tokens per step.
        seconds: How long a step takes.

    Attributes:
        waiting, running: Requests by number.
        cached: Cached prompt tokens by number.
        preempted: How often a request has lost its row.
        ended: Numbers of the requests that have ended, whatever way.
    """

    def __init__(
        self, policy: Questions, *, rows: int = 8, pages: int = 1 << 20, token_budget: int = 256, seconds: float = 0.05
    ) -> None:
        self.policy = policy
        self.step = 0
        self.now = 0.0
        self.waiting: dict[int, FakeRequest] = {}
        self.running: dict[int, FakeRequest] = {}
        self.cached: dict[int, int] = {}
        self.preempted = 0
        self.ended: set[int] = set()
        self._rows, self._pages, self._token_budget, self._seconds = rows, pages, token_budget, seconds
        self._lengths: dict[int, int] = {}
        self._report: StepReport | None = None
        self._number = 0

    def view(self) -> FakeView:
        """What the policy would see now."""
        return FakeView(
            step=self.step,
            now=self.now,
            token_budget=self._token_budget,
            total_rows=self._rows,
            free_pages=max(0, self._pages - self._used()),
            total_pages=self._pages,
            page_size=PAGE_SIZE,
            running=tuple(self.running.values()),
            waiting=tuple(self.waiting.values()),
            cached=self.cached,
        )

    def submit(self, *, length: int | None = None, cached: int = 0, **attributes: Any) -> FakeRequest:
        """A request arrives; unless it is refused it waits.

        Args:
            length: Tokens it will generate; by default as many as it may.
            cached: Tokens of its prompt that are in the cache.
            **attributes: Of ``FakeRequest``.
        """
        self._number += 1
        request = FakeRequest(number=self._number, arrived_at=self.now, waiting_since_step=self.step + 1, **attributes)
        if self.policy.admit(request, self.view()):
            self._lengths[request.number] = request.max_tokens if length is None else length
            self.cached[request.number] = cached
            self.waiting[request.number] = request
            self.policy.tell("on_submit", request)
        return request

    def end(self, request: FakeRequest) -> None:
        """A request is complete, or its caller has gone."""
        if self.waiting.pop(request.number, None) or self.running.pop(request.number, None):
            change(request, own_pages=0)
            del self._lengths[request.number], self.cached[request.number]
            self.ended.add(request.number)
            self.policy.tell("on_finish", request)

    def preempt(self, request: FakeRequest) -> None:
        """A request loses its row and waits again."""
        del self.running[request.number]
        self.preempted += 1
        left = request.prompt_tokens + request.generated_tokens
        times = request.preemptions + 1
        change(request, own_pages=0, preemptions=times, prefill_left=left, waiting_since_step=self.step)
        self.waiting[request.number] = request
        self.waiting = dict(sorted(self.waiting.items()))

    def pass_time(self, steps: int, seconds: float) -> None:
        """Nothing happens for a while."""
        self.step += steps
        self.now += seconds

    def tick(self) -> None:
        """Plan one step as the policy wants it, and complete it."""
        self.pass_time(1, self._seconds)
        self.policy.step = self.step
        order = self._make_way()
        self._grow()
        decoding = [request for request in self.running.values() if not request.prefill_left]
        prefill: dict[FakeRequest, int] = {}
        if self.waiting or len(decoding) < len(self.running):
            whole = PrefillBudget(max(0, self._token_budget - len(decoding)), self._token_budget)
            budget = self.policy.budget(self.view()) or whole
            most = whole.tokens if budget.decode else self._token_budget
            prefill = self._fill(min(budget.tokens, most), budget.chunk, order)
            if prefill and not budget.decode:
                decoding = []
        sampled = decoding + [request for request in prefill if not request.prefill_left]
        for request in sampled:
            change(request, generated_tokens=request.generated_tokens + 1)
            if request.first_token_at is None:
                change(request, first_token_at=self.now)
        report, self._report = self._report, self._make_report(prefill, sampled)
        for request in sampled:
            if request.generated_tokens >= self._lengths[request.number]:
                self.end(request)
        if report is not None:
            self.policy.tell("on_step", report)

    def _make_way(self) -> Iterator[FakeRequest] | None:
        if "preempt_for" not in self.policy.hooks or not self.waiting:
            return None
        order = self._pull()
        first = next(order, None)
        if first is None:
            return order
        if not self._fits(first):
            named = self.policy.preempt_for(first, list(self.running.values()), self.view())
            for victim in [victim for victim in named if victim.preemptions < MOST_PREEMPTIONS]:
                self.preempt(victim)
                if self._fits(first):
                    break
        return chain([first], order)

    def _grow(self) -> None:
        """Pages for what is generated; victims give theirs up if there are not enough."""
        for request in self.running.values():
            change(request, own_pages=max(request.own_pages, _pages_for(request)))
        missing = self._used() - self._pages
        if missing <= 0:
            return
        running = list(self.running.values())
        chosen = self.policy.victims(running, missing, self.view())
        chosen += [request for request in reversed(running) if request not in chosen]
        chosen.sort(key=lambda request: request.preemptions >= MOST_PREEMPTIONS)
        for victim in chosen[:-1]:
            if missing > 0:
                missing -= victim.own_pages
                self.preempt(victim)

    def _fill(self, left: int, chunk: int, order: Iterator[FakeRequest] | None) -> dict[FakeRequest, int]:
        prefill: dict[FakeRequest, int] = {}
        for request in self.running.values():
            size = min(request.prefill_left, left, chunk)
            if size > 0:
                left -= size
                prefill[request] = size
        if left > 0 and self.waiting and len(self.running) < self._rows:
            for request in order or self._pull():
                if request.number not in self.waiting:
                    continue
                if not self._fits(request):
                    break
                del self.waiting[request.number]
                self.running[request.number] = request
                todo = max(1, request.prefill_left - self.cached[request.number])
                change(request, prefill_left=todo, own_pages=_pages_for(request))
                prefill[request] = size = min(todo, left, chunk)
                left -= size
                if left <= 0 or len(self.running) >= self._rows:
                    break
        for request, size in prefill.items():
            change(request, prefill_left=request.prefill_left - size)
        return prefill

    def _pull(self) -> Iterator[FakeRequest]:
        return self.policy.order(list(self.waiting.values()), self.view())

    def _used(self) -> int:
        return sum(request.own_pages for request in self.running.values())

    def _fits(self, request: FakeRequest) -> bool:
        return len(self.running) < self._rows and self._used() + _pages_for(request) <= self._pages

    def _make_report(self, prefill: dict[FakeRequest, int], sampled: list[FakeRequest]) -> StepReport:
        served: dict[str, list[int]] = {}
        for request, size in prefill.items():
            served.setdefault(request.tenant, [0, 0])[0] += size
        for request in sampled:
            served.setdefault(request.tenant, [0, 0])[1] += 1
        return StepReport(
            self.step,
            self._seconds,
            {request.number: size for request, size in prefill.items()},
            [request.number for request in sampled],
            {tenant: Service(*tokens) for tenant, tokens in served.items()},
        )


class CacheRehearsal:
    """Unused prefixes that are evicted as a policy decides, with keys read when the engine would read them.

    Args:
        policy: Answers.
        room: Prefixes that stay.
    """

    def __init__(self, policy: Questions, room: int) -> None:
        self.policy = policy
        self.prefixes: dict[FakePrefix, Any] = {}  # with the key that was read last
        self._room = room

    def use(self, prefix: FakePrefix, step: int, now: float) -> None:
        """A prefix is computed, or hit, and has no user any more."""
        change(prefix, last_used=step, used_at=now, hits=prefix.hits + (prefix in self.prefixes))
        self.prefixes[prefix] = self.policy.key(prefix)

    def evict(self, view: FakeView) -> list[FakePrefix]:
        """Make room; returns what went, in order."""
        self.policy.step = view.step
        gone: list[FakePrefix] = []
        if len(self.prefixes) <= self._room:
            return gone
        if self.policy.begin(view):
            self.prefixes = {prefix: self.policy.key(prefix) for prefix in self.prefixes}
        renewed: set[FakePrefix] = set()
        while len(self.prefixes) > self._room and "key" not in self.policy.problems:
            try:
                first = min(self.prefixes, key=self.prefixes.__getitem__)
            except Exception as exc:
                self.policy.problem("key", f"answered keys that cannot be compared with each other: {exc}")
                break
            key = self.policy.key(first)
            if first not in renewed and key != self.prefixes[first]:
                renewed.add(first)
                self.prefixes[first] = key
                continue
            self.policy.on_evict(first)
            del self.prefixes[first]
            gone.append(first)
        return gone


def _pages_for(request: FakeRequest) -> int:
    """Pages for all tokens so far and one more."""
    return -(-(request.prompt_tokens + request.generated_tokens + 1) // PAGE_SIZE)
