"""Preempts who costs the least to compute again, per page it frees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from ..policy import EngineView, RequestView


@dataclass(eq=False)
class Cheapest:
    """The request with the fewest computed tokens per page of its own gives way first.

    A preempted request is computed again from the start: prompt and output so far, unless the cache
    keeps them, which under the pressure that led to the preemption it often cannot. What it frees for
    certain are the pages that nobody shares. So a long answer to a short prompt goes before a short
    answer to a long prompt, and one whose pages are all shared goes last. Ties: latest admitted first. Not
    for outputs of similar length after similar prompts: all cost the same then, and ``latest`` does.
    How often one request may be preempted before others are preferred is the engine's
    ``max_preemptions``.
    """

    api_version = 1

    def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]:
        """Fewest tokens to compute again per page freed first."""
        latest_first = running[::-1]
        return sorted(latest_first, key=_tokens_per_page)


def _tokens_per_page(request: RequestView) -> float:
    """Tokens to compute again for each page that it would free."""
    own = request.own_pages
    return (request.prompt_tokens + request.generated_tokens - request.prefill_left) / own if own else inf
