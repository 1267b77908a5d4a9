"""The policy surface: what each hook can bring about in a real engine, who is asked, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from asyncsched.policy import EngineView, PrefillBudget, RequestView

from .control_helpers import ONE_LOOP, prompt, simulation, traffic
from .policy_helpers import (
    KINDS,
    SCARCE,
    Alone,
    Arrival,
    Budget,
    Everything,
    Told,
    Urgent,
    Victims,
    Waiting,
    has_row,
    prompts_of,
)

# Budgets without decode


@pytest.mark.parametrize("depth", [0, 1, 2])
@ONE_LOOP
async def test_prompts_are_computed_without_the_rows_that_decode(depth: int) -> None:
    async with simulation(budget_policy=Alone(), token_budget=16, depth=depth) as sim:
        for index in range(2):
            sim.send(prompt(4, index), 30)
        await sim.settle()
        await sim.step(5)
        start = len(sim.plans)
        sim.send(prompt(40, 5), 3)
        await sim.finish()
        plans = sim.plans[start:]
        assert [prompts_of(plan) for plan in plans if plan.prefill] == [16, 16, 8], (
            "the decoding rows' share is free for prompts"
        )
        assert all(plan.decode == (not plan.prefill) for plan in sim.plans)


@ONE_LOOP
async def test_rows_decode_when_no_prompt_can_be_computed() -> None:
    """Prompts wait all the time, but for a row: the budget without decode must not stop the one that runs."""
    async with simulation(budget_policy=Alone(), max_rows=1) as sim:
        for index in range(3):
            sim.send(prompt(4, index), 6)
        await sim.finish()
        assert [bool(plan.prefill) for plan in sim.plans].count(True) == 3
        assert len(sim.plans) == 3 * 6


@pytest.mark.parametrize("chunked", [True, False])
@ONE_LOOP
async def test_a_budget_without_decode_and_too_few_pages(chunked: bool) -> None:
    """Rows that are left out of a step still get their pages, and lose their rows, as ever."""
    options: dict[str, Any] = {"reserve": "prompt", "pages": 24, "max_rows": 4, "chunked_prefill": chunked}
    async with simulation(budget_policy=Alone(), token_budget=16, **options) as sim:
        for index in range(10):
            sim.send(prompt(6 + 3 * index, index), 24, seed=index)
        await sim.finish()
        assert sim.statistics.preemptions
        assert any(plan.prefill and not plan.decode for plan in sim.plans)


# Preemption for arrivals


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("reserve", ["full", "expected", "prompt"])
@ONE_LOOP
async def test_an_arrival_may_take_a_row(depth: int, reserve: str) -> None:
    """The latest of the lower class gives way, and ends later with the same tokens as undisturbed."""
    policy = Urgent()
    async with simulation(policy=policy, max_rows=2, depth=depth, reserve=reserve) as sim:
        for index in range(2):
            sim.send(prompt(8, index), 20, seed=index, priority=5)
        await sim.settle()
        await sim.step(5)
        sim.send(prompt(8, 3), 4, seed=3, priority=0)
        await sim.finish()
        assert sim.joined() == [1, 2, 3, 2]
        assert sim.statistics.preemptions == 1
        assert sim.statistics.policy_faults == {}
        assert policy.asked[0] == 3


@pytest.mark.parametrize("reserve", ["full", "prompt"])
@ONE_LOOP
async def test_an_arrival_may_take_pages(reserve: str) -> None:
    """Rows are free, pages are not: 14 of 16 are in use or promised, and the arrival needs more than two."""
    size = 20 if reserve == "full" else 9
    async with simulation(policy=Urgent(), pages=16, reserve=reserve) as sim:
        low = [sim.send(prompt(8 if reserve == "full" else 27, index), size, seed=index, priority=5) for index in range(2)]
        await sim.settle()
        await sim.step(2)
        high = sim.send(prompt(14, 5), 3, seed=5)
        await sim.settle()
        await sim.step(3)
        assert has_row(sim, high) or high.stream.finish_reason
        assert [has_row(sim, sent) for sent in low] == [True, False]
        await sim.finish()


@ONE_LOOP
async def test_a_request_may_lose_its_row_in_the_middle_of_its_prompt() -> None:
    async with simulation(policy=Urgent(), max_rows=1, token_budget=8, depth=1) as sim:
        sim.send(prompt(60, 1), 3, priority=5)
        await sim.settle()
        await sim.step(2)
        sim.send(prompt(8, 2), 2)
        await sim.finish()
        assert sim.joined() == [1, 2, 1]
        first, again = (join for plan in sim.plans for join in plan.joins if join.number == 1)
        assert first.cached == 0
        assert again.cached > 0, "what was computed is still cached, so it is not computed twice"


@ONE_LOOP
async def test_nobody_loses_anything_if_all_named_victims_would_not_be_enough() -> None:
    async with simulation(policy=Urgent(), pages=16) as sim:
        sim.send(prompt(8, 1), 20, seed=1, priority=0)  # 7 pages, and of the same class as the one to come
        low = sim.send(prompt(8, 2), 20, seed=2, priority=5)  # 7 pages
        await sim.settle()
        high = sim.send(prompt(37, 5), 4, seed=5)  # 10 pages: two are free, seven could be
        for _ in range(6):
            await sim.step()
            assert has_row(sim, low)
            assert not has_row(sim, high)
        assert sim.statistics.preemptions == 0
        await sim.finish()


@ONE_LOOP
async def test_nobody_loses_its_row_for_pages_that_it_shares_with_others() -> None:
    """The victim's pages would be enough if they were its own; but most of them are another's, too, and stay in use."""
    async with simulation(policy=Urgent(), pages=20) as sim:
        shared = prompt(40, 1)
        sim.send([*shared, 1, 2, 3], 10, seed=1, priority=0)  # 13 pages
        await sim.settle()
        await sim.step(2)
        low = sim.send([*shared, 4, 5, 6], 10, seed=2, priority=5)  # 3 more, 10 of the other's
        await sim.settle()
        await sim.step(1)
        assert sim.statistics.free_pages == 4
        high = sim.send(prompt(28, 5), 5, seed=5)  # 8 pages: 4 are free and 3 could be
        await sim.settle()
        for _ in range(3):
            assert has_row(sim, low)
            assert not has_row(sim, high)
            await sim.step()
        await sim.finish()


@ONE_LOOP
async def test_a_prefix_that_an_arrival_shares_with_its_victim_is_no_room_for_it() -> None:
    """Were the victim gone, the prefix would be unused; but the arrival itself needs it and cannot have it evicted."""
    async with simulation(policy=Urgent(), pages=20) as sim:
        shared = prompt(40, 1)
        sim.send(prompt(8, 2), 12, seed=1)  # 5 pages
        low = sim.send([*shared, 1, 2, 3], 10, seed=2, priority=5)  # 13 pages, ten of them the prefix's
        await sim.settle()
        await sim.step(2)
        high = sim.send([*shared, *prompt(14, 3)], 10, seed=3)  # 16 pages: more than all but the first one's five
        await sim.settle()
        for _ in range(3):
            assert has_row(sim, low)
            assert not has_row(sim, high)
            await sim.step()
        await sim.finish()


@ONE_LOOP
async def test_an_arrival_may_take_a_row_together_with_its_pages() -> None:
    async with simulation(policy=Urgent(), pages=16, max_rows=2) as sim:
        low = [sim.send(prompt(8, index), 20, seed=index, priority=5) for index in range(2)]  # 7 pages each
        await sim.settle()
        await sim.step(2)
        high = sim.send(prompt(30, 5), 5, seed=5)  # 9 pages: those of the latest, and the two that are free
        await sim.settle()
        await sim.step(3)
        assert has_row(sim, high)
        assert [has_row(sim, sent) for sent in low] == [True, False]
        await sim.finish()


@ONE_LOOP
async def test_no_more_victims_are_taken_than_needed() -> None:
    async with simulation(policy=Urgent(), pages=24) as sim:
        low = [sim.send(prompt(8, index), 20, seed=index, priority=5) for index in range(3)]  # 7 pages each
        await sim.settle()
        await sim.step(2)
        high = sim.send(prompt(40, 7), 5, seed=7)  # 11 pages: three are free, so it takes two victims
        await sim.settle()
        await sim.step(3)
        assert has_row(sim, high)
        assert [has_row(sim, sent) for sent in low] == [True, False, False]
        assert sim.statistics.preemptions == 2
        await sim.finish()


@pytest.mark.parametrize("most", [0, 1, 2])
@ONE_LOOP
async def test_who_was_preempted_often_enough_keeps_its_row(most: int) -> None:
    async with simulation(policy=Urgent(), max_rows=1, max_preemptions=most) as sim:
        low = sim.send(prompt(8, 1), 40, priority=5)
        for index in range(4):
            await sim.settle()
            while not has_row(sim, low):
                await sim.step()
            await sim.step(2)
            sim.send(prompt(8, 2 + index), 2, seed=index)
            await sim.settle()
            await sim.step(2)
        assert sim.statistics.preemptions == most
        await sim.finish()
        assert sim.joined().count(1) == most + 1


@ONE_LOOP
async def test_a_protected_victim_is_passed_over_for_the_next_named() -> None:
    """Two of a lower class; the one named first has lost its row already as often as it may."""

    class First(Urgent):
        def preempt_for(self, request: RequestView, running: Waiting, view: EngineView) -> Iterable[RequestView]:
            return sorted(super().preempt_for(request, running, view), key=lambda other: other.number)

    async with simulation(policy=First(), max_rows=2, max_preemptions=1) as sim:
        for index in range(2):
            sim.send(prompt(8, index), 40, seed=index, priority=5)
        for index in range(2):
            await sim.settle()
            await sim.step(6)
            sim.send(prompt(8, 5 + index), 2, seed=index)
        await sim.settle()
        await sim.step(3)
        await sim.finish()
        assert sim.joined() == [1, 2, 3, 1, 4, 2]


@ONE_LOOP
async def test_the_policy_is_asked_for_victims_only_when_the_first_does_not_fit() -> None:
    policy = Urgent()
    async with simulation(policy=policy, max_rows=2) as sim:
        sim.send(prompt(8, 1), 8, priority=5)
        await sim.settle()
        await sim.step(2)
        sim.send(prompt(8, 2), 8, priority=1)
        await sim.settle()
        await sim.step(1)
        assert policy.asked == [], "a row was free"
        sim.send(prompt(8, 3), 2, priority=7)
        sim.send(prompt(8, 4), 2, priority=6)
        await sim.settle()
        await sim.step(2)
        assert set(policy.asked) == {4}, "only the first of the order counts"
        assert sim.statistics.preemptions == 0, "no victims, no row"
        assert len(policy.orders) == len(set(policy.orders)), "and the order is asked for once per step"
        await sim.finish()
        assert sim.statistics.policy_faults == {}


@ONE_LOOP
async def test_without_preempt_for_no_order_is_asked_for_while_no_row_is_free() -> None:
    class Counting(Arrival):
        orders = 0

        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            self.orders += 1
            return waiting

    policy = Counting()
    async with simulation(policy=policy, max_rows=1) as sim:
        for index in range(3):
            sim.send(prompt(4, index), 20)
        await sim.settle()
        await sim.step(10)
        assert policy.orders == 1
        await sim.finish()


def one_then_nonsense(running: Waiting) -> Iterator[Any]:
    yield running[-1]
    yield object()


@pytest.mark.parametrize(
    ("answer", "preempted"),
    [
        (lambda running: 1 / 0, 0),
        (lambda running: None, 0),
        (lambda running: 5, 0),
        (lambda running: [object()], 0),
        (lambda running: [running[0].number], 0),
        (lambda running: [running[-1], running[-1]], 1),
        (one_then_nonsense, 1),
    ],
    ids=["raises", "none", "number", "foreign", "numbers", "twice", "one-then-nonsense"],
)
@ONE_LOOP
async def test_impossible_victims_for_an_arrival_are_a_fault(answer: Callable[[Waiting], Any], preempted: int) -> None:
    """What was named before the mistake counts, as with the other hooks."""

    class Broken(Urgent):
        def preempt_for(self, request: RequestView, running: Waiting, view: EngineView) -> Any:
            return answer(running) if request.priority == 0 else ()

    async with simulation(policy=Broken(), max_rows=2) as sim:
        for index in range(2):
            sim.send(prompt(4, index), 12, seed=index, priority=5)
        await sim.settle()
        await sim.step(2)
        sim.send(prompt(4, 3), 2, seed=3)
        await sim.settle()
        await sim.step(2)
        assert sim.statistics.preemptions == preempted
        assert sim.statistics.policy_faults["preempt_for"] >= 1
        await sim.finish()


@pytest.mark.parametrize("seed", range(6))
@ONE_LOOP
async def test_busy_traffic_with_preemption_for_arrivals(seed: int) -> None:
    """Collisions, aborts and stops while rows change hands: every answer must be the oracle's."""

    class Eager(Urgent):
        """Sometimes lets an arrival take anybody's row; a function of what it sees, as policies must be."""

        def preempt_for(self, request: RequestView, running: Waiting, view: EngineView) -> Iterable[RequestView]:
            return [other for other in running if (other.number * 7 + request.number + view.step) % 3 == 0]

    options: dict[str, Any] = {"reserve": ["full", "expected", "prompt"][seed % 3], "depth": 1 + seed % 3}
    async with simulation(policy=Eager(), pages=26, max_rows=4, token_budget=24, chunk_cap=10, **options) as sim:
        await traffic(sim, seed, requests=40)
        await sim.finish()
        assert sim.statistics.preemptions
        assert sim.statistics.policy_faults == {}


