"""The orders by size, and their yardsticks: ``sjf``, ``srpt``, ``hrrn``, ``lof`` and ``random``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest

from asyncsched.errors import ConfigError
from asyncsched.policies.fcfs import FCFS
from asyncsched.policies.hrrn import HRRN
from asyncsched.policies.lof import LOF
from asyncsched.policies.random_order import RandomOrder
from asyncsched.policies.sjf import SJF
from asyncsched.policies.srpt import SRPT
from asyncsched.policy import RequestView, StepReport
from asyncsched.testing.fake_views import FakeRequest, FakeView, change

from .control_helpers import ONE_LOOP, prompt, simulation
from .order_helpers import busy_life, leftovers, numbers

ALL = pytest.mark.parametrize("make", [SJF, SRPT, HRRN, LOF, RandomOrder])
PREDICTING = pytest.mark.parametrize("make", [SJF, SRPT, HRRN])


def sizes(*tokens: float, **options: Any) -> list[FakeRequest]:
    """Requests with these ``max_tokens``, numbered from 1."""
    return [FakeRequest(number=number, max_tokens=int(size), **options) for number, size in enumerate(tokens, 1)]


async def endings(policy: Any, jobs: Sequence[tuple[int, int]], **options: Any) -> dict[int, int]:
    """Request number → when it ended; ``jobs`` are (arrival, output tokens), both in steps, idle ones counted, too."""
    ended: dict[int, int] = {}
    async with simulation(policy=policy, depth=1, **options) as sim:
        now = 0
        while len(ended) < len(jobs):
            for arrival, tokens in jobs[len(sim.sent) :]:
                if arrival > now:
                    break
                sim.send(prompt(4, len(sim.sent)), tokens)
            await sim.settle()
            now += 1
            if sim.statistics.steps_in_flight:
                await sim.step()
            for sent in sim.sent:
                if sent.stream.finish_reason is not None:
                    ended.setdefault(sent.number, now)
        await sim.finish()
    return ended


# Whose turn it is


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (SJF(), [3, 1, 4, 2, 5]),
        (SRPT(), [3, 1, 4, 2, 5]),
        (HRRN(), [1, 2, 3, 4, 5]),  # all came at once and nobody has been served since: nobody has waited
        (LOF(), [2, 5, 1, 4, 3]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_order_by_size_with_ties_by_arrival(policy: Any, expected: list[int]) -> None:
    assert numbers(policy, sizes(8, 30, 5, 8, 30), FakeView()) == expected


@pytest.mark.parametrize(("make", "expected"), [(SJF, [3, 4, 2, 1]), (LOF, [1, 2, 4, 3])])
async def test_requests_are_served_in_that_order(make: Any, expected: list[int]) -> None:
    async with simulation(policy=make(), max_rows=1, strict_policies=True) as sim:
        for index, tokens in enumerate([9, 7, 1, 4]):
            sim.send(prompt(4, index), tokens)
        await sim.finish()
        assert sim.joined() == expected


@pytest.mark.parametrize("make", [SJF, SRPT])
def test_the_hint_goes_before_max_tokens(make: Any) -> None:
    waiting = sizes(20, 20, 20)
    change(waiting[1], hints={"output_tokens": 3})
    change(waiting[2], hints={"output_tokens": 3.5})
    assert numbers(make(), waiting, FakeView()) == [2, 3, 1]
    assert numbers(LOF(), waiting, FakeView()) == [1, 3, 2]


@pytest.mark.parametrize("hint", [float("nan"), -1, "3", None, True, [], float("inf"), 10**400, 500])
def test_an_impossible_hint_counts_for_nothing(hint: object) -> None:
    """And one over ``max_tokens`` as ``max_tokens``."""
    waiting = sizes(20, 10, 21)
    change(waiting[0], hints={"output_tokens": hint})
    assert numbers(SJF(), waiting, FakeView()) == [2, 1, 3]


@pytest.mark.parametrize(("weight", "expected"), [(0, [1, 2]), (0.02, [1, 2]), (0.2, [2, 1])])
def test_prompt_tokens_count_by_their_weight(weight: float, expected: list[int]) -> None:
    long, short = (
        FakeRequest(number=1, prompt_tokens=100, max_tokens=10),
        FakeRequest(number=2, prompt_tokens=10, max_tokens=15),
    )
    assert numbers(SJF(prompt_weight=weight), [long, short], FakeView()) == expected


@ONE_LOOP
async def test_sjf_makes_the_mean_latency_smallest() -> None:
    """One row, everybody there from the start: no other order does better (Smith 1956)."""
    random = Random(4)
    tokens = [random.randint(1, 30) for _ in range(12)]
    means = {}
    for policy in (SJF(), LOF(), FCFS(), RandomOrder()):
        ended = await endings(policy, [(0, size) for size in tokens], max_rows=1)
        means[type(policy)] = sum(ended.values()) / len(ended)
    assert means[SJF] == min(means.values())
    assert means[LOF] == max(means.values())
    assert means[SJF] < 0.8 * means[FCFS]


@ONE_LOOP
async def test_lof_ends_the_batch_sooner() -> None:
    last = {}
    for policy in (LOF(), FCFS(), SJF()):
        ended = await endings(policy, [(0, size) for size in (6, 6, 6, 6, 24)], max_rows=2)
        last[type(policy)] = max(ended.values())
    assert last[LOF] <= 28, "the long one runs beside the four others"
    assert last[FCFS] >= 36
    assert last[SJF] >= 36


# Starvation


@pytest.mark.parametrize(
    ("policy", "victim", "flood", "bound"),
    [
        (SJF(age_tokens=1.0), 40, 2, 38),
        (SJF(age_tokens=4.0), 40, 2, 10),
        (SJF(age_tokens=1e-6), 40, 2, None),
        (SRPT(age_tokens=1.0), 40, 2, 38),
        (SRPT(age_tokens=1e-6), 40, 2, None),
        (LOF(age_tokens=0.5), 2, 12, 20),
        (LOF(age_tokens=1e-6), 2, 12, None),
    ],
)
@ONE_LOOP
async def test_only_those_that_come_soon_enough_go_before_another(
    policy: Any, victim: int, flood: int, bound: int | None
) -> None:
    """The most attractive requests never stop coming, faster than they are served; ``bound`` is in steps."""
    arrived: dict[int, int] = {}
    async with simulation(policy=policy, max_rows=1, depth=1) as sim:
        for index in range(3):
            sim.send(prompt(4, index), flood)
        await sim.settle()
        sent = sim.send(prompt(4, 9), victim)
        await sim.settle()
        for index in range(45 if flood < victim else 26):
            for offset in range(2):
                late = sim.send(prompt(4, index + offset), flood)
                arrived[late.number] = index + 1
            await sim.settle()
            await sim.step()
        await sim.finish()
        order = sim.joined()
    before = [number for number in order[: order.index(sent.number)] if number in arrived]
    if bound is None:
        assert len(before) == len(arrived), "without ageing this traffic must starve it, or the test shows nothing"
    else:
        assert max(arrived[number] for number in before) in (bound - 1, bound)


@pytest.mark.parametrize("age_steps", [30, 100_000])
@ONE_LOOP
async def test_hrrn_sets_a_bound_even_under_lasting_overload(age_steps: int) -> None:
    async with simulation(policy=HRRN(age_steps=age_steps), max_rows=1, depth=1) as sim:
        for index in range(3):
            sim.send(prompt(4, index), 1)
        await sim.settle()
        sent = sim.send(prompt(4, 9), 90)
        for index in range(60):
            for offset in range(3):
                sim.send(prompt(4, index + offset), 1)
            await sim.settle()
            await sim.step()
        if age_steps > 1000:
            assert sent.number not in sim.joined(), "the ratio alone must starve it here, or the test shows nothing"
        else:
            assert sim.join_of(sent.number)[0] <= 2 + age_steps + 4, "aged, and then one in four"
        await sim.finish()


@pytest.mark.parametrize("seed", range(5))
def test_nobody_falls_further_behind_than_the_spread(seed: int) -> None:
    waiting = [FakeRequest(number=number, waiting_since_step=number // 4) for number in range(400)]
    since = {request.number: request.waiting_since_step for request in waiting}
    order = [since[number] for number in numbers(RandomOrder(seed=seed, spread_steps=10), waiting, FakeView(step=200))]
    latest = 0
    for step in order:
        latest = max(latest, step)
        assert step > latest - 10
    assert order != sorted(order)


# Prediction


def predictor(answers: dict[int, Any], asked: list[int]) -> Callable[[RequestView], Awaitable[Any]]:
    async def predict(request: RequestView) -> Any:
        asked.append(request.number)
        answer = answers[request.number]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return predict


async def always_three(request: RequestView) -> float:
    """Reached by its dotted path."""
    return 3.0


@pytest.mark.parametrize("make", [SJF, SRPT])
async def test_a_predictor_is_asked_about_requests_without_a_hint(make: Any) -> None:
    asked: list[int] = []
    policy = make(predictor=predictor({1: 9, 2: 4.5, 4: 1}, asked))
    async with simulation(policy=policy, max_rows=1, strict_policies=True) as sim:
        for index, hints in enumerate([{}, {}, {"output_tokens": 2}, {}]):
            sim.send(prompt(4, index), 12, hints=hints)
        await sim.settle()
        assert sorted(asked) == [1, 2, 4]
        await sim.finish()
        assert sorted(sim.joined()) == [1, 2, 3, 4]
        started = [number for number in sim.joined() if number != sim.joined()[0]]
        assert started == [number for number in (4, 3, 2, 1) if number in started]


@PREDICTING
async def test_a_predictor_by_its_dotted_path(make: Any) -> None:
    policy = make(predictor=f"{__name__}:always_three")
    assert await policy.annotate(FakeRequest(number=1)) == {"output_tokens": 3.0}
    assert await policy.annotate(FakeRequest(number=1, hints={"output_tokens": 8})) == {}


@pytest.mark.parametrize("answer", [RuntimeError("model is gone"), -2, float("nan"), "many", None])
@PREDICTING
@ONE_LOOP
async def test_a_predictor_that_fails_is_a_fault_and_max_tokens_stands_in(make: Any, answer: Any) -> None:
    policy = make(predictor=predictor({1: answer, 2: 3}, []))
    async with simulation(policy=policy, max_rows=1) as sim:
        for index in range(2):
            sim.send(prompt(4, index), 6)
        await sim.finish()
        assert sim.statistics.policy_faults == {"annotate": 1}


@PREDICTING
@ONE_LOOP
async def test_without_a_predictor_no_request_is_annotated(make: Any) -> None:
    async with simulation(policy=make()) as sim:
        assert not sim.state.policies.annotates


# Preemption


@pytest.mark.parametrize(
    ("options", "head_start", "second", "preempts"),
    [
        ({}, 3, 5, True),
        ({}, 20, 5, True),
        ({}, 35, 1, False),  # over 80 % done
        ({"preempt_until": 1.0}, 35, 1, True),
        ({"preempt_until": 0.4}, 20, 5, False),
        ({"preempt_until": 0.0}, 1, 5, False),
        ({}, 10, 14, True),  # 30 left, over twice 14
        ({}, 10, 16, False),
        ({"preempt_factor": 1.0}, 10, 28, True),
        ({"preempt_factor": 1.0}, 10, 31, False),
    ],
)
@ONE_LOOP
async def test_srpt_preempts_what_has_much_left_and_little_done(
    options: dict[str, float], head_start: int, second: int, preempts: bool
) -> None:
    """A long request gets the only row, and ``head_start`` steps later a shorter one comes."""
    async with simulation(policy=SRPT(**options), max_rows=1, depth=1, strict_policies=True) as sim:
        long = sim.send(prompt(4, 1), 40)
        await sim.settle()
        await sim.step(head_start)
        short = sim.send(prompt(4, 2), second)
        await sim.settle()
        await sim.finish()
        if preempts:
            assert sim.joined() == [long.number, short.number, long.number]
            assert sim.statistics.preemptions == 1, "and the victim does not take its row back"
        else:
            assert sim.joined() == [long.number, short.number]


@pytest.mark.parametrize(("age_tokens", "victims"), [(0.1, [1]), (2.0, [])])
def test_srpt_does_not_preempt_for_a_request_that_would_have_to_give_the_row_back(
    age_tokens: float, victims: list[int]
) -> None:
    """What a running request has waited counts for it, as it would in the order."""
    policy = SRPT(age_tokens=age_tokens)
    running = FakeRequest(number=1, max_tokens=40, waiting_since_step=1)
    assert numbers(policy, [running], FakeView(step=21)) == [1]
    late = FakeRequest(number=2, max_tokens=5, waiting_since_step=25)
    view = FakeView(step=25, running=[running])
    assert [request.number for request in policy.preempt_for(late, [running], view)] == victims
    change(running, waiting_since_step=25, preemptions=1)  # as if it had been
    assert numbers(policy, [running, late], view) == ([2, 1] if victims else [1, 2])


async def test_srpt_counts_what_a_preempted_request_has_done() -> None:
    """When it waits again it has less left than one that was longer at first sight."""
    async with simulation(policy=SRPT(), max_rows=1, depth=1) as sim:
        first = sim.send(prompt(4, 1), 40)
        await sim.settle()
        await sim.step(20)
        short = sim.send(prompt(4, 2), 5)
        middle = sim.send(prompt(4, 3), 30)
        await sim.settle()
        await sim.finish()
        assert sim.joined() == [first.number, short.number, first.number, middle.number]


@ONE_LOOP
async def test_srpt_has_the_smaller_mean_latency_when_short_requests_come_late() -> None:
    random = Random(2)
    jobs = [(5 * index, random.choice([2, 3, 4, 50])) for index in range(24)]
    means = {}
    for policy in (SRPT(), SJF(), FCFS()):
        ended = await endings(policy, jobs, max_rows=2)
        means[type(policy)] = sum(ended[number] - jobs[number - 1][0] for number in ended) / len(ended)
    assert means[SRPT] < 0.9 * means[SJF]
    assert means[SJF] < means[FCFS]


async def test_srpt_takes_pages_from_who_has_most_left() -> None:
    async with simulation(policy=SRPT(), reserve="expected", pages=21, max_rows=3, max_preemptions=100) as sim:
        for index, expected in enumerate([24, 12, 16]):
            sim.send(prompt(8, index), 24, seed=index, hints={"output_tokens": expected})
        await sim.finish()
        again = [number for index, number in enumerate(sim.joined()) if number in sim.joined()[:index]]
        assert sim.statistics.preemptions >= 1
        assert again[0] == 1


def test_srpt_names_victims_by_what_they_have_left_and_the_latest_first() -> None:
    running = [
        FakeRequest(number=number, max_tokens=most, generated_tokens=done)
        for number, most, done in ((1, 50, 40), (2, 30, 0), (3, 35, 5), (4, 9, 9), (5, 8, 9))
    ]
    assert [request.number for request in SRPT().victims(running, 1, FakeView())] == [3, 2, 1, 4, 5]


# Response ratio


def served(prompt_tokens: int = 0, outputs: int = 0) -> StepReport:
    return StepReport(1, 0.01, {1000: prompt_tokens}, [1000] * outputs, {})


@pytest.mark.parametrize("seed", range(10))
def test_hrrn_orders_by_response_ratio(seed: int) -> None:
    random = Random(seed)
    policy, given = HRRN(prompt_weight=0.5), 0.0
    came: dict[int, float] = {}
    waiting: list[FakeRequest] = []
    for number in range(1, 60):
        request = FakeRequest(number=number, prompt_tokens=random.randint(1, 90), max_tokens=random.randint(0, 90))
        waiting.append(request)
        policy.on_submit(request)
        came[number] = given
        prompt_tokens, outputs = random.randint(0, 40), random.randint(0, 40)
        policy.on_step(served(prompt_tokens, outputs))
        given += prompt_tokens / 2 + outputs

    def ratio(request: FakeRequest) -> float:
        service = max(1.0, request.prompt_tokens / 2 + request.max_tokens)
        return (given - came[request.number] + service) / service

    expected = sorted(waiting, key=lambda request: (-ratio(request), request.number))
    assert numbers(policy, waiting, FakeView()) == [request.number for request in expected]


def test_hrrn_turns_to_a_long_request_in_time() -> None:
    policy = HRRN(prompt_weight=0)
    long = FakeRequest(number=1, max_tokens=100)
    policy.on_submit(long)
    firsts = []
    for number in range(2, 30):
        short = FakeRequest(number=number, max_tokens=10)
        policy.on_submit(short)
        policy.on_step(served(outputs=5))
        firsts.append(numbers(policy, [long, short], FakeView())[0])
    turn = firsts.index(1)
    assert firsts[:turn] == list(range(2, 2 + turn))
    assert turn == 9, "50 tokens of service for one that needs 100 are the same ratio as 5 for one that needs 10"


# Random


def test_random_is_a_function_of_seed_and_number() -> None:
    waiting = sizes(*[4] * 50)
    one = numbers(RandomOrder(seed=1), waiting, FakeView())
    policy = RandomOrder(seed=1)
    for request in reversed(waiting):
        policy.on_submit(request)
    assert numbers(policy, waiting, FakeView(step=9)) == one
    assert numbers(policy, waiting[::2], FakeView(step=9)) == [number for number in one if number % 2]
    assert numbers(RandomOrder(seed=2), waiting, FakeView()) != one
    assert sorted(one) == list(range(1, 51)) != one


@pytest.mark.parametrize("seed", [0, 1, -1, 2**70])
def test_random_gives_everybody_the_same_chance(seed: int) -> None:
    firsts = [0, 0, 0, 0]
    for group in range(1000):
        waiting = [FakeRequest(number=4 * group + place) for place in range(4)]
        firsts[numbers(RandomOrder(seed=seed), waiting, FakeView())[0] % 4] += 1
    assert all(200 < count < 300 for count in firsts), "mean 250, standard deviation 14"


# Options, state


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (SJF, {"age_tokens": 0}, "sjf: age_tokens"),
        (SJF, {"age_tokens": float("nan")}, "sjf: age_tokens"),
        (SJF, {"prompt_weight": -0.1}, "sjf: prompt_weight"),
        (SJF, {"predictor": 7}, "sjf: predictor=7 cannot be called"),
        (SJF, {"predictor": "no_such_module:f"}, "sjf: predictor='no_such_module:f' could not be imported"),
        (SJF, {"predictor": "math"}, "sjf: predictor='math' could not be imported"),
        (SRPT, {"predictor": "math:pi"}, "srpt: predictor='math:pi' cannot be called"),
        (SRPT, {"preempt_factor": 0.9}, "srpt: preempt_factor"),
        (SRPT, {"preempt_until": 1.1}, "srpt: preempt_until"),
        (SRPT, {"age_tokens": -1}, "srpt: age_tokens"),
        (HRRN, {"prompt_weight": -1}, "hrrn: prompt_weight"),
        (HRRN, {"age_steps": 0}, "hrrn: age_steps"),
        (HRRN, {"predictor": "math:nothing"}, "hrrn: predictor"),
        (LOF, {"age_tokens": 0}, "lof: age_tokens"),
        (RandomOrder, {"seed": 1.5}, "random: seed=1.5"),
        (RandomOrder, {"spread_steps": 0}, "random: spread_steps"),
    ],
)
def test_impossible_options_are_refused(make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        make(**options)


@ALL
def test_requests_that_were_never_announced_are_ordered_all_the_same(make: Any) -> None:
    """As after a change of policy, or in a simulation."""
    announced, other = make(), make()
    waiting = sizes(8, 30, 5, 12)
    for request in waiting:
        announced.on_submit(request)
    assert numbers(other, waiting, FakeView(step=3)) == numbers(announced, waiting, FakeView(step=3))


@ALL
@pytest.mark.parametrize("pages", [64, 12])
@ONE_LOOP
async def test_nothing_is_kept_of_requests_that_have_ended(make: Any, pages: int) -> None:
    policy = make()
    options: dict[str, Any] = {"reserve": "expected"} if pages < 64 else {}
    async with simulation(policy=policy, max_rows=3, pages=pages, strict_policies=True, **options) as sim:
        await busy_life(sim)
    assert leftovers(policy) == {}
