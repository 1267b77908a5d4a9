"""Background coroutines of policies, and policies that change while the engine runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anyio
import pytest

from asyncsched.errors import (
    AdmissionRejectedError,
    ConfigError,
    EngineClosedError,
    PolicyLoadError,
    PolicyNotFoundError,
)
from asyncsched.policies.fcfs import FCFS
from asyncsched.policies.lru import LRU
from asyncsched.policy import EngineView, PrefixView, RequestView

from .control_helpers import ONE_LOOP, prompt, simulation, traffic
from .policy_helpers import (
    SCARCE,
    Alone,
    Arrival,
    Backwards,
    Budget,
    Everything,
    Told,
    Urgent,
    Victims,
    Waiting,
    prompts_of,
)

# Background coroutines


class Worker(Arrival):
    """Runs beside the engine until it is cancelled."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.view: EngineView | None = None

    async def run(self, view: EngineView) -> None:
        self.started += 1
        self.view = view
        try:
            await anyio.sleep_forever()
        finally:
            self.cancelled += 1


class Sick(Arrival):
    """Its coroutine raises at once."""

    def __init__(self) -> None:
        self.started = 0

    async def run(self, view: EngineView) -> None:
        self.started += 1
        raise RuntimeError("the predictor is down")


async def test_a_background_coroutine_lives_as_long_as_the_engine() -> None:
    policy = Worker()
    async with simulation(policy=policy) as sim:
        await sim.settle()
        assert (policy.started, policy.cancelled) == (1, 0)
        sim.send(prompt(4), 2)
        await sim.settle()
        assert policy.view is not None
        assert policy.view.step == len(sim.plans) + 1, "it sees the engine as it is"
        await sim.finish()
    assert (policy.started, policy.cancelled) == (1, 1)


@pytest.mark.parametrize("strict", [False, True])
async def test_a_background_coroutine_that_raises_is_reported_and_nothing_else(strict: bool) -> None:
    policy = Sick()
    async with simulation(policy=policy, strict_policies=strict) as sim:
        await sim.settle()
        sim.send(prompt(4), 3)
        await sim.finish()
        assert sim.statistics.policy_faults == {"run": 1}
        assert policy.started == 1, "and it is not started again"


async def test_a_background_coroutine_may_end() -> None:
    class Brief(Arrival):
        async def run(self, view: EngineView) -> None:
            await anyio.lowlevel.checkpoint()

    async with simulation(policy=Brief()) as sim:
        await sim.settle()
        sim.send(prompt(4), 2)
        await sim.finish()
        assert sim.statistics.policy_faults == {}


async def test_background_coroutines_change_with_the_policies() -> None:
    old, new = Worker(), Worker()

    class Door(Worker):
        def admit(self, request: RequestView, view: EngineView) -> None:
            return None

    door = Door()
    async with simulation(policy=old, admission_policy=door) as sim:
        await sim.settle()
        await sim.engine.set_policy(new)
        await sim.settle()
        assert (old.started, old.cancelled, new.started, new.cancelled) == (1, 1, 1, 0)
        assert (door.started, door.cancelled) == (1, 0), "who stays is left alone"
        await sim.engine.set_policy(old)
        await sim.settle()
        assert (old.started, old.cancelled, new.cancelled) == (2, 1, 1), "one that comes back starts anew"
        await sim.engine.set_policy(FCFS())
        await sim.settle()
        assert old.cancelled == 2
        await sim.finish()
    assert door.cancelled == 1


async def test_a_background_coroutine_that_failed_starts_again_when_its_policy_comes_back() -> None:
    policy = Sick()
    async with simulation(policy=policy) as sim:
        await sim.settle()
        await sim.engine.set_policy(budget_policy=Budget())
        await sim.settle()
        assert policy.started == 1, "another policy has changed, not this one"
        await sim.engine.set_policy(FCFS())
        await sim.settle()
        await sim.engine.set_policy(policy)
        await sim.settle()
        assert policy.started == 2
        assert sim.statistics.policy_faults == {"run": 2}


# Swapping


class Refusing:
    def admit(self, request: RequestView, view: EngineView) -> str:
        return "closed"


class Oldest:
    """Keeps what was used last, and evicts the smallest depth."""

    def __init__(self) -> None:
        self.asked = 0

    def key(self, prefix: PrefixView) -> int:
        self.asked += 1
        return prefix.depth


