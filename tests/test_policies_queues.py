"""What the bundled orders keep from step to step: rankings, who waits, and shares for those that wait long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from asyncsched.policies._keyed import KeyedQueue, Ranking
from asyncsched.policies._patience import Patience
from asyncsched.policies._roster import Roster
from asyncsched.policies.dlpm import DLPM
from asyncsched.policies.edf import EDF
from asyncsched.policies.lpm import LPM
from asyncsched.policies.sjf import SJF
from asyncsched.policies.srpt import SRPT
from asyncsched.policy import RequestView
from asyncsched.testing.fake_views import FakeRequest, FakeView, change

from .control_helpers import prompt, simulation
from .order_helpers import numbers


def some(*numbers: int, **attributes: Any) -> list[FakeRequest]:
    return [FakeRequest(number=number, **attributes) for number in numbers]


class Watched(list[RequestView]):
    """Waiting requests that count how many of them are looked at."""

    looked = 0

    def __getitem__(self, index: Any) -> Any:
        self.looked += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[RequestView]:
        for request in super().__iter__():
            self.looked += 1
            yield request


# Rankings


@pytest.mark.parametrize("seed", range(5))
def test_a_ranking_is_what_sorting_would_yield(seed: int) -> None:
    random, ranking = Random(seed), Ranking()
    requests = {request.number: request for request in some(*range(200))}
    keys: dict[int, float] = {}
    for _ in range(1000):
        number = random.randrange(200)
        if random.random() < 0.2:
            ranking.forget(number)
            keys.pop(number, None)
        else:
            keys[number] = random.randrange(20)
            ranking.put(requests[number], keys[number])
    wanted, least = set(random.sample(range(200), 100)), random.randrange(20)
    expected = sorted((key, number) for number, key in keys.items() if number in wanted and key >= least)
    assert [request.number for request in ranking.among(wanted, least)] == [number for _, number in expected]
    assert [number in ranking for number in range(200)] == [number in keys for number in range(200)]


def test_a_ranking_may_change_while_it_is_gone_through() -> None:
    ranking = Ranking()
    for one in some(*range(100)):
        ranking.put(one, one.number)
    seen = []
    for request in ranking.among(range(1000)):
        seen.append(request.number)
        ranking.forget(request.number)
        ranking.put(FakeRequest(number=500 + request.number), -1)
    assert seen == sorted(set(seen)), "nothing twice"
    assert seen[-1] == 99


def test_a_key_is_computed_anew_for_one_that_left_and_waits_again() -> None:
    asked: list[int] = []

    def key(request: RequestView) -> float:
        asked.append(request.number)
        return -request.generated_tokens

    queue, waiting = KeyedQueue(key), some(1, 2)
    for request in waiting:
        queue.add(request)
    assert next(queue.order(waiting)).number == 1
    assert [request.number for request in queue.order(waiting[1:])] == [2]
    change(waiting[0], generated_tokens=5)
    assert [request.number for request in queue.order(waiting)] == [1, 2]
    assert asked == [1, 2, 1]


@pytest.mark.parametrize("make", [SJF, SRPT, EDF, LPM, DLPM])
def test_a_step_does_not_look_at_everybody(make: Callable[[], Any]) -> None:
    """With a thousand waiting that alone would take longer than all the rest."""
    policy, view = make(), FakeView(step=2)
    requests = some(*range(1000), max_tokens=100, deadline=1e6)
    for request in requests:
        policy.on_submit(request)
    waiting = Watched(requests)
    for _ in range(4):
        order = iter(policy.order(waiting, view))
        chosen = [next(order) for _ in range(4)]
        waiting = Watched(request for request in waiting if request not in chosen)
        looked = waiting.looked = 0
    assert looked == 0
    order = iter(policy.order(waiting, view))
    for _ in range(4):
        next(order)
    assert waiting.looked < 300


# Who waits


def test_a_roster_finds_who_was_never_announced() -> None:
    roster, waiting = Roster(), some(1, 2, 3)
    assert roster.newcomers(waiting) == waiting
    assert roster.newcomers(waiting) == []
    roster.add(late := FakeRequest(number=4))
    assert roster.newcomers([*waiting, late]) == [late]
    roster.forget(waiting[0])
    assert roster.newcomers([*waiting[1:], late]) == []
    assert roster.numbers == {2, 3, 4}


def test_a_roster_never_answers_who_does_not_wait_and_finds_out_who_was_missed_for_it() -> None:
    roster = Roster()
    first, gone, missed, *others = some(1, 2, 3, 4, 5, 6, 7)
    roster.newcomers([first, gone, *others])
    waiting = [first, *others[:2], missed, *others[2:]]  # one left unnoticed, and one came unannounced: as many as before
    assert roster.newcomers(waiting) == []
    assert list(roster.serve([gone, first], waiting)) == [first]
    assert roster.newcomers(waiting) == [missed]


def test_a_roster_finds_whom_it_missed_in_turn() -> None:
    roster = Roster()
    first, gone, missed, *others = some(1, 2, 3, 4, 5, 6, 7)
    roster.newcomers([first, gone, *others])
    waiting = [first, missed, *others]
    found = [roster.newcomers(waiting) for _ in range(len(waiting) + 1)]
    assert [new for new in found if new] == [[missed]]


def test_a_roster_knows_who_was_taken() -> None:
    roster, waiting = Roster(), some(1, 2, 3)
    roster.newcomers(waiting)
    served = roster.serve(waiting, waiting)
    assert [next(served).number, next(served).number] == [1, 2]
    assert roster.left(waiting[1:]) == [1]
    assert roster.newcomers(waiting[1:]) == []
    assert roster.left(waiting[1:]) == []


@pytest.mark.parametrize("make", [SJF, EDF, LPM, DLPM])
def test_classes_asked_one_by_one_do_not_confuse_an_order(make: Callable[[], Any]) -> None:
    policy, view = make(), FakeView()
    high, low, as_many = some(1, 3, 5), some(2, 4), some(6, 7, 8)
    for _ in range(3):
        assert numbers(policy, high, view) == [1, 3, 5]
        assert numbers(policy, as_many, view) == [6, 7, 8]
        assert numbers(policy, low, view) == [2, 4]


# Patience


def test_one_in_four_per_group() -> None:
    """Two groups of those that have waited long, each with its hot ones first: of each the earliest is every fourth."""
    patience = Patience(10, group=lambda request: request.tenant)
    waiting = sorted([*some(*range(1, 21, 2), tenant="a"), *some(*range(2, 21, 2), tenant="b")], key=lambda r: r.number)
    view = FakeView(step=100)
    ranked = waiting[::-1]
    mixed = [request.number for request in patience.order(ranked, waiting, view)]
    assert [number for number in mixed if number % 2] == [19, 17, 15, 1, 13, 11, 9, 3, 7, 5]
    assert [number for number in mixed if not number % 2] == [20, 18, 16, 2, 14, 12, 10, 4, 8, 6]
    for group in "ab":
        patience.forget(group)


def test_the_share_is_counted_over_steps() -> None:
    patience, view = Patience(10), FakeView(step=100)
    waiting: list[RequestView] = [*some(*range(1, 21))]
    served = []
    for _ in range(8):
        first = next(patience.order(waiting[::-1], waiting, view))
        served.append(first.number)
        waiting.remove(first)
        patience.admitted([first.number])
    assert served == [20, 19, 18, 1, 17, 16, 15, 2]


# What the engine keeps for them


async def test_what_a_request_may_reuse_follows_its_fill() -> None:
    """It is kept while the request waits, and made anew when its output has become part of what is to be computed."""
    async with simulation(reserve="prompt", pages=12, max_rows=2) as sim:
        sent = [sim.send(prompt(9, index), 16, seed=index) for index in range(2)]
        await sim.settle()
        request = next(one for one in sim.state.running() if one.number == sent[1].number)
        before = request.reusable(4)
        assert before == request.prompt[:8].tobytes()
        assert request.reusable(4) is before
        await sim.step(4)
        sim.state.preempt(request)
        assert len(request.fill) > 9
        assert request.reusable(4) == request.fill[: (len(request.fill) - 1) // 4 * 4].tobytes()
        await sim.finish()
