"""Greedy-dual-size-frequency: what is cheap to compute again and seldom used goes first."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, PrefixView

_CLOCK_ENTRIES = 512


@dataclass(eq=False)
class CostAware:
    """Evicts the prefix with the least ``clock + frequency · cost / size``.

    GDSF (Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching
    policy", HP Labs 1998). The cost is that of computing the prefix again; per token it grows with
    depth, because a token attends to all before it: ``1 + depth / attention_at``. The clock stands at
    the value of what was evicted last, and a prefix keeps the time of its last use, so that what is
    not used any more goes in the end.

    For deep prefixes that are expensive to lose (long documents, long conversations). With short
    prompts it is an ``lfu`` whose ageing follows the evictions.

    Args:
        attention_at: Depth in tokens at which a token's attention costs as much as all the rest of it;
            about six times the hidden size with full attention.
    """

    api_version = 1
    attention_at: int = 8192

    def __post_init__(self) -> None:
        if self.attention_at < 1:
            raise ConfigError(f"cost-aware: attention_at={self.attention_at!r} must be at least 1 token")
        self._step = 0
        self._since = [0]  # the clock stood at _clock[i] from step _since[i] on
        self._clock = [0.0]

    def key(self, prefix: PrefixView) -> tuple[float, int]:
        """The value, then depth (deeper is smaller)."""
        clock = self._clock[bisect_right(self._since, prefix.last_used) - 1]
        cost_per_token = 1.0 + (prefix.depth - prefix.tokens / 2) / self.attention_at
        return clock + (1 + prefix.hits) * cost_per_token, -prefix.depth

    def begin(self, view: EngineView) -> bool:
        """Keys change by use only; only the step is of interest."""
        self._step = view.step
        return False

    def on_evict(self, prefix: PrefixView) -> None:
        """Advance the clock."""
        value, _ = self.key(prefix)
        if value <= self._clock[-1]:
            return
        if self._since[-1] == self._step:
            self._clock[-1] = value
            return
        self._since.append(self._step)
        self._clock.append(value)
        if len(self._since) > _CLOCK_ENTRIES:  # the past need not be known so exactly
            del self._since[1:-1:2], self._clock[1:-1:2]
