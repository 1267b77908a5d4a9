"""Who gives way when pages run out: asked for lazily, checked one by one, and what each would free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from asyncsched.errors import InvalidDecisionError
from asyncsched.policies.fcfs import FCFS
from asyncsched.policies.lru import LRU
from asyncsched.policy import EngineView, RequestView
from asyncsched.policy_guard import Guard
from asyncsched.policy_host import PolicyHost
from asyncsched.policy_set import PolicySet
from asyncsched.request import Request

from .control_helpers import ONE_LOOP, Simulation, prompt, simulation, traffic
from .policy_helpers import SCARCE, Waiting


class Naming:
    """Names victims as a test wants."""

    def __init__(self, answer: Callable[[Waiting], Any]) -> None:
        self._answer = answer

    def victims(self, running: Waiting, pages: int, view: EngineView) -> Any:
        return self._answer(running)


def host(answer: Callable[[Waiting], Any], *, strict: bool = False) -> PolicyHost:
    return PolicyHost(PolicySet(FCFS(), None, Naming(answer), LRU(), None), Guard(strict, 1.0))


async def running(sim: Simulation, count: int) -> list[Request]:
    """So many requests that hold rows, in order of admission."""
    for index in range(count):
        sim.send(prompt(4, index), 8)
    await sim.settle()
    return sim.state.running()


@ONE_LOOP
async def test_no_more_are_pulled_than_are_needed() -> None:
    async with simulation(max_rows=8) as sim:
        requests = await running(sim, 4)
        pulled: list[int] = []

        def one_by_one(running: Waiting) -> Iterator[RequestView]:
            for request in running:
                pulled.append(request.number)
                yield request

        asked = host(one_by_one)
        victims = asked.victims(requests, 1, None)
        assert [next(victims), next(victims)] == requests[:2]
        assert pulled == [1, 2]
        victims = asked.victims(requests, 1, None)
        assert list(victims) == requests
        assert asked.faults == {}
        await sim.finish()


def raises_late(running: Waiting) -> Iterator[RequestView]:
    yield running[1]
    raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("answer", "expected", "faults"),
    [
        (lambda running: [running[2], running[0]], [3, 1, 4, 2], {}),
        (lambda running: (), [4, 3, 2, 1], {}),
        (lambda running: [running[1], running[1], running[0]], [2, 4, 3, 1], {"victims": 1}),
        (lambda running: [running[1], object(), running[0]], [2, 4, 3, 1], {"victims": 1}),
        (raises_late, [2, 4, 3, 1], {"victims": 1}),
        (lambda running: None, [4, 3, 2, 1], {"victims": 1}),
    ],
    ids=["some", "none", "twice", "foreign", "raises midway", "nothing"],
)
@ONE_LOOP
async def test_who_is_left_out_follows_latest_first_after_a_fault_too(
    answer: Any, expected: list[int], faults: dict[str, int]
) -> None:
    async with simulation(max_rows=8) as sim:
        requests = await running(sim, 4)
        asked = host(answer)
        assert [request.number for request in asked.victims(requests, 1, None)] == expected
        assert asked.faults == faults
        await sim.finish()


@ONE_LOOP
async def test_a_strict_host_raises_at_the_mistake() -> None:
    async with simulation(max_rows=8) as sim:
        requests = await running(sim, 2)
        victims = host(lambda running: [running[0], running[0]], strict=True).victims(requests, 1, None)
        assert next(victims) is requests[0]
        with pytest.raises(InvalidDecisionError, match="victims"):
            next(victims)
        await sim.finish()


@ONE_LOOP
async def test_those_that_are_protected_give_way_last() -> None:
    """Even if the policy names one first again and again."""

    class First:
        def victims(self, running: Waiting, pages: int, view: EngineView) -> Iterable[RequestView]:
            return sorted(running, key=lambda request: request.number)

    async with simulation(policy=FCFS(), preemption_policy=First(), **{**SCARCE, "max_preemptions": 1}) as sim:
        preempt, lost = sim.state.preempt, []

        def watched(request: Request) -> None:
            lost.append(request.number)
            preempt(request)

        sim.state.preempt = watched  # type: ignore[method-assign]
        for index in range(3):
            sim.send(prompt(8, index), 40, seed=index)
        await sim.finish()
        assert lost[:2] == [1, 2], "and not the first one again"


@pytest.mark.parametrize("seed", range(3))
@ONE_LOOP
async def test_own_pages_are_those_that_the_tree_does_not_hold(seed: int) -> None:
    async with simulation(reserve="prompt", pages=24, max_rows=4, max_preemptions=100) as sim:
        step, seen = sim.step, set()

        async def watched(count: int = 1) -> None:
            for _ in range(count):
                await step()
                for request in sim.state.running():
                    marked = np.count_nonzero(request.donated[: len(request.pages)])
                    assert request.own_pages == len(request.pages) - marked == request.view.own_pages
                    seen.add((request.own_pages, marked > 0))
                for request in sim.state.waiting.values():
                    assert request.own_pages == 0

        sim.step = watched  # type: ignore[method-assign]
        await traffic(sim, seed)
        await sim.finish()
        assert len(seen) > 3
