"""Random order, the same in every run."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import RequestView
from ._keyed import KeyedOrder, KeyedQueue


@dataclass(eq=False)
class RandomOrder(KeyedOrder):
    """Serves at random: each request is set back by a random share of ``spread_steps`` steps.

    SGLang's ``random`` (schedule_policy.py) shuffles the queue for every batch; here a request draws
    once, by its number, so that runs can be repeated and none waits for ever. The order is uniform
    among requests that came in the same step, and keeps to arrival over more than ``spread_steps``.

    A yardstick for other orders, and a way to shake out dependence on arrival order; not for production.

    Args:
        seed: Of the draws, together with the request's number; a whole number.
        spread_steps: How far behind later requests one may fall, in steps.
    """

    api_version = 1
    seed: int = 0
    spread_steps: int = 256

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"random: seed={self.seed!r} must be a whole number")
        if self.spread_steps < 1:
            raise ConfigError("random: spread_steps must be at least 1")
        self._queue = KeyedQueue(self._key)

    def _key(self, request: RequestView) -> float:
        return request.waiting_since_step + self.spread_steps * _uniform(self.seed, request.number)


_MASK = 2**64 - 1


def _uniform(seed: int, number: int) -> float:
    """A number in [0, 1) that depends on both: ``number`` is the position in a SplitMix64 stream.

    Steele, Lea and Flood, OOPSLA 2014. The seed is mixed first, as neighbouring seeds would otherwise
    give the same stream, shifted.
    """
    state = _mixed(seed & _MASK) + number * 0x9E3779B97F4A7C15
    return _mixed(state & _MASK) / 2**64


def _mixed(bits: int) -> int:
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK
    return bits ^ bits >> 31
