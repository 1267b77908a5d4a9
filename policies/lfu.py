"""Least frequently used prefix first, with ageing."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from ..errors import ConfigError
from ..policy import PrefixView


@dataclass(eq=False)
class LFU:
    """Evicts the prefix with the fewest hits, where hits count half after every ``half_life`` steps without one.

    Ageing in the manner of LRFU (Lee et al., IEEE Transactions on Computers 2001): a prefix is worth
    ``(1 + hits) · 2^(-steps since the last use / half_life)``. All of them fade alike, so that their
    order changes by use only, and the logarithm of this worth needs no clock.

    Prompts that are seen once do not push out popular ones, but former favourites go in the end: a
    thousand hits are forgiven ten half-lives. Not for traffic whose favourites change within a
    half-life.

    Args:
        half_life: Steps.
    """

    api_version = 1
    half_life: float = 1024.0

    def __post_init__(self) -> None:
        if not self.half_life > 0:
            raise ConfigError(f"lfu: half_life={self.half_life!r} must be a positive number of steps")

    def key(self, prefix: PrefixView) -> tuple[float, int]:
        """Logarithm of the worth, less what is the same for all; then depth (deeper is smaller)."""
        return log2(1 + prefix.hits) + prefix.last_used / self.half_life, -prefix.depth
