"""The bundled eviction policies: their order, their bounds, and the traffic that each is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from asyncsched.errors import ConfigError
from asyncsched.policies.cost_aware import CostAware
from asyncsched.policies.fifo import FIFO
from asyncsched.policies.lfu import LFU
from asyncsched.policies.lru import LRU
from asyncsched.policies.priority_eviction import PriorityEviction
from asyncsched.policies.slru import SLRU
from asyncsched.policies.ttl import TTL
from asyncsched.policies.waiting_aware import WaitingAware
from asyncsched.policy import PrefixView
from asyncsched.prefix import Node, Use
from asyncsched.radix import RadixTree
from asyncsched.testing import FakePrefix, FakeRequest, FakeView

from .control_helpers import ONE_LOOP, prompt, simulation, traffic

PAGE = 4

POLICIES: dict[str, Callable[[], Any]] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": lambda: LFU(half_life=50),
    "slru": lambda: SLRU(protected_share=0.5, refresh_steps=4),
    "cost-aware": CostAware,
    "priority": PriorityEviction,
    "ttl": lambda: TTL(seconds=5.0, within=LRU()),  # finding a policy by name is not for an event loop
    "ttl of slru": lambda: TTL(seconds=5.0, within=SLRU(refresh_steps=4)),
    "waiting-aware": lambda: WaitingAware(within=LRU()),
    "waiting-aware of cost-aware": lambda: WaitingAware(within=CostAware()),
}
EVERY = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


class Cache:
    """A prefix tree of bounded size that serves one prompt per step, as an engine with one row would."""

    def __init__(self, policy: Any, pages: int) -> None:
        self.policy = policy
        self.tree = RadixTree(PAGE, policy.key, self._on_evict)
        self.pages = pages
        self.step = 0
        self.now = 0.0
        self.hit = 0
        self.asked = 0
        self.saved = 0.0
        self._issued = 0

    def serve(self, tokens: Sequence[int], seconds: float = 1.0, **use: Any) -> int:
        """Serve a prompt of whole pages; returns how many of its tokens were cached."""
        self.step += 1
        self.now += seconds
        who = Use(self.now, **use)
        raw = np.array(tokens, np.int32).tobytes()
        node, found = self.tree.match("", raw, self.step, who)
        self.tree.lock(node)
        cached, needed = len(found) * PAGE, len(tokens) // PAGE - len(found)
        if self.tree.pages + needed > self.pages:
            self.evict(self.tree.pages + needed - self.pages)
        fresh = np.arange(self._issued, self._issued + needed, dtype=np.int32)
        self._issued += needed
        end, _ = self.tree.extend(node, raw[cached * 4 :], fresh, self.step, use=who)
        self.tree.move_lock(node, end)
        self.tree.unlock(end)
        self.hit += cached
        self.asked += len(tokens)
        self.saved += sum(1 + position / 64 for position in range(cached))  # what attention makes of it at this depth
        return cached

    def evict(self, pages: int, view: FakeView | None = None) -> None:
        """Drop some pages as the engine does."""
        if view is None:
            view = FakeView(step=self.step, now=self.now, total_pages=self.pages, page_size=PAGE)
        begin = getattr(self.policy, "begin", None)
        if begin is not None and begin(view):
            self.tree.requeue()
        assert self.tree.evict(pages)

    def holds(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that are cached."""
        return self.tree.peek("", np.array(tokens, np.int32).tobytes())

    @property
    def rate(self) -> float:
        """Share of the prompt tokens that were cached."""
        return self.hit / self.asked

    def _on_evict(self, node: Node) -> None:
        assert not node.children, "a leaf goes before what it is built on"
        on_evict = getattr(self.policy, "on_evict", None)
        if on_evict is not None:
            on_evict(node)


def run(first: int, pages: int) -> list[int]:
    """Tokens of ``pages`` pages; different ``first`` share nothing."""
    return [first * 1000 + index for index in range(pages * PAGE)]


def order(policy: Any, prefixes: Iterable[PrefixView]) -> list[PrefixView]:
    """In which order they would go."""
    return sorted(prefixes, key=policy.key)


# Every one of them


