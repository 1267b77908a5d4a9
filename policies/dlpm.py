"""Longest cached prefix first, within fair shares of the tenants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ..errors import ConfigError
from ..policy import EngineView, RequestView, StepReport
from ._keyed import Ranking
from ._ledger import Ledger
from ._patience import Patience
from ._roster import Roster
from ._rota import Rota

LOOKUPS = 16
"""Waiting requests per step whose cached prefix is looked up, new ones and in turn old ones; a few µs each."""


@dataclass(eq=False)
class DLPM:
    """The longest cached prefix goes first, among the requests of tenants that have not spent their quantum.

    Deficit longest prefix match (Cao et al., 2025): between ``lpm``, which serves whoever shares most
    and starves the others, and ``vtc``, which is fair and tears shared prefixes apart. Every tenant may
    spend a quantum of weighted tokens; when none that waits has any left, all get another. One that
    comes anew waits for that, and credit is not saved up, so that neither new names nor pauses gain
    anything. Within a tenant, those that have waited ``age_steps`` steps get every fourth admission.

    Not without shared prefixes: ``vtc`` is fairer then, and cheaper.

    Args:
        quantum: Weighted tokens; large ones favour the cache, small ones fairness.
        input_weight: Cost of a prompt token that is not cached.
        output_weight: Cost of an output token.
        shares: Tenant → its share relative to the others, which have 1.
        age_steps: Steps after which a waiting request counts as starved.
    """

    api_version = 1
    quantum: float = 4096.0
    input_weight: float = 1.0
    output_weight: float = 2.0
    shares: Mapping[str, float] = field(default_factory=dict)
    age_steps: int = 256

    def __post_init__(self) -> None:
        if not self.quantum > 0 or self.age_steps < 1:
            raise ConfigError("dlpm: quantum must be above 0 and age_steps at least 1")
        self._ledger = Ledger("dlpm", self.input_weight, self.output_weight, self.shares)
        self._patience = Patience(self.age_steps, group=attrgetter("tenant"))
        self._roster = Roster()
        self._hits = Ranking()  # by cached tokens, most first
        self._rota = Rota(LOOKUPS)

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """Those of tenants in credit by cached prefix, charged at once; then a new quantum, and again."""
        ledger = self._ledger
        ledger.settle(waiting)
        gone = self._roster.left(waiting)
        self._patience.admitted(gone)
        for number in gone:
            self._hits.forget(number)
        mixed = self._patience.order(self._in_credit(self._ranked(waiting, view)), waiting, view)
        for request in self._roster.serve(mixed, waiting):
            tokens = max(0, request.prefill_left - view.cached_prefix(request))
            yield request
            ledger.admit(request, tokens)

    def on_submit(self, request: RequestView) -> None:
        """Note the request."""
        self._ledger.submit(request)
        self._roster.add(request)

    def on_step(self, report: StepReport) -> None:
        """Charge what was served."""
        self._ledger.report(report)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request, and its tenant if that owes nothing; all tenants if it was the last."""
        ledger, tenant = self._ledger, request.tenant
        ledger.finish(request)
        self._hits.forget(request.number)
        self._roster.forget(request)
        if tenant not in ledger.live:
            self._patience.forget(tenant)
        if not ledger.live:
            ledger.spent.clear()
        elif tenant not in ledger.live and ledger.spent.get(tenant, 0.0) <= 0:
            ledger.spent.pop(tenant, None)

    def _ranked(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """By cached prefix."""
        hits = self._hits
        new = [request for request in self._roster.newcomers(waiting) if request.number not in hits]
        for request in new:
            if request.number not in self._ledger.requests:
                self._ledger.submit(request)
            hits.put(request, 0)  # cold until it is looked up
        for request in (*new[:LOOKUPS], *self._rota.next(waiting)):
            hits.put(request, -view.cached_prefix(request))
        return hits.among(self._roster.numbers)

    def _in_credit(self, ranked: Iterable[RequestView]) -> Iterator[RequestView]:
        """Those of tenants in credit; then a new quantum, and again."""
        spent, requests = self._ledger.spent, self._ledger.requests
        while True:
            left = []
            for request in ranked:
                if request.number not in requests:
                    continue  # it has ended meanwhile
                if spent[request.tenant] >= 0:
                    left.append(request)
                else:
                    yield request
            if not left:
                return
            self._refill(min(spent.get(request.tenant, 0.0) for request in left))
            ranked = left

    def _refill(self, least: float) -> None:
        """As many quanta to every tenant as put one that has spent ``least`` into credit; credit is one quantum at most."""
        ledger = self._ledger
        quanta = (least // self.quantum + 1) * self.quantum
        for tenant, spent in list(ledger.spent.items()):
            ledger.spent[tenant] = left = max(spent - quanta, -self.quantum)
            if left <= 0 and tenant not in ledger.live:
                del ledger.spent[tenant]
