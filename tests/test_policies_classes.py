"""Orders by class, by deadline, by slack and by level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncsched.cost import LinearCost
from asyncsched.errors import ConfigError, PolicyLoadError
from asyncsched.policies._rota import Rota
from asyncsched.policies.edf import EDF
from asyncsched.policies.fcfs import FCFS
from asyncsched.policies.least_slack import LeastSlack
from asyncsched.policies.mlfq import MLFQ
from asyncsched.policies.priority import Priority
from asyncsched.policy import EngineView, RequestView, StepReport
from asyncsched.testing.fake_views import FakeRequest, FakeView

from .control_helpers import ONE_LOOP, Simulation, prompt, simulation
from .test_policies import Listener, preempted

SECOND = LinearCost(fixed=1.0, per_decode_row=0.0, per_context_token=0.0, per_prefill_token=0.0)
"""Every step takes a second, whatever is in it."""


def classes(**options: Any) -> Priority:
    """A policy made without looking for its inner one among the installed ones, which would block the loop."""
    return Priority(**{"within": FCFS(), **options})


def numbers(policy: Any, waiting: Sequence[RequestView], view: EngineView) -> list[int]:
    """A policy's order, by number."""
    return [request.number for request in policy.order(waiting, view)]


async def joined(policy: Any, requests: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """The order in which an engine with one row admits requests that come together; the first is there already."""
    async with simulation(policy=policy, max_rows=1, strict_policies=True, **options) as sim:
        sim.send(prompt(4, 50), 2)
        await sim.settle()
        for index, attributes in enumerate(requests):
            sim.send(**{"prompt": prompt(4, index), "max_tokens": 2, **attributes})
        await sim.finish()
        return [number - 1 for number in sim.joined()[1:]]


def report(step: int = 1, prefill: dict[int, int] | None = None, sampled: Sequence[int] = ()) -> StepReport:
    """A step that served somebody."""
    return StepReport(step, 0.02, prefill or {}, sampled, {})


# Options


@pytest.mark.parametrize(
    "make",
    [
        lambda: Priority(age_steps=-1),
        lambda: EDF(age_steps=0),
        lambda: LeastSlack(age_steps=0),
        lambda: MLFQ(quantum=0),
        lambda: MLFQ(levels=0),
        lambda: MLFQ(growth=1.0),
        lambda: MLFQ(output_weight=float("nan")),
        lambda: MLFQ(gap=-1),
        lambda: MLFQ(age_steps=0),
    ],
)
def test_impossible_options_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"(priority|edf|least-slack|mlfq): .* must be (at least|above)"):
        make()


def test_an_inner_policy_must_order() -> None:
    with pytest.raises(PolicyLoadError, match="has no method order"):
        Priority(within="lru")


# Priority


async def test_classes_are_strict_and_arrival_decides_within() -> None:
    requests: list[dict[str, Any]] = [{"priority": priority} for priority in (2, 0, -1, 2, 0)]
    assert await joined(classes(), requests) == [3, 2, 5, 1, 4]


@ONE_LOOP
async def test_another_policy_may_decide_within_a_class() -> None:
    class Backwards(Listener):
        def order(self, waiting: Sequence[RequestView], view: EngineView) -> list[RequestView]:
            return list(reversed(waiting))

    inner = Backwards()
    assert await joined(Priority(within=inner), [{"priority": priority} for priority in (1, 0, 1, 0, 1)]) == [4, 2, 5, 3, 1]
    assert len(inner.submitted) == len(inner.finished) == 6, "the inner policy is told, too"


