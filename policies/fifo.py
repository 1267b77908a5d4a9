"""Oldest prefix first, whether it was used again or not."""

from __future__ import annotations

from dataclasses import dataclass

from ..policy import PrefixView


@dataclass(eq=False)
class FIFO:
    """Evicts prefixes in the order in which they were computed.

    The baseline that the other policies are measured against, and the right one where a prefix is of
    use for a fixed time only. Not for prompts with a common head that stays popular: it is evicted in
    its turn, however often it was hit.
    """

    api_version = 1

    def key(self, prefix: PrefixView) -> tuple[int, int]:
        """Step that computed it, then depth (deeper is smaller)."""
        return prefix.created, -prefix.depth
