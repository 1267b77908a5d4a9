"""Eviction through the engine: watermarks, order, faults of eviction policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncsched.errors import ConfigError, EngineDeadError
from asyncsched.policies.lru import LRU
from asyncsched.policy import PrefixView
from asyncsched.testing import FakePrefix, check_invariants

from .control_helpers import ONE_LOOP, Simulation, prompt, simulation


class EndlessError(BaseException):
    """Not an ``Exception``, so that nothing takes it for a policy's mistake."""


class Keyed:
    """An eviction policy with a key of the test's own."""

    def __init__(self, key: Callable[[PrefixView], Any]) -> None:
        self._key = key
        self.asked = 0

    def key(self, prefix: PrefixView) -> Any:
        self.asked += 1
        if self.asked > 20_000:
            raise EndlessError
        return self._key(prefix)


async def fill(sim: Simulation, *kinds: int, length: int = 8) -> None:
    """Cache the prompts of some kinds, one after the other; two pages each."""
    for kind in kinds:
        sim.send(prompt(length, kind), 1)
        await sim.run_out()


def kept(sim: Simulation, *kinds: int, length: int = 8) -> list[int]:
    """Which kinds are still cached, at least in part."""
    return [kind for kind in kinds if sim.cached(prompt(length, kind))]


# Watermarks


async def test_free_pages_are_kept_above_the_watermark() -> None:
    async with simulation(pages=100, low_watermark=0.1, high_watermark=0.3) as sim:
        for kind in range(60):
            await fill(sim, kind)
            assert sim.statistics.free_pages >= 10
        assert sim.statistics.evicted_pages > 0
        assert sim.statistics.cached_pages >= 65, "no more is evicted than the high watermark asks for"
        await sim.finish()


async def test_crossing_the_low_watermark_restores_the_high_one() -> None:
    async with simulation(pages=40, low_watermark=0.25, high_watermark=0.5) as sim:
        await fill(sim, *range(15))
        assert (sim.statistics.free_pages, sim.statistics.evicted_pages) == (10, 0)
        await fill(sim, 15)
        assert sim.statistics.free_pages == 20
        assert kept(sim, *range(16)) == list(range(6, 16)), "the least recently used went first"
        await sim.finish()


async def test_a_large_pool_is_restored_in_slices() -> None:
    async with simulation(pages=2000, page_size=1, low_watermark=0.1, high_watermark=0.8) as sim:
        kind = 0
        while not sim.statistics.evicted_pages:
            await fill(sim, kind, length=100)
            kind += 1
        assert sim.statistics.free_pages == 1600
        await sim.finish()


async def test_pages_in_use_are_not_evicted_for_the_watermark() -> None:
    async with simulation(pages=20, low_watermark=0.5, high_watermark=0.9) as sim:
        sim.send(prompt(40, 1), 9)
        await sim.settle()
        await sim.step(3)
        assert sim.statistics.evicted_pages == 0
        assert sim.cached(prompt(40, 1)) == 40
        await sim.finish()
        assert sim.statistics.evicted_pages == 0, "a watermark is restored when a plan has crossed it, not at idle"


async def test_zero_watermarks_evict_on_demand_only() -> None:
    async with simulation(pages=10) as sim:
        await fill(sim, 1, 2, 3, 4, 5)
        assert (sim.statistics.free_pages, sim.statistics.evicted_pages) == (0, 0)
        await fill(sim, 6)
        assert sim.statistics.evicted_pages == 2
        await sim.finish()


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.4), (-0.1, 0.5), (0.5, 1.0)])
@ONE_LOOP
async def test_impossible_watermarks(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="watermark"):
        async with simulation(low_watermark=low, high_watermark=high):
            pass


# Order


async def test_the_least_recently_used_prefix_goes_first() -> None:
    async with simulation(pages=10) as sim:
        await fill(sim, 1, 2, 3, 4)
        await fill(sim, 1, length=9)  # a hit
        await fill(sim, 5, 6, 7)
        assert kept(sim, 1, 2, 3, 4, 5, 6, 7) == [1, 4, 5, 6, 7]
        await sim.finish()


async def test_a_tail_goes_before_the_head_others_share() -> None:
    async with simulation(pages=9) as sim:
        shared = prompt(8, 1)
        sim.send(shared + prompt(8, 2), 1)
        await sim.run_out()
        sim.send(shared + prompt(8, 3), 1)
        await sim.run_out()
        assert sim.statistics.cached_pages == 6
        sim.send(prompt(28, 4), 1)
        await sim.run_out()
        assert sim.cached(shared) == 8
        assert sim.statistics.evicted_pages == 4
        await sim.finish()


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (lambda prefix: prefix.created, [3, 4, 5, 6]),  # first in, first out: the hit does not help
        (lambda prefix: -prefix.created, [1, 2, 3, 6]),
        (lambda prefix: (prefix.hits, prefix.created), [1, 4, 5, 6]),  # least frequently used
        (lambda prefix: -prefix.depth, [3, 4, 5, 6]),
    ],
    ids=["fifo", "lifo", "lfu", "deepest"],
)
@ONE_LOOP
async def test_a_policys_key_decides(key: Callable[[PrefixView], Any], expected: list[int]) -> None:
    async with simulation(pages=10, eviction_policy=Keyed(key)) as sim:
        await fill(sim, 1, 2, 3, 4)
        await fill(sim, 1, length=9)
        await fill(sim, 5)
        sim.send(prompt(16, 6), 1)
        await sim.run_out()
        assert kept(sim, 1, 2, 3, 4, 5, 6) == expected
        assert sim.statistics.policy_faults == {}
        await sim.finish()