def test_waiting_is_worth_classes() -> None:
    policy = Priority(age_steps=10)
    old = FakeRequest(number=1, priority=2, waiting_since_step=1)
    assert numbers(policy, [old, FakeRequest(number=2, priority=1, waiting_since_step=10)], FakeView(step=10)) == [2, 1]
    assert numbers(policy, [old, FakeRequest(number=3, priority=1, waiting_since_step=11)], FakeView(step=11)) == [1, 3]
    assert numbers(policy, [old, FakeRequest(number=4, priority=0, waiting_since_step=20)], FakeView(step=20)) == [4, 1]
    assert numbers(policy, [old, FakeRequest(number=5, priority=0, waiting_since_step=21)], FakeView(step=21)) == [1, 5]
    assert numbers(Priority(age_steps=0), [old, FakeRequest(number=6)], FakeView(step=10**6)) == [6, 1]


@pytest.mark.parametrize("age_steps", [4, 8, 0])
@ONE_LOOP
async def test_a_low_class_is_served_in_time(age_steps: int) -> None:
    """The highest class never pauses; three classes below one waits no longer than three times ``age_steps``."""
    async with simulation(policy=classes(age_steps=age_steps), max_rows=1, depth=1) as sim:
        sim.send(prompt(4, 50), 2)
        await sim.settle()
        low = sim.send(prompt(4, 51), 2, priority=3)
        for index in range(20):
            sim.send(prompt(4, index), 2)
            await sim.step(2)
        if age_steps:
            assert sim.join_of(low.number)[0] <= 2 + 3 * age_steps + 2, "aged, and one of two steps in its way"
        else:
            assert low.number not in sim.joined(), "without ageing it must starve, or the test shows nothing"
        await sim.finish()


def test_only_without_ageing_starvation_is_waived() -> None:
    assert not hasattr(Priority(), "starvation")
    assert getattr(Priority(age_steps=0), "starvation", "").startswith("waived: ")


@pytest.mark.parametrize("preempt", [True, False])
async def test_a_higher_class_takes_the_row_of_the_lowest_admitted_last(preempt: bool) -> None:
    async with simulation(policy=classes(preempt=preempt), max_rows=4, depth=1, strict_policies=True) as sim:
        for index, priority in enumerate((1, 3, 3, 2)):
            sim.send(prompt(4, index), 30, priority=priority)
            await sim.step()
        urgent = sim.send(prompt(4, 8), 2, priority=1)
        await sim.step(2)
        assert (urgent.number in sim.joined()) is preempt
        await sim.finish()
        assert preempted(sim) == ([3] if preempt else [])


def test_what_was_earned_by_waiting_keeps_the_row() -> None:
    """Else newcomers of a higher class would take it at once, and it would have to wait as long again."""
    policy = classes(preempt=True, age_steps=10)
    low = FakeRequest(number=1, priority=2, waiting_since_step=1)
    high = FakeRequest(number=2, priority=1, waiting_since_step=9)
    assert numbers(policy, [low, high], FakeView(step=10)) == [2, 1]
    assert list(policy.preempt_for(high, [low], FakeView(step=10))) == [low]
    assert numbers(policy, [low, high], FakeView(step=11)) == [1, 2]
    assert list(policy.preempt_for(high, [low], FakeView(step=12))) == []
    assert list(policy.preempt_for(low, [high], FakeView(step=12))) == [], "but it takes no row of another"


@ONE_LOOP
async def test_equals_never_take_each_others_rows() -> None:
    """Nor does what was gained by waiting count: else two could take the row from each other in turn."""
    async with simulation(policy=classes(preempt=True, age_steps=1), max_rows=1, depth=1) as sim:
        sim.send(prompt(4, 1), 20, priority=1)
        await sim.settle()
        sim.send(prompt(4, 2), 2, priority=1)
        sim.send(prompt(4, 3), 2, priority=2)
        await sim.finish()
        assert sim.statistics.preemptions == 0


def test_without_preemption_there_is_no_such_hook() -> None:
    """With it the engine would ask for the order in full steps, too."""
    assert not hasattr(Priority(), "preempt_for")


