"""Spares what a waiting request is about to hit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..policy import EngineView, PrefixView
from ..registry import load_policy


@dataclass(eq=False)
class WaitingAware:
    """Evicts no prefix that one of the next waiting requests would hit while there is another.

    The queue is the one part of the future that is known (vllm-project/vllm 48485). Within what is
    wanted, and within what is not, ``within`` decides.

    Of no use while nothing waits, and not for orders that serve the latest first: it looks at the
    earliest arrivals.

    Args:
        look_ahead: How many waiting requests to look at; a look-up of a few µs each.
        every_steps: Steps between two looks.
        within: The eviction policy that orders the rest.
    """

    api_version = 1
    look_ahead: int = 32
    every_steps: int = 8
    within: Any = "lru"

    def __post_init__(self) -> None:
        if self.look_ahead < 1 or self.every_steps < 1:
            raise ConfigError("waiting-aware: look_ahead and every_steps must be at least 1")
        self._inner = load_policy(self.within, "key")
        self.parts = (self._inner,)
        self._due = 0
        self._wanted: dict[int, PrefixView] = {}  # by identity; the reference keeps that from being used again

    def key(self, prefix: PrefixView) -> tuple[bool, Any]:
        """Wanted or not, then the inner policy's key."""
        return id(prefix) in self._wanted, self._inner.key(prefix)

    def begin(self, view: EngineView) -> bool:
        """Look at the queue. True if something is no longer wanted, or if the inner policy wants it."""
        begin = getattr(self._inner, "begin", None)
        again = begin is not None and bool(begin(view))
        if view.step < self._due:
            return again
        self._due = view.step + self.every_steps
        before, self._wanted = self._wanted, {}
        for request in view.waiting[: self.look_ahead]:
            self._wanted.update((id(prefix), prefix) for prefix in view.prefixes(request))
        return again or not before.keys() <= self._wanted.keys()

    def on_evict(self, prefix: PrefixView) -> None:
        """Pass it on."""
        on_evict = getattr(self._inner, "on_evict", None)
        if on_evict is not None:
            on_evict(prefix)
