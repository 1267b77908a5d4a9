"""Longest cached prefix first, within fair shares of the tenants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..policy import EngineView, RequestView, StepReport
from ._ageing import Ageing
from ._ledger import Ledger
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
    anything. Within a tenant, requests that have waited ``age_steps`` steps go first.

    Not without shared prefixes: ``vtc`` is fairer then, and cheaper.

    Args:
        quantum: Weighted tokens; large ones favour the cache, small ones fairness.
        input_weight: Cost of a prompt token that is not cached.
        output_weight: Cost of an output token.
        shares: Tenant → its share relative to the others, which have 1.
        age_steps: Steps after which a waiting request goes before younger ones of its tenant.
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
        self._ageing = Ageing(self.age_steps)
        self._cached: dict[int, int] = {}
        self._rota = Rota(LOOKUPS)

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterator[RequestView]:
        """Those of tenants in credit by cached prefix, charged at once; then a new quantum, and again."""
        ledger, spent = self._ledger, self._ledger.spent
        ledger.settle(waiting)
        ranked = self._ranked(waiting, view)
        while ranked:
            left = []
            for request in ranked:
                if request.number not in ledger.requests:
                    continue  # it has ended meanwhile
                if spent[request.tenant] >= 0:
                    left.append(request)
                    continue
                tokens = max(0, request.prefill_left - view.cached_prefix(request))
                yield request
                ledger.admit(request, tokens)
            if left:
                self._refill(min(spent.get(request.tenant, 0.0) for request in left))
            ranked = left

    def on_submit(self, request: RequestView) -> None:
        """Note the request."""
        self._ledger.submit(request)
        self._ageing.meet(request)

    def on_step(self, report: StepReport) -> None:
        """Charge what was served."""
        self._ledger.report(report)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request, and its tenant if that owes nothing; all tenants if it was the last."""
        ledger, tenant = self._ledger, request.tenant
        ledger.finish(request)
        self._cached.pop(request.number, None)
        self._ageing.forget(request)
        if not ledger.live:
            ledger.spent.clear()
        elif tenant not in ledger.live and ledger.spent.get(tenant, 0.0) <= 0:
            ledger.spent.pop(tenant, None)

    def _ranked(self, waiting: Sequence[RequestView], view: EngineView) -> list[RequestView]:
        cached, requests = self._cached, self._ledger.requests
        for request in waiting:
            if request.number not in requests:
                self.on_submit(request)
        fresh = [request for request in waiting if request.number not in cached][:LOOKUPS]
        for request in (*fresh, *self._rota.next(waiting)):
            cached[request.number] = view.cached_prefix(request)
        aged = self._ageing.count(waiting, view.step)
        young = sorted(waiting[aged:], key=lambda request: -cached.get(request.number, 0))
        return [*waiting[:aged], *young]

    def _refill(self, least: float) -> None:
        """As many quanta to every tenant as put one that has spent ``least`` into credit; credit is one quantum at most."""
        ledger = self._ledger
        quanta = (least // self.quantum + 1) * self.quantum
        for tenant, spent in list(ledger.spent.items()):
            ledger.spent[tenant] = left = max(spent - quanta, -self.quantum)
            if left <= 0 and tenant not in ledger.live:
                del ledger.spent[tenant]
