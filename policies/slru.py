"""Segmented least recently used: prefixes that were hit again are protected from those that were not."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, PrefixView


@dataclass(eq=False)
class SLRU:
    """Evicts prefixes on probation, least recently used first, before protected ones.

    A prefix is on probation until it has been hit ``promote_after`` times. The protected ones may hold
    a bounded share of the pool; beyond it the least recently used of them are back on probation, until
    their next hit. From Karedla, Love and Wherry, "Caching strategies to improve disk system
    performance", Computer 1994; SGLang's ``slru`` has the threshold without the bound.

    A flood of prompts that are seen once passes through the probation segment only. Not for traffic
    in which a prefix is hit once, soon, and never again: it protects what is done with.

    The bound is brought up to date every ``refresh_steps`` steps, by reading all keys; it counts the
    prefixes that could go.

    Args:
        promote_after: Hits.
        protected_share: Share of the pool (0 … 1).
        refresh_steps: Steps between two counts.
    """

    api_version = 1
    promote_after: int = 1
    protected_share: float = 0.8
    refresh_steps: int = 32

    def __post_init__(self) -> None:
        if self.promote_after < 1 or self.refresh_steps < 1:
            raise ConfigError("slru: promote_after and refresh_steps must be at least 1")
        if not 0.0 <= self.protected_share <= 1.0:
            raise ConfigError(f"slru: protected_share={self.protected_share!r} must be between 0 and 1")
        self._demoted = -1  # whatever was used last in this step or before is on probation
        self._due = 0
        self._counting = False
        self._room = 0.0  # tokens that may still become protected
        self._counted: list[tuple[int, int]] = []  # heap of (last use, tokens); no longer than the pool has pages

    def key(self, prefix: PrefixView) -> tuple[bool, int, int]:
        """Protected or not, step of the last hit, then depth (deeper is smaller)."""
        protected = prefix.hits >= self.promote_after and prefix.last_used > self._demoted
        if protected and self._counting:
            self._count(prefix)
        return protected, prefix.last_used, -prefix.depth

    def begin(self, view: EngineView) -> bool:
        """Every ``refresh_steps`` steps: have the keys read again, and count what is protected."""
        self._counting = view.step >= self._due
        if self._counting:
            self._due = view.step + self.refresh_steps
            self._room = self.protected_share * view.total_pages * view.page_size
            self._counted.clear()
        return self._counting

    def on_evict(self, prefix: PrefixView) -> None:
        """All keys have been read by now."""
        self._counting = False

    def _count(self, prefix: PrefixView) -> None:
        heapq.heappush(self._counted, (prefix.last_used, prefix.tokens))
        self._room -= prefix.tokens
        while self._room < 0:
            self._demoted, tokens = heapq.heappop(self._counted)
            self._room += tokens