@ONE_LOOP
async def test_the_lowest_class_gives_way_when_pages_run_out() -> None:
    options: dict[str, Any] = {"reserve": "expected", "pages": 21, "max_rows": 3, "max_preemptions": 100}
    async with simulation(policy=classes(), strict_policies=True, **options) as sim:
        for index, priority in enumerate((1, 2, 0)):
            sim.send(prompt(8, index), 24, seed=index, priority=priority)
            await sim.step()
        assert sim.joined() == [1, 2, 3]
        await sim.finish()
        assert preempted(sim)[0] == 2
        assert 3 not in preempted(sim)


# Deadlines


@pytest.mark.parametrize("policy", ["edf", "least-slack"])
async def test_the_most_urgent_goes_first_and_those_without_a_target_by_arrival(policy: str) -> None:
    requests: list[dict[str, Any]] = [
        {},
        {"deadline": 5000.0},
        {"ttft_target": 4000.0},
        {},
        {"deadline": 3000.0},
        {"deadline": 9000.0, "ttft_target": 1000.0},
        {"deadline": 2000.0, "ttft_target": 6000.0},
    ]
    assert await joined({"edf": EDF, "least-slack": LeastSlack}[policy](), requests) == [6, 7, 5, 3, 2, 1, 4]


@pytest.mark.parametrize("make", [EDF, LeastSlack])
def test_a_target_for_the_first_token_ends_with_it(make: Callable[[], Any]) -> None:
    """One that was preempted after its first token has only its deadline."""
    waiting = [
        FakeRequest(number=1, ttft_target=10.0, deadline=900.0, generated_tokens=3, preemptions=1),
        FakeRequest(number=2, deadline=500.0),
    ]
    assert numbers(make(), waiting, FakeView()) == [2, 1]


@pytest.mark.parametrize("make", [EDF, LeastSlack])
def test_one_that_comes_back_is_judged_anew(make: Callable[[], Any]) -> None:
    """At once, not when it would have been its turn to be looked at again."""
    policy = make()
    others = [FakeRequest(number=n, deadline=1000.0) for n in range(1, 70)]
    first = FakeRequest(number=99, ttft_target=100.0)
    assert numbers(policy, [*others, first], FakeView(step=1))[0] == 99
    assert numbers(policy, others, FakeView(step=2))[0] == 1
    back = FakeRequest(number=99, ttft_target=100.0, generated_tokens=2)
    assert numbers(policy, [*others, back], FakeView(step=3))[-1] == 99


def in_time(policy: Any, requests: Sequence[FakeRequest]) -> int:
    """How many of them a machine that serves one at a time finishes in time; a step takes a second."""
    now, step, done, left = 0.0, 0, 0, list(requests)
    while left:
        waiting = [request for request in left if request.arrived_at <= now]
        if not waiting:
            now = min(request.arrived_at for request in left)
            continue
        step += 1
        chosen = next(iter(policy.order(waiting, FakeView(step=step, now=now, waiting=waiting, cost=SECOND))))
        now += chosen.max_tokens + 1
        left.remove(chosen)
        assert chosen.deadline is not None
        done += now <= chosen.deadline
    return done


def test_earliest_deadline_first_meets_what_can_be_met() -> None:
    """Deadlines against arrival order: met by this order, not by arrival."""
    requests = [FakeRequest(number=n, max_tokens=4, deadline=100.0 - 5 * n + 6) for n in range(1, 20)]
    assert in_time(EDF(), requests) == 19
    assert sum(5 * n <= (request.deadline or 0) for n, request in enumerate(requests, 1)) < 12, "by arrival"


@pytest.mark.parametrize("make", [EDF, LeastSlack])
def test_overload_does_not_make_everyone_late(make: Callable[..., Any]) -> None:
    """Twice as much comes as can be served: about half are in time. Without the forecast hardly any."""
    requests = [
        FakeRequest(number=n, max_tokens=9, prompt_tokens=1, arrived_at=5.0 * n, deadline=5.0 * n + 35.0) for n in range(60)
    ]
    assert in_time(make(), requests) >= 25
    assert in_time(make(feasibility=False), requests) <= 12