async def test_the_order_changes_between_two_steps() -> None:
    async with simulation(policy="fcfs", max_rows=1) as sim:
        for index in range(5):
            sim.send(prompt(4, index), 2)
        await sim.settle()
        await sim.engine.set_policy(Backwards())
        await sim.finish()
        assert sim.joined() == [1, 5, 4, 3, 2]


async def test_the_budget_changes() -> None:
    async with simulation(depth=1) as sim:
        await sim.engine.set_policy(budget_policy=Budget())
        sim.send(prompt(18, 1), 2)
        await sim.settle()
        await sim.step()
        await sim.engine.set_policy(budget_policy=None)
        sim.send(prompt(30, 2), 2)
        await sim.finish()
        assert [prompts_of(plan) for plan in sim.plans if plan.prefill] == [9, 9, 30]


async def test_the_preemption_changes() -> None:
    victims = Victims()
    async with simulation(**SCARCE) as sim:
        for index in range(3):
            sim.send(prompt(8, index), 24, seed=index)
        await sim.settle()
        await sim.engine.set_policy(preemption_policy=victims)
        await sim.finish()
        assert victims.asked


async def test_the_eviction_changes_with_every_key_read_again() -> None:
    policy = Oldest()
    async with simulation(pages=12) as sim:
        for kind, length in ((1, 9), (2, 17), (3, 9)):  # 2, 4 and 2 pages are cached
            sim.send(prompt(length, kind), 1)
            await sim.run_out()
        await sim.engine.set_policy(eviction_policy=policy)
        assert policy.asked == 3
        sim.send(prompt(29, 4), 1)
        await sim.run_out()
        kept = [kind for kind, length in ((1, 9), (2, 17), (3, 9)) if sim.cached(prompt(length, kind))]
        assert kept == [2], "the two shallowest went; the two least recently used were 1 and 2"
        await sim.finish()


async def test_the_admission_changes() -> None:
    async with simulation() as sim:
        sim.send(prompt(4, 1), 2)
        await sim.settle()
        await sim.engine.set_policy(admission_policy=Refusing())
        with pytest.raises(AdmissionRejectedError, match="closed"):
            await sim.engine.generate(prompt(4, 2), max_tokens=2)
        await sim.engine.set_policy(admission_policy=None)
        sim.send(prompt(4, 3), 2)
        await sim.finish()


async def test_several_kinds_change_together_by_name_or_options() -> None:
    async with simulation(max_rows=1) as sim:
        await sim.engine.set_policy(
            {"name": "lpm", "age_steps": 5}, eviction_policy=LRU, budget_policy={"name": f"{Budget.__module__}:Budget"}
        )
        policies = sim.state.policies.policies
        assert policies.policy.age_steps == 5
        assert isinstance(policies.eviction_policy, LRU)
        sim.send(prompt(18, 1), 2)
        await sim.finish()
        assert [prompts_of(plan) for plan in sim.plans if plan.prefill] == [9, 9]


async def test_new_policies_are_told_of_live_requests_before_they_are_asked() -> None:
    class Strict(Told, Arrival):
        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            assert {request.number for request in waiting} <= set(self.submitted)
            return waiting

    policy = Strict()
    async with simulation(max_rows=2, strict_policies=True) as sim:
        for index in range(2):
            sim.send(prompt(4, index), 1 if index else 30)
        for index in range(3):
            sim.send(prompt(4, 2 + index), 2, n=2 if index == 1 else 1)
        await sim.settle()
        await sim.step(3)
        ended = [sent.number for sent in sim.sent if sent.stream.finish_reason]
        assert ended
        await sim.engine.set_policy(policy)
        assert policy.submitted == [number for number in (1, 2, 3, 4, 5, 6) if number not in ended], "in order of arrival"
        await sim.engine.set_policy(policy)
        await sim.engine.set_policy(policy, budget_policy=Budget())
        sim.send(prompt(4, 9), 2)
        await sim.finish()
        assert policy.submitted == [number for number in range(1, 8) if number not in ended], "and each once"
        assert sorted(policy.finished) == sorted(policy.submitted)


