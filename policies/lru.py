"""Least recently used prefix first: the default eviction."""

from __future__ import annotations

from dataclasses import dataclass

from ..policy import PrefixView


@dataclass(eq=False)
class LRU:
    """Evicts the prefix whose last hit is oldest; of equals, the deeper one, so that tails go before heads.

    Not for traffic in which many prompts are seen once: each of them pushes out something that would
    have been used again (``slru`` and ``lfu`` stand that better).
    """

    api_version = 1

    def key(self, prefix: PrefixView) -> tuple[int, int]:
        """Step of the last hit, then depth (deeper is smaller)."""
        return prefix.last_used, -prefix.depth
