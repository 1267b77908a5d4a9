"""What tenants were served, for the fair orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ConfigError
from ..policy import RequestView, StepReport
from ._roster import waits


class Ledger:
    """Weighted tokens per tenant: output as steps report it, prompts as soon as they are admitted.

    Reports come late: with those alone a step would admit every request of the tenant that is behind.
    The engine tells nobody that it has admitted a request, but asks for the next one of the order then.

    Args:
        policy: Name of the policy, for errors.
        input_weight, output_weight: What a prompt token and an output token cost.
        shares: Tenant → its share relative to the others, which have 1: tokens cost it so much less.

    Attributes:
        spent: Tenant → what it was charged.
        requests: Number → tenant of every request that has not ended.
        live: Tenant → how many of these are its; no entry for none.
        queued: Tenant → how many of these wait for their first service; no entry for none.
        last: The tenant that was the last to leave ``queued``.

    Raises:
        ConfigError: a weight or share is not above 0.
    """

    def __init__(self, policy: str, input_weight: float, output_weight: float, shares: Mapping[str, float]) -> None:
        if not all(number > 0 for number in (input_weight, output_weight, *shares.values())):
            raise ConfigError(f"{policy}: weights and shares must be above 0")
        self.spent: dict[str, float] = {}
        self.requests: dict[int, str] = {}
        self.live: dict[str, int] = {}
        self.queued: dict[str, int] = {}
        self.last = ""
        self._weights = input_weight, output_weight
        self._shares = dict(shares)
        self._unserved: dict[int, None] = {}
        self._ahead: dict[int, int] = {}  # prompt tokens that were charged and not reported yet

    def submit(self, request: RequestView) -> None:
        """A request begins to wait."""
        tenant = self.requests[request.number] = request.tenant
        self._unserved[request.number] = None
        self.spent.setdefault(tenant, 0.0)
        self.queued[tenant] = self.queued.get(tenant, 0) + 1
        self.live[tenant] = self.live.get(tenant, 0) + 1

    def admit(self, request: RequestView, tokens: int) -> None:
        """A request has been admitted, it seems: charge the part of its prompt that is to be computed."""
        if request.number in self.requests:
            self._ahead[request.number] = tokens
            self._charge(request.tenant, tokens, 0)

    def settle(self, waiting: Sequence[RequestView]) -> None:
        """Give back what was charged for requests that wait all the same. Before every order."""
        for number in [number for number in self._ahead if waits(number, waiting)]:
            self._charge(self.requests[number], -self._ahead.pop(number), 0)

    def report(self, report: StepReport) -> None:
        """Charge what a step served, as far as it has not been charged."""
        for tenant, service in report.tenants.items():
            if tenant in self.spent:
                self._charge(tenant, 0, service.output_tokens)
        for number, tokens in report.prefill.items():
            if number not in self.requests:
                continue  # it has ended, and its account is closed
            self._leave_queue(number)
            ahead = self._ahead.pop(number, 0)
            if ahead > tokens:
                self._ahead[number] = ahead - tokens
            self._charge(self.requests[number], max(0, tokens - ahead), 0)

    def finish(self, request: RequestView) -> None:
        """A request has ended: give back what was charged for the part of its prompt that was not computed."""
        if request.number not in self.requests:
            return
        self._leave_queue(request.number)
        unused = min(self._ahead.pop(request.number, 0), request.prefill_left)
        self._charge(request.tenant, -unused, 0)
        del self.requests[request.number]
        _take_one(self.live, request.tenant)

    def _charge(self, tenant: str, prompt: int, output: int) -> None:
        cost = self._weights[0] * prompt + self._weights[1] * output
        self.spent[tenant] += cost / self._shares.get(tenant, 1.0)

    def _leave_queue(self, number: int) -> None:
        if number in self._unserved:
            del self._unserved[number]
            tenant = self.requests[number]
            if not _take_one(self.queued, tenant):
                self.last = tenant


def _take_one(counts: dict[str, int], key: str) -> int:
    """Count down, and return what is left; nothing is no entry."""
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
    return left