@EVERY
def test_random_use_evicts_tails_before_heads_and_reaches_everything(make: Callable[[], Any]) -> None:
    random, cache = Random(1), Cache(make(), 60)
    for _ in range(600):
        tokens = [token for _ in range(random.randint(1, 5)) for token in run(random.choice((1, 2, 3)), 1)]
        cache.serve(tokens, program_id=random.choice((None, "p")), priority=random.randint(0, 2))
        if random.random() < 0.3:
            cache.serve(run(100 + random.randrange(500), random.randint(1, 8)))
    assert 0 < cache.tree.pages <= 60
    assert cache.hit > 0
    cache.evict(cache.tree.pages)
    assert cache.tree.pages == 0


@EVERY
@ONE_LOOP
async def test_busy_traffic_on_the_engine(make: Callable[[], Any]) -> None:
    async with simulation(pages=24, max_rows=4, token_budget=24, eviction_policy=make(), strict_policies=True) as sim:
        await traffic(sim, 5, requests=20)
        await sim.finish()
        assert sim.statistics.evicted_pages > 0
        assert sim.statistics.policy_faults == {}


@EVERY
def test_equals_are_told_apart_by_depth(make: Callable[[], Any]) -> None:
    shallow, deep = FakePrefix(depth=16, tokens=16), FakePrefix(depth=32, tokens=16)
    policy = make()
    if isinstance(policy, CostAware) or isinstance(getattr(policy, "within", None), CostAware):
        assert order(policy, [deep, shallow]) == [shallow, deep], "the deep one costs more to compute again"
    else:
        assert order(policy, [shallow, deep]) == [deep, shallow]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (LFU, {"half_life": 0}),
        (LFU, {"half_life": float("nan")}),
        (SLRU, {"promote_after": 0}),
        (SLRU, {"refresh_steps": 0}),
        (SLRU, {"protected_share": 1.1}),
        (CostAware, {"attention_at": 0}),
        (PriorityEviction, {"class_steps": 0}),
        (PriorityEviction, {"classes": 0}),
        (TTL, {"seconds": 0}),
        (TTL, {"seconds": float("inf")}),
        (WaitingAware, {"look_ahead": 0}),
        (WaitingAware, {"every_steps": 0}),
    ],
)
def test_impossible_options(policy: type, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        policy(**options)


# Traffic that each is for


def scanned(policy: Any) -> float:
    """Two popular prompts, and between two uses of them more prompts seen once than fit."""
    cache, number = Cache(policy, 40), 100
    for _ in range(12):
        for hot in (1, 2):
            cache.serve(run(hot, 8))
            cache.serve(run(hot, 8))
        for _ in range(20):
            number += 1
            cache.serve(run(number, 2))
    return cache.rate


@pytest.mark.parametrize("policy", [LFU(), SLRU(), CostAware()], ids=["lfu", "slru", "cost-aware"])
def test_a_scan_does_not_push_out_what_is_popular(policy: Any) -> None:
    assert scanned(LRU()) == pytest.approx(scanned(FIFO()), rel=0.1)
    assert scanned(policy) > 1.6 * scanned(LRU())


def fashions(policy: Any) -> int:
    """Favourites that were used much are never used again; returns what is left of them in the end."""
    cache, number = Cache(policy, 40), 100
    for _ in range(30):
        cache.serve(run(1, 16))
    for _ in range(150):
        cache.serve(run(2, 8))
        for _ in range(3):
            number += 1
            cache.serve(run(number, 3))
    assert cache.holds(run(2, 8)) == 32, "the new favourite is in"
    return cache.holds(run(1, 16))


@pytest.mark.parametrize("policy", [LFU(half_life=40), SLRU(protected_share=0.5, refresh_steps=4), CostAware()])
def test_former_favourites_go(policy: Any) -> None:
    assert fashions(policy) == 0


@pytest.mark.parametrize("policy", [LFU(half_life=1e9), SLRU(protected_share=1.0)])
def test_without_ageing_or_bound_former_favourites_would_stay(policy: Any) -> None:
    assert fashions(policy) == 64


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_slru_protects_no_more_than_its_share(share: float) -> None:
    """Twelve prompts that are all used twice want 36 of 48 pages protected; then comes a scan."""
    cache = Cache(SLRU(protected_share=share, refresh_steps=1), 48)
    for kind in range(12):
        for _ in range(2):
            cache.serve(run(kind, 3))
    for number in range(100, 160):
        cache.serve(run(number, 3))
    kept = [kind for kind in range(12) if cache.holds(run(kind, 3))]
    assert kept == list(range(12 - min(12, int(share * 48) // 3), 12)), "the least recently used have made room"


def test_slru_gives_what_was_demoted_another_chance() -> None:
    policy = SLRU(protected_share=0.5, refresh_steps=1)
    old, new = FakePrefix(hits=3, last_used=5, tokens=64), FakePrefix(hits=1, last_used=9, tokens=64)
    once = FakePrefix(hits=0, last_used=7, tokens=64)
    assert policy.begin(FakeView(step=10, total_pages=10, page_size=16))
    order(policy, [old, new, once])
    assert order(policy, [old, new, once]) == [old, once, new]
    assert order(policy, [FakePrefix(hits=4, last_used=11, tokens=64), once])[0] is once


@pytest.mark.parametrize(("make", "wins"), [(CostAware, True), (LRU, False)])
def test_cost_aware_keeps_what_is_expensive_to_compute_again(make: Callable[[], Any], wins: bool) -> None:
    """One long document and many short prompts are used alternately, all of them equally often; half of it fits."""
    policy = make()
    if isinstance(policy, CostAware):
        policy = CostAware(attention_at=64)
    cache = Cache(policy, 60)
    document, seldom = run(1, 40), 0
    for turn in range(40):
        cache.serve(document)
        for kind in range(10):
            cache.serve(run(10 + 10 * (turn % 2) + kind, 4))
        seldom += cache.holds(document) == 160
    assert (seldom > 30) is wins
    assert (cache.saved > 40 * 160) is wins


def test_cost_aware_ages_by_its_evictions() -> None:
    policy = CostAware(attention_at=1000)
    old = FakePrefix(hits=4, last_used=1, tokens=16, depth=16)
    new = FakePrefix(hits=0, last_used=100, tokens=16, depth=16)
    assert order(policy, [old, new]) == [new, old]
    policy.begin(FakeView(step=50))
    policy.on_evict(FakePrefix(hits=6, last_used=1, tokens=16, depth=16))
    assert order(policy, [old, new]) == [old, new], "what was used after that eviction is worth more by the clock"


def test_cost_aware_keeps_its_clock_short() -> None:
    policy = CostAware()
    for step in range(1, 5000):
        policy.begin(FakeView(step=step))
        policy.on_evict(FakePrefix(hits=step, last_used=step - 1))
    assert len(policy._clock) == len(policy._since) <= 512
    assert policy._clock == sorted(policy._clock)
    assert policy._since == sorted(set(policy._since))


def test_fifo_takes_no_account_of_hits() -> None:
    old, new = FakePrefix(created=1, last_used=99, hits=50), FakePrefix(created=2, last_used=2)
    assert order(FIFO(), [new, old]) == [old, new]


@pytest.mark.parametrize("between", [3, 5, 20])
def test_priority_keeps_higher_classes_longer_but_not_for_ever(between: int) -> None:
    """A prefix of class -1 is worth ten steps more than the flood of class 0 that presses it, in which five fit beside it."""
    cache = Cache(PriorityEviction(class_steps=10), 6)
    cache.serve(run(1, 1), priority=-1)
    for number in range(100, 100 + between):
        cache.serve(run(number, 1))
    assert bool(cache.holds(run(1, 1))) is (between < 15)
    lru = Cache(LRU(), 6)
    lru.serve(run(1, 1), priority=-1)
    for number in range(100, 106):
        lru.serve(run(number, 1))
    assert not lru.holds(run(1, 1))


def test_priority_caps_the_classes() -> None:
    policy = PriorityEviction(class_steps=10, classes=2)
    highest, high, low = (FakePrefix(last_used=step, priority=-rank) for step, rank in ((1, 10**9), (2, 2), (30, 0)))
    assert order(policy, [highest, high, low]) == [highest, high, low]


def returning(policy: Any) -> tuple[float, Cache]:
    """Agents come back every ten seconds with the same prefix; prompts seen once come all the time."""
    cache, number = Cache(policy, 60), 100
    hit = asked = 0
    for _ in range(10):
        for agent in range(4):
            hit += cache.serve(run(agent, 10), 0.1, program_id=f"agent {agent}")
            asked += 40
        for _ in range(20):
            number += 1
            cache.serve(run(number, 2), 0.5)
    return hit / asked, cache


def test_ttl_keeps_what_programs_come_back_for() -> None:
    assert returning(LRU())[0] == 0.0
    assert returning(TTL(seconds=15.0))[0] == 0.9, "all but the first time"
    assert returning(TTL(seconds=5.0))[0] == 0.0, "shorter than they take"


def test_ttl_lets_go_when_the_time_is_up() -> None:
    _, cache = returning(TTL(seconds=15.0))
    for number in range(1000, 1040):
        cache.serve(run(number, 2), 0.5)
    assert not any(cache.holds(run(agent, 10)) for agent in range(4))


def test_ttl_evicts_what_is_retained_when_there_is_nothing_else() -> None:
    cache = Cache(TTL(seconds=1e6), 10)
    for number in range(8):
        cache.serve(run(number, 2), program_id="p")
    assert [number for number in range(8) if cache.holds(run(number, 2))] == [3, 4, 5, 6, 7]


def test_ttl_has_all_keys_read_again_only_when_a_retention_has_run_out() -> None:
    policy = TTL(seconds=16.0)
    assert not policy.begin(FakeView(now=100.0))
    for used_at in (100.0, 100.1, 100.2):
        policy.key(FakePrefix(program_id="p", used_at=used_at))
    policy.key(FakePrefix(used_at=0.0))
    assert [now for now in range(101, 140) if policy.begin(FakeView(now=float(now)))] == [116]
    late = FakePrefix(program_id="p", used_at=200.0)
    policy.begin(FakeView(now=215.9))
    policy.key(late)
    assert [now for now in (216.0, 216.5, 217.0) if policy.begin(FakeView(now=now))] == [217.0], "not for each single one"
    assert policy.key(late)[0] is False


class Noting(LRU):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self, view: Any) -> bool:
        self.told.append("begin")
        return True

    def on_evict(self, prefix: PrefixView) -> None:
        self.told.append("on_evict")


@pytest.mark.parametrize("wrap", [TTL, WaitingAware])
def test_the_wrapped_policy_is_asked_and_told(wrap: Callable[..., Any]) -> None:
    inner = Noting()
    policy = wrap(within=inner)
    assert policy.parts == (inner,)
    assert policy.begin(FakeView())
    policy.on_evict(FakePrefix())
    assert inner.told == ["begin", "on_evict"]
    assert policy.key(FakePrefix(last_used=3, depth=8)) == (False, (3, -8))


@pytest.mark.parametrize(("make", "cached"), [(LRU, 0), (WaitingAware, 32)])
async def test_waiting_aware_spares_what_the_queue_is_about_to_hit(make: type, cached: int) -> None:
    async with simulation(pages=40, max_rows=1, eviction_policy=make, strict_policies=True) as sim:
        for kind in range(4):  # four prompts of eight pages fill most of the pool; the first is the least recently used
            sim.send(prompt(33, kind), 1)
            await sim.run_out()
        sim.executor.hold()
        sim.send(prompt(61, 7), 1)  # needs sixteen pages, of which eight are free
        again = sim.send(prompt(33, 0), 1)
        await sim.finish()
        assert sim.join_of(again.number)[1].cached == cached


def test_waiting_aware_looks_at_the_first_few_and_not_at_every_step() -> None:
    policy = WaitingAware(look_ahead=2, every_steps=4)
    prefixes = [FakePrefix(last_used=number) for number in range(4)]
    waiting = [FakeRequest(number=number) for number in range(1, 5)]
    paths = {request.number: [prefix] for request, prefix in zip(waiting, prefixes, strict=True)}
    assert not policy.begin(FakeView(step=1, waiting=waiting, paths=paths)), "nothing was wanted before"
    assert order(policy, prefixes) == [prefixes[2], prefixes[3], prefixes[0], prefixes[1]]
    gone = FakeView(step=4, waiting=waiting[2:], paths=paths)
    assert not policy.begin(gone)
    assert order(policy, prefixes) == [prefixes[2], prefixes[3], prefixes[0], prefixes[1]]
    assert policy.begin(FakeView(step=5, waiting=waiting[2:], paths=paths)), "keys have shrunk"
    assert order(policy, prefixes) == [prefixes[0], prefixes[1], prefixes[2], prefixes[3]]
    assert policy.begin(FakeView(step=9))
    assert policy._wanted == {}
