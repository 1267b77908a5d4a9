"""The bundled preemption policies: whom they name, and what a real engine makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from asyncsched.events import EventStream, Preempted
from asyncsched.policies.cheapest import Cheapest
from asyncsched.policies.latest import Latest
from asyncsched.policies.least_attained import LeastAttained
from asyncsched.policies.lowest_class import LowestClass
from asyncsched.policy import EngineView, RequestView

from .control_helpers import ONE_LOOP, Simulation, digest, prompt, simulation

SCARCE: dict[str, Any] = {"reserve": "prompt", "pages": 30, "max_rows": 4}
"""Prompts fit, outputs do not."""


@dataclass
class Fake:
    """A running request, as far as victims are chosen by it."""

    number: int
    priority: int = 0
    prompt_tokens: int = 10
    generated_tokens: int = 0
    prefill_left: int = 0
    own_pages: int = 1


class Noted:
    """Asks another policy and writes down what it answered, with the facts at that moment."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.asked: list[list[tuple[int, dict[str, int]]]] = []

    def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]:
        answer = list(self.inner.victims(running, pages, view))
        assert sorted(one.number for one in answer) == sorted(one.number for one in running), "every one, once"
        names = ("priority", "prompt_tokens", "generated_tokens", "prefill_left", "own_pages", "preemptions")
        self.asked.append([(one.number, {name: getattr(one, name) for name in names}) for one in answer])
        return answer


def named(policy: Any, *running: Fake) -> list[int]:
    """The policy's answer, by number."""
    return [request.number for request in policy.victims(running, 1, None)]


def load(sim: Simulation) -> None:
    """Requests of different length and class, more than fit with their outputs."""
    for index, (length, outputs, priority) in enumerate([(8, 40, 0), (20, 30, 2), (6, 30, 1), (12, 25, 2), (4, 35, 0)] * 2):
        sim.send(prompt(length, index), outputs, seed=index, priority=priority)


async def losers(events: EventStream) -> list[int]:
    """Numbers of the requests that were preempted, in order. Ends the stream."""
    events.close()
    return [event.number async for event in events if isinstance(event, Preempted)]


# Whom they name


def test_latest_names_the_last_admitted_first() -> None:
    assert named(Latest(), Fake(3), Fake(1), Fake(2)) == [2, 1, 3], "by admission, not by number"


def test_lowest_class_names_high_priority_numbers_first_and_the_latest_of_equals() -> None:
    running = [Fake(1, priority=1), Fake(2, priority=0), Fake(3, priority=5), Fake(4, priority=1), Fake(5, priority=-1)]
    assert named(LowestClass(), *running) == [3, 4, 1, 2, 5]


def test_least_attained_names_the_fewest_generated_first_and_the_latest_of_equals() -> None:
    running = [
        Fake(1, generated_tokens=9),
        Fake(2, generated_tokens=2),
        Fake(3, generated_tokens=0),
        Fake(4, generated_tokens=2),
    ]
    assert named(LeastAttained(), *running) == [3, 4, 2, 1]


def test_cheapest_names_the_fewest_tokens_per_page_first() -> None:
    running = [
        Fake(1, prompt_tokens=400, generated_tokens=20, own_pages=2),  # 210 tokens a page
        Fake(2, prompt_tokens=20, generated_tokens=300, own_pages=20),  # 16
        Fake(3, prompt_tokens=100, prefill_left=90, own_pages=1),  # 10: it has only begun
        Fake(4, prompt_tokens=20, own_pages=0),  # frees nothing for certain
        Fake(5, prompt_tokens=20, generated_tokens=300, own_pages=20),  # 16, too, but admitted later
    ]
    assert named(Cheapest(), *running) == [3, 5, 2, 1, 4]


# In an engine


KEYS: dict[type, Callable[[dict[str, int]], float]] = {
    LowestClass: lambda facts: -facts["priority"],
    LeastAttained: lambda facts: facts["generated_tokens"],
    Cheapest: lambda facts: (facts["prompt_tokens"] + facts["generated_tokens"] - facts["prefill_left"]) / facts["own_pages"],
}


@pytest.mark.parametrize("kind", [Latest, LowestClass, LeastAttained, Cheapest])
async def test_the_engine_preempts_whom_the_policy_names(kind: type) -> None:
    policy = Noted(kind())
    async with simulation(preemption_policy=policy, max_preemptions=100, **SCARCE) as sim:
        events = sim.engine.events()
        load(sim)
        await sim.finish()
        assert sim.statistics.policy_faults == {}
        lost = await losers(events)
        assert len(lost) >= len(policy.asked) >= 1
        assert lost[0] == policy.asked[0][0][0]
        if kind in KEYS:
            for answer in policy.asked:
                keys = [KEYS[kind](facts) for _, facts in answer]
                assert keys == sorted(keys)


@ONE_LOOP
async def test_latest_is_what_the_engine_does_by_itself() -> None:
    async def plans(policy: Any) -> str:
        async with simulation(preemption_policy=policy, **SCARCE) as sim:
            load(sim)
            await sim.finish()
            assert sim.statistics.preemptions >= 2
            return digest(sim.plans)

    assert await plans(Latest()) == await plans(None)
    assert await plans(LowestClass()) != await plans(None), "or the comparison shows nothing"


@ONE_LOOP
async def test_the_lowest_class_pays_for_the_others() -> None:
    """Whoever is of the best class never loses its row while somebody else has one."""
    async with simulation(preemption_policy=LowestClass(), max_preemptions=100, **SCARCE) as sim:
        events = sim.engine.events()
        load(sim)
        await sim.finish()
        lost = await losers(events)
        assert lost
        assert set(lost) <= {2, 3, 4, 7, 8, 9}


@pytest.mark.parametrize("kind", [Latest, LowestClass, LeastAttained, Cheapest])
def test_preemption_policies_keep_nothing(kind: type) -> None:
    policy = kind()
    assert vars(policy) == {}, "no state that could grow"
    assert named(policy) == []