@pytest.mark.parametrize("make", [EDF, LeastSlack])
def test_what_would_be_late_goes_behind_everybody_else(make: Callable[..., Any]) -> None:
    waiting = [
        FakeRequest(number=1, deadline=5.0),  # 16 output tokens take 16 s
        FakeRequest(number=2, ttft_target=0.5),  # the first token takes a second
        FakeRequest(number=3),
        FakeRequest(number=4, deadline=50.0),
    ]
    view = FakeView(cost=SECOND)
    assert numbers(make(), waiting, view) == [4, 3, 1, 2]
    assert numbers(make(feasibility=False), waiting, view) == ([2, 1, 4, 3] if make is EDF else [1, 2, 4, 3])


@pytest.mark.parametrize("make", [EDF, LeastSlack])
def test_nobody_is_late_while_the_cost_model_has_seen_nothing(make: Callable[..., Any]) -> None:
    waiting = [FakeRequest(number=1, deadline=2.0), FakeRequest(number=2, deadline=1.0)]
    assert numbers(make(), waiting, FakeView(cost=LinearCost(0.0, 0.0, 0.0, 0.0))) == [2, 1]


@pytest.mark.parametrize("make", [EDF, LeastSlack])
def test_the_forecast_leaves_out_what_is_cached(make: Callable[..., Any]) -> None:
    per_token = LinearCost(0.0, 0.0, 0.0, per_prefill_token=0.01)
    waiting = [FakeRequest(number=1), FakeRequest(number=2, prompt_tokens=1000, ttft_target=5.0)]
    assert numbers(make(), waiting, FakeView(cost=per_token)) == [1, 2]
    assert numbers(make(), waiting, FakeView(cost=per_token, cached={2: 600})) == [2, 1]


def test_least_slack_starts_the_longer_of_two_with_the_same_deadline_first() -> None:
    cost = LinearCost(fixed=0.1, per_decode_row=0.0, per_context_token=0.0, per_prefill_token=0.01)
    waiting = [
        FakeRequest(number=1, deadline=100.0),
        FakeRequest(number=2, deadline=101.0, prompt_tokens=500),
        FakeRequest(number=3, deadline=102.0, max_tokens=200),
        FakeRequest(number=4, deadline=103.0, max_tokens=900, hints={"output_tokens": 16}),
    ]
    assert numbers(LeastSlack(), waiting, FakeView(cost=cost)) == [3, 2, 1, 4]
    assert numbers(EDF(), waiting, FakeView(cost=cost)) == [1, 2, 3, 4]


def test_output_lengths_are_learned_from_those_that_have_finished() -> None:
    policy = LeastSlack()
    waiting = [FakeRequest(number=1, deadline=50.0, max_tokens=20), FakeRequest(number=2, deadline=60.0, max_tokens=1000)]
    assert numbers(policy, waiting, FakeView(cost=SECOND)) == [1, 2], "a thousand seconds would be too late"
    for length in (24, 40):
        policy.on_finish(FakeRequest(number=9, generated_tokens=length))
    assert numbers(policy, waiting, FakeView(cost=SECOND)) == [2, 1], "about 32 seconds leave less time than 20 do"


@pytest.mark.parametrize("make", [EDF, LeastSlack])
def test_a_request_without_a_deadline_gets_every_fourth_turn_once_it_has_waited_long(make: Callable[..., Any]) -> None:
    policy = make(age_steps=10)
    patient = [FakeRequest(number=n, waiting_since_step=1) for n in (1, 2, 3)]
    chosen: list[int] = []
    for step in range(1, 40):
        urgent = [FakeRequest(number=100 + step + n, waiting_since_step=step, deadline=1e6) for n in range(3)]
        waiting = [*patient, *urgent]
        first = next(iter(policy.order(waiting, FakeView(step=step, waiting=waiting))))
        chosen.append(first.number)
        patient = [request for request in patient if request is not first]
    turns = [index + 1 for index, number in enumerate(chosen) if number < 100]
    assert turns == [11, 15, 19]