# Slots


class Opinionated(Arrival):
    """A scheduling policy with budget and victims of its own."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def budget(self, view: EngineView) -> PrefillBudget:
        self.asked.append("budget")
        return PrefillBudget(6, 6)

    def victims(self, running: Waiting, pages: int, view: EngineView) -> Iterable[RequestView]:
        self.asked.append("victims")
        return running


@pytest.mark.parametrize("own", [True, False])
@ONE_LOOP
async def test_a_budget_policy_goes_before_the_scheduling_policys_budget(own: bool) -> None:
    policy = Opinionated()
    async with simulation(policy=policy, budget_policy=Budget() if own else None) as sim:
        sim.send(prompt(18, 1), 2)
        await sim.finish()
        assert [prompts_of(plan) for plan in sim.plans if plan.prefill] == ([9, 9] if own else [6, 6, 6])
        assert ("budget" in policy.asked) is not own


@pytest.mark.parametrize("own", [True, False])
@ONE_LOOP
async def test_a_preemption_policy_goes_before_the_scheduling_policys_victims(own: bool) -> None:
    policy, preemption = Opinionated(), Victims()
    async with simulation(policy=policy, preemption_policy=preemption if own else None, **SCARCE) as sim:
        for index in range(3):
            sim.send(prompt(8, index), 24, seed=index)
        await sim.finish()
        assert sim.statistics.preemptions
        assert ("victims" in policy.asked) is not own
        assert bool(preemption.asked) is own
        assert 1 not in [join.number for plan in sim.plans[1:] for join in plan.joins] or not own


async def test_one_object_in_every_slot_is_told_everything_once() -> None:
    policy = Everything()
    slots: dict[str, Any] = dict.fromkeys(KINDS, policy)
    async with simulation(**slots) as sim:
        for index in range(3):
            sim.send(prompt(4, index), 2)
        await sim.finish()
        assert policy.submitted == [1, 2, 3]
        assert sorted(policy.finished) == [1, 2, 3]
        assert policy.steps == len(sim.plans)


@pytest.mark.parametrize("kind", KINDS)
@ONE_LOOP
async def test_policies_of_every_kind_are_told(kind: str) -> None:
    policy = Everything()
    slot: dict[str, Any] = {kind: policy}
    async with simulation(**slot) as sim:
        sim.send(prompt(4), 2)
        await sim.finish()
        assert (policy.submitted, policy.steps, policy.finished) == ([1], 2, [1])


# Parts


class Part(Told):
    """Has no hook that decides: a part need not be able to stand alone."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = parts
        self.ran = False

    async def annotate(self, request: RequestView) -> dict[str, Any]:
        return {f"part {id(self)}": True}

    async def run(self, view: EngineView) -> None:
        self.ran = True


