"""Policies that take too long, and the hooks about evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from asyncsched.errors import (
    EngineDeadError,
    InvalidDecisionError,
)
from asyncsched.policies.fcfs import FCFS
from asyncsched.policy import EngineView, PrefillBudget, PrefixView, RequestView, StepReport

from .control_helpers import ONE_LOOP, Simulation, prompt, simulation
from .policy_helpers import (
    SCARCE,
    Arrival,
    Backwards,
    Urgent,
    Waiting,
)

# Time allowance


class Clock:
    """A clock that only a slow policy moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What policies are timed with."""
    clock = Clock()
    monkeypatch.setattr("asyncsched.policy_guard.time.perf_counter", clock)
    monkeypatch.setattr("asyncsched.policy_host.time.perf_counter", clock)
    return clock


class Slow(Urgent):
    """Takes a second in one of its hooks, as often as the test wants; writes down each call."""

    def __init__(self, clock: Clock, hook: str, slow: Callable[[int], bool] = lambda call: True) -> None:
        super().__init__()
        self.calls = 0
        self._clock = clock
        self._hook = hook
        self._slow = slow

    def _called(self, hook: str) -> None:
        if hook == self._hook:
            self.calls += 1
            if self._slow(self.calls):
                self._clock.now += 1.0

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        self._called("order")
        return list(waiting)[::-1]

    def budget(self, view: EngineView) -> PrefillBudget:
        self._called("budget")
        return PrefillBudget(1, 1)

    def victims(self, running: Waiting, pages: int, view: EngineView) -> Iterable[RequestView]:
        self._called("victims")
        return ()

    def preempt_for(self, request: RequestView, running: Waiting, view: EngineView) -> Iterable[RequestView]:
        self._called("preempt_for")
        return ()

    def key(self, prefix: PrefixView) -> int:
        return 0

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        self._called("admit")
        return None

    def on_submit(self, request: RequestView) -> None:
        self._called("on_submit")

    def on_step(self, report: StepReport) -> None:
        self._called("on_step")

    def on_finish(self, request: RequestView) -> None:
        self._called("on_finish")


async def ask_often(sim: Simulation, rounds: int) -> None:
    """Have order, budget, preempt_for and admit asked once per round."""
    for index in range(rounds):
        sim.send(prompt(1, index), 2)
        await sim.settle()
        await sim.step(sim.statistics.steps_in_flight)


@pytest.mark.parametrize("hook", ["order", "budget", "admit"])
@ONE_LOOP
async def test_a_hook_that_is_slow_three_times_is_set_aside_and_comes_back(hook: str, clock: Clock) -> None:
    policy = Slow(clock, hook)
    async with simulation(policy=policy, admission_policy=policy, max_rows=1, depth=0) as sim:
        await ask_often(sim, 3)
        assert policy.calls == 3
        assert sim.statistics.policy_faults == {hook: 3}
        while policy.calls == 3 and len(sim.sent) < 100:
            await ask_often(sim, 1)
        assert len(sim.sent) == 3 + 64 + 1, "it is left out for 64 calls, and then asked again"
        assert policy.calls == 4
        assert sim.statistics.policy_faults == {hook: 4}
        await sim.run_out()


@ONE_LOOP
async def test_the_answer_of_a_slow_call_counts_and_that_of_none_is_the_default(clock: Clock) -> None:
    policy = Slow(clock, "order")
    async with simulation(policy=policy, max_rows=1, depth=0) as sim:
        for index in range(8):
            sim.send(prompt(1, index), 1)
        await sim.finish()
        assert sim.joined() == [8, 7, 6, 1, 2, 3, 4, 5], "three times in the policy's order, then by arrival"


@pytest.mark.parametrize("hook", ["order", "budget", "admit"])
@ONE_LOOP
async def test_only_slow_calls_in_a_row_count(hook: str, clock: Clock) -> None:
    policy = Slow(clock, hook, slow=lambda call: call % 3 != 0)
    async with simulation(policy=policy, admission_policy=policy, max_rows=1, depth=0) as sim:
        await ask_often(sim, 12)
        assert policy.calls == 12
        assert sim.statistics.policy_faults == {hook: 8}
        await sim.run_out()


@ONE_LOOP
async def test_a_generator_that_takes_its_time_between_answers_is_slow_too(clock: Clock) -> None:
    """The first answer comes at once, the second takes a second: together that is over the allowance, every time."""

    class Lazy(Arrival):
        steps = 0

        def order(self, waiting: Waiting, view: EngineView) -> Iterator[RequestView]:
            self.steps += 1
            for index, request in enumerate(reversed(waiting)):
                clock.now += 1.0 if index else 0.0
                yield request

    policy = Lazy()
    async with simulation(policy=policy, max_rows=2, depth=0) as sim:
        for index in range(16):
            sim.send(prompt(1, index), 1)
        await sim.finish()
        assert policy.steps == 3
        assert sim.statistics.policy_faults == {"order": 3}


@pytest.mark.parametrize("hook", ["on_submit", "on_step", "on_finish"])
@ONE_LOOP
async def test_a_slow_listener_is_counted_but_never_left_out(hook: str, clock: Clock) -> None:
    """It keeps accounts: to leave out a call would spoil them."""
    policy = Slow(clock, hook)
    async with simulation(policy=policy, max_rows=1, depth=0) as sim:
        await ask_often(sim, 6)
        await sim.finish()
        assert policy.calls == (len(sim.plans) if hook == "on_step" else 6)
        assert sim.statistics.policy_faults == {hook: policy.calls}


@ONE_LOOP
async def test_a_slow_victims_hook_is_set_aside(clock: Clock) -> None:
    policy = Slow(clock, "victims")
    async with simulation(policy=FCFS(), preemption_policy=policy, **{**SCARCE, "max_rows": 8, "pages": 24}) as sim:
        for index in range(12):
            sim.send(prompt(8, index), 24, seed=index)
        await sim.finish()
        assert sim.statistics.preemptions > 3
        assert policy.calls == 3
        assert sim.statistics.policy_faults == {"victims": 3}


@ONE_LOOP
async def test_a_strict_engine_does_not_put_up_with_a_slow_policy(clock: Clock) -> None:
    async with simulation(policy=Slow(clock, "order"), strict_policies=True) as sim:
        sent = sim.send(prompt(4), 2)
        sim.executor.unhold()
        with pytest.raises(EngineDeadError) as caught:
            await sent.stream.result()
        assert isinstance(caught.value.__cause__, InvalidDecisionError)
        assert "took 1.000 s; policy_allowance is 0.05 s" in str(caught.value.__cause__)


@ONE_LOOP
async def test_the_allowance_is_an_option(clock: Clock) -> None:
    policy = Slow(clock, "order")
    async with simulation(policy=policy, policy_allowance=1.5, max_rows=1, depth=0) as sim:
        await ask_often(sim, 5)
        await sim.finish()
        assert policy.calls >= 5
        assert sim.statistics.policy_faults == {}


@ONE_LOOP
async def test_a_new_policy_does_not_pay_for_the_old_ones_slowness(clock: Clock) -> None:
    async with simulation(policy=Slow(clock, "order"), max_rows=1, depth=0) as sim:
        for index in range(3):
            sim.send(prompt(1, index), 1)
        await sim.run_out()
        sim.executor.hold()
        assert sim.statistics.policy_faults == {"order": 3}
        await sim.engine.set_policy(Backwards())
        for index in range(4):
            sim.send(prompt(1, index), 1)
        await sim.finish()
        assert sim.joined() == [3, 2, 1, 7, 6, 5, 4]


# Eviction: begin and on_evict


class Table:
    """Keys from a table that the test changes; every round may read all of them again."""

    def __init__(self, again: Any = None) -> None:
        self.keys: dict[str, int] = {}
        self.rounds = 0
        self.gone: list[tuple[str, int, int]] = []
        self._again = again
        if again is not None:
            self.begin = self._begin

    def key(self, prefix: PrefixView) -> tuple[int, int]:
        return self.keys.get(prefix.tenant, 0), -prefix.depth

    def _begin(self, view: EngineView) -> Any:
        self.rounds += 1
        assert view.evictable_pages > 0
        return self._again

    def on_evict(self, prefix: PrefixView) -> None:
        self.gone.append((prefix.tenant, prefix.tokens, prefix.depth))


async def three_tenants(sim: Simulation) -> None:
    """Cache the prompts of three tenants, two pages each."""
    for index, tenant in enumerate("abc"):
        sim.send(prompt(8, index), 1, tenant=tenant)
        await sim.run_out()


@pytest.mark.parametrize(("again", "victim"), [(None, "a"), (False, "a"), (True, "b"), (1, "a")])
@ONE_LOOP
async def test_keys_that_have_shrunk_show_when_a_round_begins(again: Any, victim: str) -> None:
    """``a`` was the smallest when it was last looked at; ``b`` is now. Only ``True`` has every key read again."""
    policy = Table(again)
    policy.keys = {"a": 1, "b": 2, "c": 3}
    async with simulation(eviction_policy=policy, pages=8) as sim:
        await three_tenants(sim)
        policy.keys["b"] = 0
        sim.send(prompt(14, 5), 1, tenant="d")
        await sim.finish()
        assert {tenant for tenant, *_ in policy.gone} == {victim}
        assert policy.rounds == (0 if again is None else 1)
        assert sim.statistics.policy_faults == {}


async def test_a_policy_is_told_what_is_evicted() -> None:
    policy = Table()
    async with simulation(eviction_policy=policy, pages=8) as sim:
        await three_tenants(sim)
        sim.send(prompt(12, 5), 1, tenant="d")  # three pages: two are free, so half a prefix goes
        await sim.run_out()
        assert policy.gone == [("a", 8, 8)], "as it was before it lost its tail"
        assert sim.statistics.evicted_pages == 1
        assert await sim.engine.flush_cache() == 8
        assert sorted(policy.gone[1:]) == [("a", 4, 4), ("b", 8, 8), ("c", 8, 8), ("d", 12, 12)]
        await sim.finish()


@pytest.mark.parametrize("hook", ["begin", "on_evict"])
@ONE_LOOP
async def test_eviction_hooks_that_raise_are_faults_and_pages_go_all_the_same(hook: str) -> None:
    policy = Table(again=True)

    def fail(argument: object) -> None:
        raise RuntimeError("oops")

    setattr(policy, hook, fail)
    async with simulation(eviction_policy=policy, pages=8) as sim:
        await three_tenants(sim)
        sim.send(prompt(14, 5), 1)
        await sim.finish()
        assert sim.statistics.evicted_pages == 2
        assert set(sim.statistics.policy_faults) == {hook}