def test_one_that_lost_its_row_has_waited_before() -> None:
    """It is the earliest, and while it counted as young the others behind it would not get their turns either."""
    policy = EDF(age_steps=10)
    back = FakeRequest(number=1, waiting_since_step=99, preemptions=1)
    waiting = [back, *(FakeRequest(number=n, waiting_since_step=98, deadline=1e6 + n) for n in range(2, 8))]
    assert numbers(policy, waiting, FakeView(step=100)) == [2, 3, 4, 1, 5, 6, 7]


@pytest.mark.parametrize("make", [EDF, LeastSlack])
def test_a_turn_that_could_not_be_taken_is_kept(make: Callable[..., Any]) -> None:
    """Whoever did not fit has not had his turn, however often he was asked for."""
    policy = make(age_steps=10)
    waiting = [FakeRequest(number=n, waiting_since_step=1, deadline=None if n == 1 else 1e6) for n in range(1, 9)]
    firsts = [numbers(policy, waiting, FakeView(step=50))[:4] for _ in range(3)]
    assert firsts == [[2, 3, 4, 1]] * 3


# Levels


@ONE_LOOP
async def test_requests_join_the_level_of_their_prompt() -> None:
    requests = [{"prompt": prompt(length, index)} for index, length in enumerate((40, 8, 20, 5, 9))]
    assert await joined(MLFQ(quantum=10, gap=0), requests) == [2, 4, 5, 3, 1]


def test_what_is_cached_is_no_work() -> None:
    waiting = [FakeRequest(number=1, prompt_tokens=100), FakeRequest(number=2, prompt_tokens=400)]
    policy = MLFQ(quantum=128)
    assert numbers(policy, waiting, FakeView()) == [1, 2]
    assert numbers(policy, waiting, FakeView(cached={2: 336})) == [1, 2], "both in the top level"
    assert numbers(MLFQ(quantum=64), waiting, FakeView(cached={2: 336})) == [2, 1]


def test_service_demotes() -> None:
    policy = MLFQ(quantum=10, growth=2.0, output_weight=2.0)
    running = [FakeRequest(number=n, prompt_tokens=6, generated_tokens=1) for n in (1, 2)]
    for request in running:
        policy.on_submit(request)
    policy.on_step(report(prefill={1: 6, 2: 6}, sampled=[1, 2]))
    waiting = [FakeRequest(number=3, prompt_tokens=6)]
    assert list(policy.preempt_for(waiting[0], running, FakeView())) == []
    for _ in range(2):
        policy.on_step(report(sampled=[2]))  # 6 + 2 + 2 + 2: the second level
    assert [request.number for request in policy.victims(running, 1, FakeView())] == [2, 1]
    assert list(policy.preempt_for(waiting[0], running, FakeView())) == [], "one level is not enough"
    for _ in range(5):
        policy.on_step(report(sampled=[2]))  # 22: the third
    assert list(policy.preempt_for(waiting[0], running, FakeView())) == [running[1]]
    assert numbers(policy, [*running, *waiting], FakeView()) == [1, 3, 2], "and so it waits behind newcomers if preempted"


@pytest.mark.parametrize("gap", [1, 0])
async def test_a_short_request_takes_the_row_of_a_long_one(gap: int) -> None:
    async with simulation(policy=MLFQ(quantum=8, gap=gap), max_rows=1, depth=1, strict_policies=True) as sim:
        long = sim.send(prompt(4, 1), 40)
        await sim.settle()
        await sim.step(10)
        short = sim.send(prompt(4, 2), 2)
        await sim.step(4)
        assert (short.stream.finish_reason is not None) is bool(gap)
        await sim.finish()
        assert sim.joined() == ([long.number, short.number, long.number] if gap else [long.number, short.number])


