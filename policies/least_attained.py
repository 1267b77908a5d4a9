"""Preempts who has received the least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..policy import EngineView, RequestView


@dataclass(eq=False)
class LeastAttained:
    """The request with the fewest output tokens gives way first; of equals, who was admitted last.

    Little has been invested in it, and its reader has seen little, so that a pause hurts less than one
    in the middle of an answer. SGLang picks whom it retracts in this order. Not for a mix of long and
    short prompts: a long one that has just been computed is dear to compute again (see ``cheapest``).
    How often one request may be preempted before others are preferred is the engine's
    ``max_preemptions``: without it one could be sent back just before its first tokens each time.
    """

    api_version = 1

    def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]:
        """Fewest generated tokens first, then latest admitted."""
        latest_first = running[::-1]
        return sorted(latest_first, key=lambda request: request.generated_tokens)