async def test_parts_are_told_run_and_asked_for_hints_however_deep() -> None:
    deep = Part()
    shared = Part(deep)

    class Outer(Part, Arrival):
        pass

    policy = Outer(shared, Part(shared, deep))
    parts = [policy, shared, deep, policy.parts[1]]
    async with simulation(policy=policy, admission_policy=None) as sim:
        for index in range(3):
            sim.send(prompt(4, index), 2)
        await sim.finish()
        for part in parts:
            assert sorted(part.submitted) == sorted(part.finished) == [1, 2, 3]
            assert part.steps == len(sim.plans)
            assert part.ran
            assert sim.sent[0].stream._submission.requests[0].hints[f"part {id(part)}"] is True


# Prefixes


async def test_policies_see_the_cached_runs_that_a_request_would_hit() -> None:
    seen: dict[int, list[tuple[Any, ...]]] = {}
    kept: list[RequestView] = []

    class Looking(Arrival):
        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            for request in waiting:
                runs = view.prefixes(request)
                seen[request.number] = [(run.tokens, run.depth, run.tenant, run.program_id, run.priority) for run in runs]
                assert sum(run.tokens for run in runs) >= view.cached_prefix(request)
                assert all(run.created <= run.last_used <= view.step and run.used_at <= view.now for run in runs)
                hits.append([run.hits for run in runs])
            kept.extend(waiting)
            views.append(view)
            return waiting

    hits: list[list[int]] = []
    views: list[EngineView] = []
    async with simulation(policy=Looking(), max_rows=1) as sim:
        base = prompt(8, 1)
        sim.send([*base, *prompt(8, 2)], 1, tenant="a", program_id="p", priority=3)
        await sim.run_out()
        sim.send([*base, *prompt(8, 3)], 1, tenant="b")
        await sim.run_out()
        sim.send([*base, *prompt(8, 2), 5], 1, tenant="c")
        await sim.run_out()
        sim.send([*base, *prompt(4, 3), 7, 8], 1)
        await sim.run_out()
        sim.send(prompt(9, 4), 1)
        await sim.run_out()
        assert seen[1] == []
        assert seen[2] == [(16, 16, "a", "p", 3)], "a run is whole until somebody leaves it in the middle"
        assert seen[3] == [(8, 8, "b", None, 0), (8, 16, "a", "p", 3)]
        assert seen[4] == [(8, 8, "c", None, 0), (8, 16, "b", None, 0)], "the last one is hit in part"
        assert seen[5] == []
        assert hits == [[], [0], [1, 0], [2, 0], []]
        assert list(views[0].prefixes(kept[0])) == [], "one that does not wait would hit nothing"
        await sim.finish()


async def test_prefixes_of_another_salt_are_not_seen() -> None:
    seen: list[int] = []

    class Looking(Arrival):
        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            seen.extend(len(view.prefixes(request)) for request in waiting)
            return waiting

    async with simulation(policy=Looking()) as sim:
        for salt in ("x", "x", "y"):
            sim.send(prompt(9, 1), 1, cache_salt=salt)
            await sim.run_out()
        assert seen == [0, 1, 0]
        await sim.finish()
