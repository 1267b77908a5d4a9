"""Fair shares between tenants by virtual token counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ..policy import EngineView, RequestView, StepReport
from ._keyed import Ranking
from ._ledger import Ledger
from ._roster import Roster

REMEMBERED = 1024
"""Absent tenants whose counters are kept."""


@dataclass(eq=False)
class VTC:
    """The tenant that was served least goes first, counted in weighted tokens; within a tenant by arrival.

    Virtual token counters (Sheng et al., OSDI 2024): of two tenants that always have requests waiting,
    neither is ever served much more than the other, however many requests it sends or how long they
    are, and nobody idles for it. A tenant that comes back is lifted to the lowest counter of those that
    wait, so that time away earns nothing. Cached prompt tokens cost nothing. When no request is left
    all counters start again; a counter that is forgotten while others remain raises the level at which
    new tenants come in, so that leaving gains nothing, nor does coming under many names.

    Not for a single tenant, nor where serving shared prefixes together matters more than exact
    fairness: use ``dlpm``.

    Args:
        input_weight: Cost of a prompt token.
        output_weight: Cost of an output token.
        shares: Tenant → its share relative to the others, which have 1.
    """

    api_version = 1
    input_weight: float = 1.0
    output_weight: float = 2.0
    shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ledger = Ledger("vtc", self.input_weight, self.output_weight, self.shares)
        self._floor = 0.0
        self._roster = Roster()
        self._lines: dict[str, Ranking] = {}  # tenant → those of its requests that wait, by arrival

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """The earliest request of the tenant with the smallest counter, charged at once; and again."""
        self._ledger.settle(waiting)
        for number in self._roster.left(waiting):
            self._drop(number)
        for request in self._roster.newcomers(waiting):
            if request.number not in self._ledger.requests:
                self.on_submit(request)
            self._lines.setdefault(request.tenant, Ranking()).put(request, request.number)
        return self._roster.serve(self._pull(view), waiting)

    def _pull(self, view: EngineView) -> Iterator[RequestView]:
        """Tenant by tenant, each one's requests by arrival; charges what was taken before it goes on."""
        ledger, spent, numbers = self._ledger, self._ledger.spent, self._roster.numbers
        heap: list[tuple[float, int, RequestView, Iterator[RequestView]]] = []

        def advance(line: Iterator[RequestView]) -> None:
            request = next(line, None)
            if request is not None:
                heappush(heap, (spent.get(request.tenant, 0.0), request.number, request, line))

        for ranking in list(self._lines.values()):
            advance(ranking.among(numbers))
        while heap:
            *_, request, line = heappop(heap)
            if request.number in ledger.requests:  # else it has ended meanwhile
                tokens = max(0, request.prefill_left - view.cached_prefix(request))
                yield request
                if request.number in numbers:  # else it was not there any more
                    ledger.admit(request, tokens)
            advance(line)

    def on_submit(self, request: RequestView) -> None:
        """Lift a tenant that had no request waiting."""
        ledger, spent = self._ledger, self._ledger.spent
        if request.tenant not in ledger.queued:
            level = min((spent[tenant] for tenant in ledger.queued), default=spent.get(ledger.last, 0.0))
            spent[request.tenant] = max(spent.get(request.tenant, 0.0), level, self._floor)
        ledger.submit(request)
        self._roster.add(request)

    def on_step(self, report: StepReport) -> None:
        """Charge what was served."""
        self._ledger.report(report)

    def on_finish(self, request: RequestView) -> None:
        """Forget tenants that are gone, if they are many or were the last."""
        ledger, spent = self._ledger, self._ledger.spent
        self._roster.forget(request)
        self._drop(request.number)
        ledger.finish(request)
        if not ledger.live:
            spent.clear()
            self._floor = 0.0
        elif len(spent) > len(ledger.live) + REMEMBERED:
            absent = sorted((level, tenant) for tenant, level in spent.items() if tenant not in ledger.live)
            for level, tenant in absent[: len(absent) // 2]:
                del spent[tenant]
                self._floor = max(self._floor, level)

    def _drop(self, number: int) -> None:
        """It waits no more."""
        tenant = self._ledger.requests.get(number, "")
        if tenant in self._lines:
            self._lines[tenant].forget(number)
            if not self._lines[tenant]:
                del self._lines[tenant]
