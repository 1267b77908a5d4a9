"""Longest output first."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import RequestView
from ._keyed import KeyedOrder, KeyedQueue
from ._output_length import expected_output


@dataclass(eq=False)
class LOF(KeyedOrder):
    """Requests that will generate most go first, so that a batch of known size does not end with a few long rows.

    SGLang's ``lof`` (schedule_policy.py); in scheduling, longest processing time first (Graham, SIAM
    Journal on Applied Mathematics, 1969), whose last job ends at most a third later than is possible.
    The length is the hint ``output_tokens``, else ``max_tokens``.

    For offline work. Not where somebody waits for a short answer: it makes the mean latency worse
    than ``fcfs`` does (``sjf`` is its opposite).

    Args:
        age_tokens: Output tokens by which a request counts as longer for each step it waits, so that a
            short one is overtaken for a bounded time only.
    """

    api_version = 1
    age_tokens: float = 1.0

    def __post_init__(self) -> None:
        if not self.age_tokens > 0:
            raise ConfigError("lof: age_tokens must be above 0, or short requests would starve")
        self._queue = KeyedQueue(self._key)

    def _key(self, request: RequestView) -> float:
        # All age alike, so that the order of two requests never changes and the key need not be renewed.
        return self.age_tokens * request.waiting_since_step - expected_output(request)
