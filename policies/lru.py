"""Least recently used prefix first: the default eviction."""

from __future__ import annotations

from ..policy import PrefixView


class LRU:
    """Evicts the prefix whose last hit is oldest; of equals, the deeper one, so that tails go before heads."""

    api_version = 1

    def key(self, prefix: PrefixView) -> tuple[int, int]:
        """Step of the last hit, then depth (deeper is smaller)."""
        return prefix.last_used, -prefix.depth