async def test_a_request_that_is_on_its_way_is_announced_once() -> None:
    """It is being annotated while the policy changes."""
    gate = anyio.Event()

    class Slow:
        def admit(self, request: RequestView, view: EngineView) -> None:
            return None

        async def annotate(self, request: RequestView) -> dict[str, Any]:
            await gate.wait()
            return {}

    class New(Told, Arrival):
        pass

    policy = New()
    async with simulation(admission_policy=Slow()) as sim:
        sim.send(prompt(4), 2)
        await sim.settle()
        await sim.engine.set_policy(policy)
        assert policy.submitted == []
        gate.set()
        await sim.finish()
        assert (policy.submitted, policy.finished) == ([1], [1])


@pytest.mark.parametrize("seed", range(4))
@ONE_LOOP
async def test_nothing_is_lost_when_policies_change_all_the_time(seed: int) -> None:
    async with simulation(pages=26, max_rows=4, token_budget=24, chunk_cap=10, reserve="expected") as sim:
        choices: list[dict[str, Any]] = [
            {"policy": "lpm"}, {"policy": Urgent()}, {"budget_policy": Alone()}, {"budget_policy": None},
            {"eviction_policy": Oldest()}, {"eviction_policy": "lru"}, {"preemption_policy": Victims()},
            {"preemption_policy": None, "policy": Backwards()}, {"policy": Everything(), "budget_policy": Budget()},
        ]  # fmt: skip
        async with anyio.create_task_group() as tasks:

            async def swap() -> None:
                for index in range(40):
                    await sim.engine.set_policy(**choices[(index * 7 + seed) % len(choices)])
                    await sim.settle()

            tasks.start_soon(swap)
            await traffic(sim, seed)
        await sim.finish()
        assert sim.statistics.policy_faults == {}


@pytest.mark.parametrize(
    ("specs", "error"),
    [
        ({"policy": "no-such-policy"}, PolicyNotFoundError),
        ({"policy": {"name": "lpm", "age_steps": 0}}, PolicyLoadError),
        ({"policy": LRU()}, PolicyLoadError),
        ({"policy": Backwards(), "budget_policy": "lpm"}, PolicyLoadError),
        ({"policy": Backwards(), "eviction_policy": "nothing:Nobody"}, PolicyLoadError),
        ({"policy": Backwards(), "admission": FCFS()}, ConfigError),
        ({"policy": Backwards(), "eviction_policy": None}, ConfigError),
        ({"policy": None}, ConfigError),
    ],
    ids=["name", "options", "hook", "second", "import", "kind", "needed", "needed-order"],
)
async def test_what_cannot_be_loaded_changes_nothing(specs: dict[str, Any], error: type[Exception]) -> None:
    async with simulation(policy="fcfs", max_rows=1) as sim:
        for index in range(4):
            sim.send(prompt(4, index), 2)
        await sim.settle()
        with pytest.raises(error):
            await sim.engine.set_policy(**specs)
        await sim.finish()
        assert sim.joined() == [1, 2, 3, 4]
        assert sim.statistics.policy_faults == {}


async def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    async with simulation() as sim:
        with pytest.raises(ConfigError, match="unknown kind of policy 'evict_policy': use policy, budget_policy"):
            await sim.engine.set_policy(evict_policy="lru")


async def test_policies_of_a_closed_engine_cannot_be_set() -> None:
    async with simulation() as sim:
        engine = sim.engine
    with pytest.raises(EngineClosedError):
        await engine.set_policy(Backwards())


async def test_an_engine_that_closes_while_policies_are_loaded_keeps_calm() -> None:
    async with simulation() as sim, anyio.create_task_group() as tasks:
        tasks.start_soon(sim.engine.set_policy, Backwards())
        await anyio.lowlevel.checkpoint()
        await sim.engine.aclose()


async def test_two_changes_at_once_are_both_made() -> None:
    """Each names one kind; neither may undo the other's."""
    async with simulation(max_rows=1) as sim:
        for index in range(4):
            sim.send(prompt(18, index), 2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sim.engine.set_policy, Backwards())

            async def budget() -> None:
                await sim.engine.set_policy(budget_policy=Budget())

            tasks.start_soon(budget)
        await sim.finish()
        assert max(prompts_of(plan) for plan in sim.plans[1:]) == 9
        assert sim.joined()[1:] in ([4, 3, 2], [3, 2, 1])
