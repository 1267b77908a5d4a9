"""The orders that look at the prefix cache: ``lpm`` and ``dfs-weight``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from asyncsched.errors import ConfigError
from asyncsched.policies._prefixes import Turns
from asyncsched.policies.dfs_weight import DFSWeight
from asyncsched.policies.lpm import LPM
from asyncsched.policy import EngineView, PrefixView, RequestView
from asyncsched.testing.fake_views import FakePrefix, FakeRequest, FakeView, change

from .control_helpers import ONE_LOOP, Simulation, prompt, simulation
from .order_helpers import busy_life, leftovers, numbers

BOTH = pytest.mark.parametrize("make", [LPM, DFSWeight])


class Counted:
    """A view that counts the questions about the cache, by step."""

    def __init__(self, view: Any, asked: dict[tuple[str, int], int]) -> None:
        self._view = view
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        if name in ("cached_prefix", "prefixes", "shared_prefix"):
            key = name, self._view.step
            self._asked[key] = self._asked.get(key, 0) + 1
        return getattr(self._view, name)


def counting(policy: Any) -> dict[tuple[str, int], int]:
    """Have ``policy`` counted: (question, step) → how often it was asked."""
    asked: dict[tuple[str, int], int] = {}
    order = policy.order
    policy.order = lambda waiting, view: order(waiting, Counted(view, asked))
    return asked


async def warm(sim: Simulation, *prompts: list[int]) -> None:
    """Have prompts computed, so that they are cached."""
    for tokens in prompts:
        sim.send(tokens, 1)
    await sim.run_out()
    sim.executor.hold()


# Order


async def test_dfs_weight_serves_branch_by_branch_heaviest_first() -> None:
    async with simulation(policy=DFSWeight(), max_rows=1) as sim:
        one, other = prompt(16, 1), prompt(8, 2)
        await warm(sim, one, other)
        cold = sim.send(prompt(8, 5), 1)
        first = [sim.send([*one, 1], 1), *(sim.send([*other, index], 1) for index in range(2))]
        second = [sim.send([*one, 2], 1), sim.send([*other, 3], 1)]
        await sim.finish()
        assert sim.joined()[2:] == [
            first[1].number, first[2].number, second[1].number,  # three of them hit ``other``, though ``one`` is longer
            first[0].number, second[0].number, cold.number,
        ]  # fmt: skip


async def test_dfs_weight_serves_what_hangs_below_a_run_before_what_ends_with_it() -> None:
    async with simulation(policy=DFSWeight(), max_rows=1) as sim:
        trunk = prompt(8, 1)
        await warm(sim, [*trunk, *prompt(8, 2)], [*trunk, *prompt(8, 3)])
        at_trunk = sim.send([*trunk, 1], 1)
        left = sim.send([*trunk, *prompt(8, 2), 1], 1)
        right = [sim.send([*trunk, *prompt(8, 3), index], 1) for index in range(2)]
        await sim.finish()
        assert sim.joined()[2:] == [right[0].number, right[1].number, left.number, at_trunk.number]


@ONE_LOOP
async def test_dfs_weight_hits_a_small_cache_more_often_than_arrival_order() -> None:
    """What SGLang orders depth first for: one branch after the other, the cache need not hold them all."""
    cached: dict[str, int] = {}
    for name, policy in (("fcfs", "fcfs"), ("dfs", DFSWeight())):
        async with simulation(policy=policy, max_rows=1, pages=12) as sim:
            documents = [prompt(32, index) for index in range(3)]  # 8 pages each
            for index in range(12):
                sim.send([*documents[index % 3], index, index], 2)
            await sim.finish()
            cached[name] = sim.statistics.cached_tokens
    assert cached["fcfs"] == 0
    assert cached["dfs"] == 9 * 32  # all but the first of each document


@pytest.mark.parametrize("seed", range(10))
@ONE_LOOP
async def test_dfs_weight_is_the_order_of_a_walk_over_the_whole_tree(seed: int) -> None:
    random = Random(seed)
    runs: list[list[PrefixView]] = [[]]
    for _ in range(12):
        runs.append([*random.choice(runs), FakePrefix()])
    waiting = [FakeRequest(number=number) for number in range(1, 41)]
    paths = {request.number: random.choice(runs) for request in waiting}

    def walk(at: list[PrefixView]) -> Iterator[int]:
        here = [number for number, path in paths.items() if path[: len(at)] == at]
        below = {
            tuple(map(id, paths[number][: len(at) + 1])): number for number in reversed(here) if len(paths[number]) > len(at)
        }
        children = [paths[number][: len(at) + 1] for number in sorted(below.values())]
        weights = [sum(path[: len(child)] == child for path in paths.values()) for child in children]
        for _, child in sorted(zip(weights, children, strict=True), key=lambda pair: -pair[0]):
            yield from walk(child)
        yield from (number for number in here if paths[number] == at)

    policy = DFSWeight(lookups=100)
    assert numbers(policy, waiting, FakeView(paths=paths)) == list(walk([]))


def test_dfs_weight_follows_the_cache() -> None:
    waiting = [FakeRequest(number=number) for number in range(1, 6)]
    one, other, below = FakePrefix(), FakePrefix(), FakePrefix()
    policy = DFSWeight(refresh_steps=1)
    assert numbers(policy, waiting, FakeView(step=1)) == [1, 2, 3, 4, 5]
    paths: dict[int, list[PrefixView]] = {2: [one], 3: [other], 4: [other], 5: [other, below]}
    assert numbers(policy, waiting, FakeView(step=2, paths=paths)) == [5, 3, 4, 2, 1]
    paths = {2: [one], 3: [one], 4: [one], 5: [other, below]}
    assert numbers(policy, waiting, FakeView(step=3, paths=paths)) == [2, 3, 4, 5, 1], "equally heavy, and looked up first"
    paths = {2: [one], 3: [one], 4: [one], 1: [other]}
    assert numbers(policy, waiting, FakeView(step=4, paths=paths))[-1] == 5
    assert numbers(policy, waiting, FakeView(step=5)) == [1, 2, 3, 4, 5]
    assert policy._root.children == {}


@BOTH
@ONE_LOOP
async def test_without_shared_prefixes_the_order_is_that_of_arrival(make: Any) -> None:
    async with simulation(policy=make(), max_rows=2, chunk_cap=4) as sim:
        for index in range(6):
            sim.send(prompt(9, index), 3)
        await sim.finish()
        assert sim.joined() == [1, 2, 3, 4, 5, 6]


# Few look-ups per step


@BOTH
async def test_a_step_looks_up_no_more_than_allowed(make: Any) -> None:
    policy = make(lookups=3, refresh_steps=1)
    asked = counting(policy)
    async with simulation(policy=policy, max_rows=2, depth=1) as sim:
        for index in range(20):
            sim.send(prompt(9, index % 4), 3)
        await sim.finish()
    looks = [count for (question, _), count in asked.items() if question != "shared_prefix"]
    assert max(looks) == 3
    assert sum(looks) >= 20


@BOTH
def test_every_request_is_looked_up_in_time(make: Any) -> None:
    run = FakePrefix()
    waiting = [FakeRequest(number=number) for number in range(1, 11)]
    policy = make(lookups=3, refresh_steps=2)

    def order(step: int, hot: int) -> list[int]:
        return numbers(policy, waiting, FakeView(step=step, cached={hot: 16}, paths={hot: [run]}))

    assert order(1, 10) == list(range(1, 11)), "the last one's turn has not come"
    order(2, 10)
    order(3, 10)
    assert order(4, 10)[0] == 10
    for step in range(5, 9):
        last = order(step, 5)
    assert last[:2] in ([5, 1], [5, 10])


def test_turns_hold_over_several_calls_in_a_step() -> None:
    """An outer policy may ask class by class."""
    turns = Turns(4, 1)
    low, high = ([FakeRequest(number=number) for number in range(start, start + 5)] for start in (0, 10))
    assert [request.number for request in turns.next(high, 1)] == [10, 11, 12, 13]
    assert turns.next(low, 1) == []
    assert [request.number for request in turns.next(high, 2)] == [14, 0, 1, 2], "new ones first, whoever is asked for"
    assert [request.number for request in turns.next(low, 3)] == [3, 4, 10, 11]


@BOTH
async def test_a_request_that_runs_is_not_looked_up(make: Any) -> None:
    policy = make(refresh_steps=1)
    asked = counting(policy)
    async with simulation(policy=policy, max_rows=4, depth=1) as sim:
        sim.send(prompt(9, 1), 20)
        await sim.settle()
        await sim.step(4)
        sim.send(prompt(9, 2), 2)
        await sim.step(1)
        await sim.finish()
    assert [count for _, count in sorted(asked.items())] == [1, 1]


# Ageing


@pytest.mark.parametrize("age_steps", [4, 12, 10_000])
@BOTH
@ONE_LOOP
async def test_a_cold_request_is_served_after_age_steps(make: Any, age_steps: int) -> None:
    async with simulation(policy=make(age_steps=age_steps, refresh_steps=1), max_rows=1, depth=1) as sim:
        hot = prompt(16, 1)
        await warm(sim, hot)
        for index in range(3):
            sim.send([*hot, index], 2)
        cold = sim.send(prompt(9, 2), 1)
        for index in range(30):
            sim.send([*hot, index, index], 2)
            await sim.step()
        if age_steps > 1000:
            assert cold.number not in sim.joined(), "without ageing this traffic must starve it, or the test shows nothing"
        else:
            assert sim.join_of(cold.number)[0] <= 2 + age_steps + 4 * 2, "aged, and at most four of two steps were in its way"
        await sim.finish()


@BOTH
def test_those_that_have_waited_long_get_every_fourth_admission(make: Any) -> None:
    """In a queue where everybody has: all of them first would be arrival order."""
    policy = make(age_steps=50, lookups=100, defer_tokens=None)
    waiting = [FakeRequest(number=number) for number in range(1, 17)]
    hot = dict.fromkeys(range(9, 17), 16)
    prefix = FakePrefix()
    view = FakeView(step=100, waiting=waiting, cached=hot, paths={number: [prefix] for number in hot})
    for request in waiting:
        policy.on_submit(request)
    assert numbers(policy, waiting, view) == [9, 10, 11, 1, 12, 13, 14, 2, 15, 16, 3, 4, 5, 6, 7, 8]
    young = [FakeRequest(number=number, waiting_since_step=60) for number in range(1, 17)]
    assert numbers(make(age_steps=50, lookups=100), young, view) == [*range(9, 17), *range(1, 9)]


@BOTH
def test_a_preempted_request_counts_as_one_that_has_waited_long(make: Any) -> None:
    policy = make(age_steps=50)
    waiting = [FakeRequest(number=number, waiting_since_step=40) for number in range(1, 7)]
    view = FakeView(step=45, cached=dict.fromkeys(range(2, 7), 16), paths={number: [FakePrefix()] for number in range(2, 7)})
    assert numbers(policy, waiting, view) == [2, 3, 4, 5, 6, 1]
    change(waiting[0], preemptions=1)
    assert numbers(make(age_steps=50), waiting, view) == [2, 3, 4, 1, 5, 6]


# Deferral


async def computed_tokens(policy: Any, **options: Any) -> tuple[int, Simulation]:
    """Prompt tokens computed for two requests that share 40, and an unrelated one behind them."""
    async with simulation(policy=policy, chunk_cap=8, depth=1, **options) as sim:
        sim.send([*prompt(40, 1), 1, 2], 2)
        sim.send([*prompt(40, 1), 3, 4], 2)
        sim.send(prompt(10, 2), 2)
        await sim.finish()
    return sum(size for shape in sim.shapes() for _, _, size in shape), sim


@BOTH
async def test_a_prefix_that_is_being_computed_is_waited_for(make: Any) -> None:
    together, sim = await computed_tokens(make(defer_tokens=None))
    assert sim.join_of(2)[0] == sim.join_of(1)[0]
    apart, sim = await computed_tokens(make(defer_tokens=4))
    assert apart == 42 + 2 + 10, "what is shared is computed once"
    assert together > apart + 20
    assert sim.join_of(3)[0] == 1, "who does not share it does not wait"
    step, join = sim.join_of(2)
    assert (step, join.cached) == (5, 40)


@BOTH
@ONE_LOOP
async def test_only_the_shared_part_is_waited_for(make: Any) -> None:
    async with simulation(policy=make(defer_tokens=4), chunk_cap=8, depth=1) as sim:
        await warm(sim, prompt(16, 1))
        start = len(sim.plans)
        sim.send([*prompt(32, 1), *prompt(60, 2)], 2)
        follower = sim.send([*prompt(32, 1), *prompt(60, 3)], 2)
        await sim.finish()
        step, join = sim.join_of(follower.number)
        assert join.cached == 32
        assert step <= start + 3, "16 tokens are cached, two chunks compute the next 16; the other 60 are not shared"


@BOTH
@ONE_LOOP
async def test_the_others_go_on_when_the_first_ends(make: Any) -> None:
    policy = make(defer_tokens=4)
    async with simulation(policy=policy, chunk_cap=8, depth=1) as sim:
        first = sim.send([*prompt(40, 1), 1], 2)
        second = sim.send([*prompt(40, 1), 2], 2)
        await sim.settle()
        assert sim.joined() == [1]
        sim.engine.abort(first.stream.request_id)
        await sim.step()
        assert sim.joined() == [1, second.number]
        await sim.finish()
    assert leftovers(policy) == {}


@BOTH
def test_an_aged_request_is_not_held_back(make: Any) -> None:
    """Its turn comes, though what it shares with the one that is computed is not there yet."""
    policy = make(age_steps=50, defer_tokens=4)
    leader = FakeRequest(number=1, prompt_tokens=40, prefill_left=30, own_pages=3)
    held, *others = [FakeRequest(number=number, prompt_tokens=40) for number in range(2, 8)]
    change(leader, own_pages=0, prefill_left=40)
    view = FakeView(step=10, shared={(1, 2): 40})
    assert next(iter(policy.order([leader, held, *others], view))) is leader
    change(leader, own_pages=3, prefill_left=30)  # it has a row
    change(view, step=11)
    assert numbers(policy, [held, *others], view) == [3, 4, 5, 6, 7]
    change(view, step=100)
    assert numbers(policy, [held, *others], view)[:4] == [3, 4, 2, 5], "one was admitted before: it is every fourth"


@BOTH
async def test_a_crowd_of_duplicates_is_compared_a_few_at_a_time(make: Any) -> None:
    policy = make(defer_tokens=4, lookups=2)
    asked = counting(policy)
    async with simulation(policy=policy, chunk_cap=4, depth=1, max_rows=8) as sim:
        for index in range(12):
            sim.send([*prompt(40, 1), index], 1)
        await sim.finish()
        compared = [count for (question, _), count in asked.items() if question == "shared_prefix"]
        assert max(compared) == 2
        assert [join.cached for plan in sim.plans for join in plan.joins] == [0] + [40] * 11


@BOTH
@ONE_LOOP
async def test_an_order_that_is_pulled_to_its_end_at_once_defers_from_the_next_step_on(make: Any) -> None:
    """As an outer policy may do; then the one to wait for has not been placed yet."""
    inner = make(defer_tokens=4)

    class Eager:
        parts = (inner,)

        def order(self, waiting: Sequence[RequestView], view: EngineView) -> list[RequestView]:
            return list(inner.order(waiting, view))

    async with simulation(policy=Eager(), chunk_cap=8, depth=1) as sim:
        sim.send([*prompt(40, 1), 1], 2)
        await sim.settle()
        late = sim.send([*prompt(40, 1), 2], 2)
        await sim.step()
        assert late.number not in sim.joined()
        await sim.finish()
        assert sim.join_of(late.number)[1].cached == 40
    assert leftovers(inner) == {}


async def test_the_view_tells_what_two_requests_share() -> None:
    shared: dict[tuple[int, int], int] = {}

    class Asking:
        def order(self, waiting: Sequence[RequestView], view: EngineView) -> Sequence[RequestView]:
            everybody = [*view.running, *waiting]
            shared.clear()
            shared.update(((a.number, b.number), view.shared_prefix(a, b)) for a in everybody for b in everybody)
            return [request for request in waiting if request.priority]

    async with simulation(policy=Asking(), chunk_cap=4, depth=1, strict_policies=True) as sim:
        same = prompt(10, 1)
        sim.send(same, 4, priority=1)  # runs
        sim.send([*same, 1, 2], 4)
        sim.send(same[:7], 4)
        sim.send(same, 4, cache_salt="another")
        sim.send(same, 4, prompt_logprobs=1)
        sim.send([*same[:5], 999, *same[6:]], 4)
        await sim.settle()
        await sim.step()
        assert [shared[1, other] for other in (1, 2, 3, 4, 5, 6)] == [10, 10, 7, 0, 0, 5]
        assert all(shared[b, a] == tokens for (a, b), tokens in shared.items())
        await sim.step(3)
        assert shared[1, 2] == 0, "its prompt is computed: what it shares is in the cache"
        assert shared[2, 6] == 5
        await sim.finish()


# Options, state


@pytest.mark.parametrize(
    "options",
    [{"age_steps": 0}, {"refresh_steps": 0}, {"lookups": 0}, {"defer_tokens": 0}],
    ids=lambda options: next(iter(options)),
)
@BOTH
def test_impossible_options_are_refused(make: Any, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"^{make.name}: .*{next(iter(options))}.*at least 1"):
        make(**options)


@BOTH
@pytest.mark.parametrize("pages", [64, 12])
@ONE_LOOP
async def test_nothing_is_kept_of_requests_that_have_ended(make: Any, pages: int) -> None:
    policy = make(refresh_steps=1)
    options: dict[str, Any] = {"reserve": "expected"} if pages < 64 else {}
    async with simulation(policy=policy, max_rows=3, pages=pages, chunk_cap=4, strict_policies=True, **options) as sim:
        await busy_life(sim)
    assert leftovers(policy) == {}
