"""Longest cached prefix first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..policy import EngineView, RequestView
from ._cache_aware import CacheAware
from ._keyed import Ranking


@dataclass(eq=False)
class LPM(CacheAware):
    """Requests whose prompt is cached furthest go first, so that shared prefixes are used while they last.

    The cache-aware order of SGLang (Zheng et al., NeurIPS 2024). Alone it starves cold requests
    under a flood of hot ones (sgl-project/sglang 31954), so those that have waited ``age_steps`` steps
    get every fourth admission, in arrival order; not all of them, or a long queue would be served by
    arrival. SGLang gives this order up when more than 128 requests wait; here a step looks up
    ``lookups`` of them, and a new request counts as cold until its turn comes.

    Not for workloads without shared prefixes: it then costs the look-ups and orders like ``fcfs``.

    Args:
        age_steps: Steps after which a waiting request counts as starved.
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
        self._hits = Ranking()  # by cached tokens, most first; only those that hit something

    def _look_up(self, request: RequestView, view: EngineView) -> None:
        cached = view.cached_prefix(request)
        if cached:
            self._hits.put(request, -cached)
        else:
            self._hits.forget(request.number)

    def _drop(self, number: int) -> None:
        self._hits.forget(number)

    def _sorted(self, waiting: Sequence[RequestView], wanted: AbstractSet[int]) -> Iterator[RequestView]:
        yield from self._hits.among(wanted)
        for request in waiting:
            if request.number in wanted and request.number not in self._hits:
                yield request