@ONE_LOOP
async def test_short_ones_behind_long_ones_wait_less_than_by_arrival() -> None:
    async def mean_wait(policy: Any) -> float:
        async with simulation(policy=policy, max_rows=2, depth=1) as sim:
            for index in range(4):
                sim.send(prompt(4, index), 60)
            await sim.settle()
            await sim.step(4)
            short = [sim.send(prompt(4, 10 + index), 2) for index in range(12)]
            await sim.finish()
            return sum(sim.join_of(one.number)[0] for one in short) / len(short)

    assert await mean_wait(MLFQ(quantum=8, gap=1)) < 0.5 * await mean_wait("fcfs")


def test_whoever_has_waited_long_is_lifted_to_the_top_with_a_fresh_quantum() -> None:
    policy = MLFQ(quantum=10, age_steps=20)
    long = FakeRequest(number=1, prompt_tokens=500, waiting_since_step=1)
    short = FakeRequest(number=2, prompt_tokens=5, waiting_since_step=15)
    policy.on_submit(long)
    policy.on_step(report(prefill={1: 300}))  # it has run, and lost its row
    assert numbers(policy, [long, short], FakeView(step=20)) == [2, 1]
    assert numbers(policy, [long, short], FakeView(step=21)) == [1, 2]
    policy.on_step(report(prefill={1: 9}))
    assert list(policy.victims([long, short], 1, FakeView())) == [short, long], "still in the top level"
    policy.on_step(report(prefill={1: 9}))
    assert list(policy.victims([short, long], 1, FakeView())) == [long, short]


# All of them


def test_looking_at_some_per_step_reaches_everybody() -> None:
    rota = Rota(3)
    waiting = [FakeRequest(number=n) for n in range(8)]
    for _ in range(4):
        assert {request.number for _ in range(3) for request in rota.next(waiting)} == set(range(8))
    assert rota.next(waiting[:3]) == waiting[:3]


POLICIES: list[Callable[[], Any]] = [classes, EDF, LeastSlack, MLFQ, lambda: Priority(preempt=True, within=EDF())]


async def busy(sim: Simulation) -> None:
    """Requests of all sorts, two of which are given up."""
    for index in range(10):
        deadline = 1000.0 - index if index % 2 else None
        sim.send(prompt(4 + index, index), 3, priority=index % 3, deadline=deadline, ttft_target=500.0)
    await sim.settle()
    await sim.step(2)
    sim.engine.abort(sim.sent[0].stream.request_id)
    sim.engine.abort(sim.sent[-1].stream.request_id)
    await sim.finish()


@pytest.mark.parametrize("make", POLICIES)
@ONE_LOOP
async def test_what_has_ended_is_forgotten(make: Callable[[], Any]) -> None:
    policy = make()
    async with simulation(policy=policy, max_rows=2, strict_policies=True) as sim:
        await busy(sim)
        times = getattr(policy, "_times", None)
        kept = [value for value in vars(policy).values() if isinstance(value, dict)]
        kept += [times.due, times.start] if times else []
        assert kept
        assert not any(kept), kept


@pytest.mark.parametrize("make", POLICIES)
@ONE_LOOP
async def test_it_may_come_in_the_middle(make: Callable[[], Any]) -> None:
    """Requests that were never announced to it are ordered all the same."""
    async with simulation(max_rows=1, strict_policies=True) as sim:
        for index in range(5):
            sim.send(prompt(4, index), 3)
        await sim.settle()
        await sim.step()
        await sim.engine.set_policy(make())
        await sim.finish()


@pytest.mark.parametrize("make", POLICIES)
def test_a_request_may_end_while_the_order_is_being_pulled(make: Callable[[], Any]) -> None:
    policy = make()
    waiting = [FakeRequest(number=n, priority=n % 2, deadline=1e6 if n % 3 else None) for n in range(1, 9)]
    order = iter(policy.order(waiting, FakeView(waiting=waiting)))
    first = next(order)
    gone = next(request for request in reversed(waiting) if request is not first)
    policy.on_finish(gone)
    assert {request.number for request in order} >= {request.number for request in waiting if request not in (first, gone)}
