"""Retention: what a program has used is kept for a while, because it will come back."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from ..errors import ConfigError
from ..policy import EngineView, PrefixView
from ..registry import load_policy


@dataclass(eq=False)
class TTL:
    """Keeps a prefix whose last user had a ``program_id`` for ``seconds`` after that use.

    An agent that calls a tool, or a person who reads an answer, returns with the same prefix and a
    little more; least-recently-used order has often thrown it out by then. Retention for a time, as in
    Continuum (Li et al., 2025; vllm-project/vllm 38514) and TensorRT-LLM's retention configuration.
    Within what is retained, and within what is not, ``within`` decides; retained prefixes go when
    nothing else is left.

    Not for programs whose next request comes at once or never: it then keeps what is done with.

    Args:
        seconds: How long; a little more than a tool call usually takes.
        within: The eviction policy that orders the rest.
    """

    api_version = 1
    seconds: float = 30.0
    within: Any = "lru"

    def __post_init__(self) -> None:
        if not 0 < self.seconds < inf:
            raise ConfigError(f"ttl: seconds={self.seconds!r} must be a positive number")
        self._inner = load_policy(self.within, "key")
        self.parts = (self._inner,)
        self._now = 0.0
        self._due = inf  # when the first retention runs out that a key was handed out for

    def key(self, prefix: PrefixView) -> tuple[bool, Any]:
        """Retained or not, then the inner policy's key."""
        end = prefix.used_at + self.seconds
        retained = prefix.program_id is not None and end > self._now
        if retained:  # reading all keys has its price: not for each of many that end one after the other
            self._due = min(self._due, max(end, self._now + self.seconds / 16))
        return retained, self._inner.key(prefix)

    def begin(self, view: EngineView) -> bool:
        """True if a retention has run out, or if the inner policy wants it."""
        begin = getattr(self._inner, "begin", None)
        again = begin is not None and begin(view)
        self._now = view.now
        if self._now >= self._due:
            self._due = inf  # found anew as the keys are read
            again = True
        return bool(again)

    def on_evict(self, prefix: PrefixView) -> None:
        """Pass it on."""
        on_evict = getattr(self._inner, "on_evict", None)
        if on_evict is not None:
            on_evict(prefix)
