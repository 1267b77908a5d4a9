"""Longest cached prefix first, with ageing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop

from ..policy import EngineView, RequestView
from ._cache_aware import CacheAware


@dataclass(eq=False)
class LPM(CacheAware):
    """Requests whose prompt is cached furthest go first, so that shared prefixes are used while they last.

    The cache-aware order of SGLang (Zheng et al., NeurIPS 2024). Alone it starves cold requests
    under a flood of hot ones (sgl-project/sglang 31954), so a request that has waited
    ``age_steps`` steps goes before all younger ones, in arrival order. SGLang gives this order up when
    more than 128 requests wait; here a step looks up ``lookups`` of them, and a new request counts as
    cold until its turn comes.

    Not for workloads without shared prefixes: it then costs the look-ups and orders like ``fcfs``.

    Args:
        age_steps: Steps after which a waiting request goes first.
        refresh_steps: How many steps a look-up of the cached length stays good. The cache changes
            with every step; a somewhat old answer orders nearly as well.
        lookups: Most look-ups in one step, a few µs each.
        defer_tokens: A request waits while another computes at least so many tokens of a prefix that
            both share; ``None`` has them computed twice. Matters only where chunks are capped.
    """

    api_version = 1
    name = "lpm"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Request number → (-cached tokens, number, request), ready for a heap; only those that hit something.
        self._known: dict[int, tuple[int, int, RequestView]] = {}

    def _look_up(self, request: RequestView, view: EngineView) -> None:
        cached = view.cached_prefix(request)
        if cached:
            self._known[request.number] = -cached, request.number, request
        else:
            self._drop(request.number)

    def _drop(self, number: int) -> None:
        self._known.pop(number, None)

    def _sorted(self, young: Sequence[RequestView], held: AbstractSet[int]) -> Iterator[RequestView]:
        known = self._known
        heap = [entry for request in young if (entry := known.get(request.number)) is not None]
        if held:
            heap = [entry for entry in heap if entry[1] not in held]
        heapify(heap)
        while heap:
            yield heappop(heap)[2]
        for request in young:
            if request.number not in known and request.number not in held:
                yield request
