"""Fair shares between tenants by virtual token counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from ..policy import EngineView, RequestView, StepReport
from ._ledger import Ledger

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

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """The earliest request of the tenant with the smallest counter, charged at once; and again."""
        ledger, spent = self._ledger, self._ledger.spent
        ledger.settle(waiting)
        queues: dict[str, list[RequestView]] = {}
        for request in waiting:
            if request.number not in ledger.requests:
                self.on_submit(request)
            queue = queues.get(request.tenant)
            if queue is None:
                queue = queues[request.tenant] = []
            queue.append(request)
        heads = [(spent[tenant], queue[0].number, tenant, 0) for tenant, queue in queues.items()]
        heapify(heads)
        while heads:
            _, _, tenant, index = heads[0]
            request = queues[tenant][index]
            if request.number in ledger.requests:  # else it has ended meanwhile
                tokens = max(0, request.prefill_left - view.cached_prefix(request))
                yield request
                ledger.admit(request, tokens)
            index += 1
            if index < len(queues[tenant]):
                heapreplace(heads, (spent.get(tenant, 0.0), queues[tenant][index].number, tenant, index))
            else:
                heappop(heads)

    def on_submit(self, request: RequestView) -> None:
        """Lift a tenant that had no request waiting."""
        ledger, spent = self._ledger, self._ledger.spent
        if request.tenant not in ledger.queued:
            level = min((spent[tenant] for tenant in ledger.queued), default=spent.get(ledger.last, 0.0))
            spent[request.tenant] = max(spent.get(request.tenant, 0.0), level, self._floor)
        ledger.submit(request)

    def on_step(self, report: StepReport) -> None:
        """Charge what was served."""
        self._ledger.report(report)

    def on_finish(self, request: RequestView) -> None:
        """Forget tenants that are gone, if they are many or were the last."""
        ledger, spent = self._ledger, self._ledger.spent
        ledger.finish(request)
        if not ledger.live:
            spent.clear()
            self._floor = 0.0
        elif len(spent) > len(ledger.live) + REMEMBERED:
            absent = sorted((level, tenant) for tenant, level in spent.items() if tenant not in ledger.live)
            for level, tenant in absent[: len(absent) // 2]:
                del spent[tenant]
                self._floor = max(self._floor, level)