async def test_the_lru_policy_prefers_old_then_deep() -> None:
    prefixes = [FakePrefix(last_used=used, depth=depth) for used, depth in [(5, 8), (3, 8), (3, 16), (9, 400)]]
    ordered = sorted(prefixes, key=LRU().key)
    assert [(prefix.last_used, prefix.depth) for prefix in ordered] == [(3, 16), (3, 8), (5, 8), (9, 400)]


async def test_prefixes_show_what_they_promise() -> None:
    seen: dict[int, tuple[int, int, int]] = {}

    def key(prefix: PrefixView) -> int:
        seen[prefix.depth] = prefix.created, prefix.last_used, prefix.hits
        return prefix.last_used

    async with simulation(eviction_policy=Keyed(key)) as sim:
        await fill(sim, 1)
        await fill(sim, 2, length=12)
        await fill(sim, 1, length=9)
        await sim.engine.flush_cache()
        assert seen[8] == (1, 3, 1)
        assert seen[12] == (2, 2, 0)
        await sim.finish()


# Faults


async def churn(sim: Simulation) -> None:
    """Enough traffic to evict again and again; the answers must be right all the same."""
    for kind in range(8):
        sim.send(prompt(9, kind), 3)
        sim.send(prompt(9, kind) + prompt(9, kind + 3), 3)
        await sim.run_out()
    await sim.finish()
    assert sim.statistics.evicted_pages > 8


class Unorderable:
    """Equal to nothing, and in no order."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


class Explosive:
    """Compares with itself, but not with others."""

    def __lt__(self, other: object) -> bool:
        if other is not self:
            raise RuntimeError("apples and oranges")
        return False


@pytest.mark.parametrize(
    "key",
    [
        lambda prefix: 1 / 0,
        lambda prefix: None,
        lambda prefix: object(),
        lambda prefix: {"a": 1},
        lambda prefix: Unorderable(),
        lambda prefix: 1j,
        lambda prefix: 1 / (prefix.created % 2),  # works for some
    ],
    ids=["raises", "none", "object", "dict", "unorderable", "complex", "sometimes"],
)
@ONE_LOOP
async def test_a_key_that_is_none_is_a_fault_and_lru_takes_over(key: Callable[[PrefixView], Any]) -> None:
    async with simulation(pages=12, eviction_policy=Keyed(key)) as sim:
        await churn(sim)
        assert sim.statistics.policy_faults["key"] > 0


@pytest.mark.parametrize(
    "key",
    [
        lambda prefix: prefix.created if prefix.created % 2 else str(prefix.created),
        lambda prefix: (prefix.created % 2, None if prefix.created % 3 else 1),
        lambda prefix: Explosive(),
        lambda prefix: np.array([1, 2]),
        lambda prefix: (1, np.array([prefix.created, 2])),
    ],
    ids=["mixed", "nested", "explosive", "array", "nested-array"],
)
@ONE_LOOP
async def test_keys_that_cannot_be_compared_with_each_other_do_no_harm(key: Callable[[PrefixView], Any]) -> None:
    """Each key looks sound alone."""
    async with simulation(pages=12, eviction_policy=Keyed(key)) as sim:
        await churn(sim)
        assert sim.statistics.policy_faults["key"] > 0


def counting() -> Callable[[PrefixView], int]:
    count = 0

    def key(prefix: PrefixView) -> int:
        nonlocal count
        count += 1
        return count

    return key


def alternating() -> Callable[[PrefixView], int]:
    count = 0

    def key(prefix: PrefixView) -> int:
        nonlocal count
        count += 1
        return 1 // (count % 2)

    return key


@pytest.mark.parametrize(
    "make", [counting, lambda: lambda prefix: float("nan"), alternating], ids=["counts", "nan", "alternates"]
)
@ONE_LOOP
async def test_a_key_that_is_never_the_same_twice_ends(make: Callable[[], Callable[[PrefixView], Any]]) -> None:
    policy = Keyed(make())
    async with simulation(pages=12, eviction_policy=policy) as sim:
        await churn(sim)
        assert policy.asked < 2_000


async def test_a_key_that_shrinks_against_the_rules_loses_nothing() -> None:
    count = 0

    def key(prefix: PrefixView) -> int:
        nonlocal count
        count -= 1
        return count

    async with simulation(pages=12, eviction_policy=Keyed(key)) as sim:
        await churn(sim)


async def test_a_strict_engine_passes_the_error_on() -> None:
    async with simulation(pages=12, eviction_policy=Keyed(lambda prefix: 1 / 0), strict_policies=True) as sim:
        sent = sim.send(prompt(9), 3)
        sim.executor.unhold()
        with pytest.raises(EngineDeadError) as caught:
            await sent.stream.result()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def test_flushing_forgets_what_is_unused_only() -> None:
    async with simulation() as sim:
        await fill(sim, 1, 2)
        sim.executor.hold()
        sim.send(prompt(9, 1), 6)
        await sim.settle()
        assert await sim.engine.flush_cache() == 2
        assert kept(sim, 1, 2) == [1]
        check_invariants(sim.engine)
        await sim.run_out()
        assert await sim.engine.flush_cache() == sim.statistics.free_pages - (64 - 3)
        assert sim.statistics.free_pages == 64
        await sim.finish()
