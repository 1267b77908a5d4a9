"""Fair shares between tenants by virtual token counters."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
        heads: dict[str, int] = {}  # tenant → position of its earliest request
        for index, request in enumerate(waiting):
            if request.number not in ledger.requests:
                self.on_submit(request)
            if request.tenant not in heads:
                heads[request.tenant] = index

        def rank(index: int) -> tuple[float, int]:
            return spent.get(waiting[index].tenant, 0.0), index

        ranked = sorted(heads.values(), key=lambda index: spent[waiting[index].tenant])  # stable: ties by arrival
        while ranked:
            index = ranked.pop(0)
            request = waiting[index]
            if request.number in ledger.requests:  # else it has ended meanwhile
                tokens = max(0, request.prefill_left - view.cached_prefix(request))
                yield request
                ledger.admit(request, tokens)
            if ledger.live.get(request.tenant, 0) > 1:
                later = range(index + 1, len(waiting))
                following = next((at for at in later if waiting[at].tenant == request.tenant), None)
                if following is not None:
                    insort(ranked, following, key=rank)

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
