"""A workload: which requests arrive when, how long they are, and what their prompts share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import TraceError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; the texts themselves are not known.

    Attributes:
        at: Arrival, seconds from the first one.
        prompt_tokens: Length of the prompt.
        output_tokens: Length of the answer.
        blocks: Ids of the leading whole blocks of the prompt that others may share, each of 64 bits. Equal
            ids after equal predecessors stand for equal tokens; what follows the last block is unique.
        block_size: Tokens per block; 0 where there are no blocks: the whole prompt is unique.
        max_tokens: The limit the caller had set, where the trace knows it: never below ``output_tokens``.
        tenant, priority, deadline, ttft_target, tpot_target, program_id, hints: As in ``RequestOptions``.

    Raises:
        TraceError: a length is below 1, a number is negative or not finite, or the blocks are longer than the prompt.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_size: int = 0
    max_tokens: int | None = None
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None
    program_id: str | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise TraceError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("at", "deadline", "ttft_target", "tpot_target"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                raise TraceError(f"{name}={seconds} must be a number of seconds, at least 0")
        if self.max_tokens is not None and self.max_tokens < self.output_tokens:
            raise TraceError(f"max_tokens={self.max_tokens} is below output_tokens={self.output_tokens}")
        if self.blocks:
            if self.block_size < 1 or len(self.blocks) * self.block_size > self.prompt_tokens:
                raise TraceError(
                    f"{len(self.blocks)} blocks of {self.block_size} tokens do not fit a prompt of {self.prompt_tokens}"
                )
            if min(self.blocks) < 0 or max(self.blocks) >= 2**64:
                raise TraceError("block ids must be whole numbers of 64 bits, from 0 on")


@dataclass(slots=True)
class Trace:
    """Requests in order of arrival (they are sorted on construction).

    Attributes:
        name: What it is called in reports.
        requests: The requests.
        notes: What a reader of results should know, such as rows that were left out.
    """

    name: str
    requests: list[TraceRequest]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.requests = sorted(self.requests, key=lambda request: request.at)


def scaled(trace: Trace, rate: float) -> Trace:
    """The same requests arriving ``rate`` times as fast. Deadlines and targets stay as they are.

    Raises:
        TraceError: ``rate`` is not positive.
    """
    if not 0 < rate < math.inf:
        raise TraceError(f"rate={rate} must be a positive number; 1 leaves the trace as it is")
    requests = [replace(request, at=request.at / rate) for request in trace.requests]
    return replace(trace, requests=requests, notes=(*trace.notes, f"arrivals {rate:g} times as fast"))


def limited(trace: Trace, *, count: int | None = None, seconds: float | None = None) -> Trace:
    """The first ``count`` requests, and of these the ones that arrive before ``seconds``.

    Raises:
        TraceError: nothing would be left.
    """
    end = math.inf if seconds is None else seconds
    requests = [request for request in trace.requests[:count] if request.at < end]
    if not requests or (count is not None and count < 1):
        raise TraceError(f"count={count}, seconds={seconds} leave no request of {trace.name}; raise them")
    if len(requests) == len(trace.requests):
        return trace
    return replace(trace, requests=requests, notes=(*trace.notes, f"first {len(requests)} of {len(trace.requests)} requests"))


def with_targets(trace: Trace, *, ttft: float | None = None, tpot: float | None = None, deadline: float | None = None) -> Trace:
    """Every request with these targets, in seconds; ``None`` leaves what the trace says.

    Raises:
        TraceError: one is negative or not finite.
    """
    given = {"ttft_target": ttft, "tpot_target": tpot, "deadline": deadline}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(trace, requests=[replace(request, **changes) for request in trace.requests])


def with_tenants(trace: Trace, shares: Mapping[str, float], seed: int = 0) -> Trace:
    """Every request given to a tenant at random, in proportion to ``shares``.

    ``{"flood": 9, "polite": 1}`` makes a tenant that asks nine times as often as the other.

    Raises:
        TraceError: there is no tenant, or a share is not positive.
    """
    if not shares or not all(0 < share < math.inf for share in shares.values()):
        raise TraceError(f"shares={dict(shares)} must name tenants with positive numbers")
    names = list(shares)
    weights = np.array([shares[name] for name in names], np.float64)
    chosen = np.random.default_rng(seed).choice(len(names), len(trace.requests), p=weights / weights.sum())
    requests = [replace(request, tenant=names[i]) for request, i in zip(trace.requests, chosen, strict=True)]
    return replace(trace, requests=requests)
