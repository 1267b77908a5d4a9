"""Who was served by a step: the row-wise record from which policies get their reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .contract import IntArray
from .policy import Service, StepReport


class TenantIds:
    """Small integers for the tenants that hold rows, so that a step is counted in one go. Loop thread only."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._ids: dict[str, int] = {}
        self._users: list[int] = []
        self._free: list[int] = []

    def take(self, name: str) -> int:
        """The tenant's id, which stays the same while anybody holds it."""
        found = self._ids.get(name)
        if found is None:
            if self._free:
                found = self._free.pop()
                self.names[found] = name
            else:
                found = len(self.names)
                self.names.append(name)
                self._users.append(0)
            self._ids[name] = found
        self._users[found] += 1
        return found

    def give_back(self, tenant: int) -> None:
        """Undo one ``take``; the id of a tenant nobody holds is given to another."""
        self._users[tenant] -= 1
        if not self._users[tenant]:
            del self._ids[self.names[tenant]]
            self._free.append(tenant)


@dataclass(frozen=True, slots=True)
class StepService:
    """What a planned step will serve; names are resolved when it is planned, since rows change hands.

    Attributes:
        numbers: Request number per sampled token, int64 ``[n]``.
        output: Tenant → sampled tokens.
        prefill: Request number → prompt tokens.
        prompt: Tenant → prompt tokens.
    """

    numbers: NDArray[np.int64]
    output: Mapping[str, int]
    prefill: Mapping[int, int]
    prompt: Mapping[str, int]

    def report(self, step: int, seconds: float) -> StepReport:
        """What policies are told."""
        names = dict.fromkeys((*self.prompt, *self.output))
        tenants = {name: Service(self.prompt.get(name, 0), self.output.get(name, 0)) for name in names}
        return StepReport(step, seconds, self.prefill, self.numbers.tolist(), tenants)


def output_by_tenant(tenants: IntArray, ids: TenantIds) -> dict[str, int]:
    """Tokens per tenant where each row gets one; ``tenants`` are the rows' tenant ids, int32 ``[n]``."""
    counts = np.bincount(tenants)
    return {ids.names[tenant]: int(counts[tenant]) for tenant in np.flatnonzero(counts).tolist()}
