"""The bundled admission policies: bounds that hold, forecasts that are right, and what is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from asyncsched.backend import Backend
from asyncsched.contract import ExecutorLimits, StepPlan
from asyncsched.cost import CostModel, LinearCost, StepWork
from asyncsched.engine import Engine
from asyncsched.errors import AdmissionRejectedError, ConfigError, PolicyLoadError
from asyncsched.policies._memory_forecast import OutputLengths
from asyncsched.policies.deadline import Deadline
from asyncsched.policies.fcfs import FCFS
from asyncsched.policies.past_future import PastFuture
from asyncsched.policies.past_future_order import PastFutureOrder
from asyncsched.policies.queue_bounds import QueueBounds
from asyncsched.policies.token_bounds import TokenBounds
from asyncsched.policy import EngineView, RequestView
from asyncsched.stream import TokenStream
from asyncsched.testing import SimulatedExecutor, expected_tokens

from .control_helpers import ONE_LOOP, Sent, Simulation, prompt, simulation


@dataclass
class Fake:
    """A request, as far as admission looks at it."""

    number: int = 1
    prompt_tokens: int = 100
    max_tokens: int = 50
    generated_tokens: int = 0
    prefill_left: int = 0
    tenant: str = ""
    arrived_at: float = 10.0
    deadline: float | None = None
    ttft_target: float | None = None


@dataclass
class FakeView:
    """An engine, as far as admission looks at it."""

    cost: CostModel
    step: int = 1
    now: float = 10.0
    token_budget: int = 101
    decoding: int = 0
    context_tokens: int = 0
    total_rows: int = 10
    free_rows: int = 10
    total_pages: int = 100
    page_size: int = 10
    running: Sequence[Fake] = ()
    waiting: Sequence[Fake] = field(default_factory=list)

    @property
    def waiting_count(self) -> int:
        return len(self.waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.waiting)


def ask(policy: Any, request: Fake, view: FakeView) -> str | None:
    reason: str | None = policy.admit(request, view)
    return reason


def taught(policy: Any, *lengths: int) -> Any:
    """The policy after requests have ended with outputs of these lengths."""
    for length in lengths:
        policy.on_finish(Fake(generated_tokens=length))
    return policy


async def enters(sim: Simulation, length: int, max_tokens: int = 4, **options: Any) -> bool:
    """Submit a request and say whether it was let in."""
    before = sim.statistics.rejected
    sent = sim.send(prompt(length, len(sim.sent)), max_tokens, **options)
    await sim.settle()
    if sim.statistics.rejected == before:
        return True
    sim.sent.remove(sent)
    with pytest.raises(AdmissionRejectedError):
        await sent.stream.result()
    return False


# Queue bounds


async def test_queue_bounds_limit_what_waits() -> None:
    async with simulation(admission_policy=QueueBounds(requests=3), max_rows=1) as sim:
        assert [await enters(sim, 4) for _ in range(6)] == [True] * 4 + [False] * 2, "one has the row, three wait"
        await sim.step(6)
        assert await enters(sim, 4), "one has left the queue"
        assert not await enters(sim, 4)
        await sim.finish()


async def test_queue_bounds_hold_for_each_tenant_alone() -> None:
    async with simulation(admission_policy=QueueBounds(per_tenant=2), max_rows=1) as sim:
        assert await enters(sim, 4, tenant="first")
        assert [await enters(sim, 4, tenant="greedy") for _ in range(4)] == [True, True, False, False]
        assert [await enters(sim, 4, tenant="modest") for _ in range(2)] == [True, True], "another's flood is not theirs"
        assert not await enters(sim, 4, tenant="greedy")
        await sim.finish()


@ONE_LOOP
async def test_the_refusal_says_which_bound_and_what_to_do() -> None:
    async with simulation(admission_policy=QueueBounds(requests=1), max_rows=1) as sim:
        streams = [sim.engine.stream(prompt(4, index), max_tokens=3) for index in range(3)]
        await sim.settle()
        with pytest.raises(AdmissionRejectedError, match="1 requests wait already, the bound is 1; retry later"):
            await streams[2].result()
        await sim.run_out()


class CheckedBounds(QueueBounds):
    """Compares the count it goes by with the queue itself."""

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        mine = [other for other in view.waiting if other.tenant == request.tenant]
        assert self._load.of(request.tenant, view) == (len(mine), sum(other.prompt_tokens for other in mine))
        return super().admit(request, view)


@pytest.mark.parametrize("seed", range(4))
@ONE_LOOP
async def test_the_count_per_tenant_is_right_whatever_happens(seed: int) -> None:
    """Bursts, aborts, several completions, preemptions: what is counted incrementally stays what is there."""
    random = Random(seed)
    options: dict[str, Any] = {"reserve": "prompt", "pages": 14, "max_rows": 3, "strict_policies": True}
    async with simulation(admission_policy=CheckedBounds(per_tenant=6), **options) as sim:
        streams: list[TokenStream] = []
        for _ in range(60):
            for _ in range(random.choice([0, 1, 1, 4])):
                tokens = prompt(random.randint(1, 20), random.randrange(50))
                tenant, n = random.choice("abc"), random.choice([1, 1, 1, 3])
                streams.append(sim.engine.stream(tokens, max_tokens=random.randint(1, 30), tenant=tenant, n=n))
            if random.random() < 0.3:
                random.choice(streams).close() if streams else None
            if random.random() < 0.7:
                await sim.settle()
            if sim.statistics.steps_in_flight:
                await sim.step()
        assert sim.statistics.rejected
        assert sim.statistics.preemptions
        await sim.run_out()


# Token bounds


async def test_token_bounds_limit_the_prompt_tokens_that_wait() -> None:
    async with simulation(admission_policy=TokenBounds(tokens=40), max_rows=1) as sim:
        assert await enters(sim, 100), "nothing waits, so any length may enter"
        assert await enters(sim, 30)
        assert not await enters(sim, 11), "30 and 11 are over 40"
        assert await enters(sim, 10), "30 and 10 are not"
        assert not await enters(sim, 1)
        await sim.finish()


async def test_token_bounds_hold_for_each_tenant_alone() -> None:
    async with simulation(admission_policy=TokenBounds(per_tenant=20), max_rows=1) as sim:
        assert await enters(sim, 4, tenant="first")
        assert [await enters(sim, size, tenant="greedy") for size in (15, 6, 5, 1)] == [True, False, True, False]
        assert await enters(sim, 90, tenant="long"), "longer than the bound, but nothing of this tenant waits"
        assert not await enters(sim, 1, tenant="long")
        await sim.finish()


# Deadline


LINEAR = LinearCost(fixed=0.5, per_decode_row=0.01, per_context_token=0.0, per_prefill_token=0.005)
"""A step of 100 prompt tokens beside one row takes 1.01 s, one without prompts 0.51 s."""


def test_deadline_forecasts_the_first_token_from_the_work_ahead() -> None:
    policy = Deadline()
    waiting = [Fake(prompt_tokens=500), Fake(prompt_tokens=300)]
    running = [Fake(prefill_left=100)]
    view = FakeView(LINEAR, waiting=waiting, running=running)
    # 500 + 300 + 100 ahead and 100 of its own are ten steps of 1.01 s
    assert ask(policy, Fake(ttft_target=10.2), view) is None
    reason = ask(policy, Fake(ttft_target=10.0), view)
    assert reason == "its first token is forecast in 10.1 s, but must come in 10 s; retry later or allow more time"
    assert ask(policy, Fake(ttft_target=12.0, arrived_at=8.5), view) is None
    assert ask(policy, Fake(ttft_target=12.0, arrived_at=7.5), view) is not None, "it has waited for 2.5 s already"
    assert ask(Deadline(factor=1.2), Fake(ttft_target=10.0), view) is None, "the benefit of the doubt"


def test_deadline_adds_the_output_for_the_end() -> None:
    policy = taught(Deadline(), 20, 20, 20)
    view = FakeView(LINEAR)
    # its own prompt takes 1.01 s, 20 tokens 0.51 s each
    assert ask(policy, Fake(deadline=10.0 + 11.3), view) is None
    assert "its end is forecast in 11.2 s" in str(ask(policy, Fake(deadline=10.0 + 11.1), view))
    assert ask(policy, Fake(deadline=10.0 + 2.1, max_tokens=2), view) is None, "it may not generate more than its limit"


def test_deadline_waits_for_rows_if_those_are_scarcer_than_tokens() -> None:
    policy = taught(Deadline(), 100)
    running = [Fake(generated_tokens=done) for done in (90, 20, 60, 150)]  # go on for 10, 80, 40 and 1 steps
    view = FakeView(LINEAR, total_rows=4, free_rows=0, decoding=4, running=running)

    def forecast(waiting: int) -> float:
        view.waiting = [Fake(prompt_tokens=10)] * waiting
        reason = ask(policy, Fake(prompt_tokens=24, ttft_target=0.0), view)
        return float(str(reason).split("forecast in ")[1].split(" s")[0])

    def seconds(steps: float, prompts: int) -> float:
        return steps * 0.54 + prompts * 0.005

    assert forecast(0) == pytest.approx(seconds(1 + 24 / 97, 24), rel=0.01)
    assert forecast(2) == pytest.approx(seconds(40 + 24 / 97, 44), rel=0.01), "the third row that is free is its own"
    assert forecast(5) == pytest.approx(seconds(110 + 24 / 97, 74), rel=0.01), "the sixth waits for who comes second"


def test_deadline_refuses_nobody_without_a_target_or_without_knowledge() -> None:
    busy = [Fake(prompt_tokens=10**6)]
    assert ask(Deadline(), Fake(), FakeView(LINEAR, waiting=busy)) is None
    ignorant = FakeView(LinearCost(0, 0, 0, 0), waiting=busy)
    assert ask(Deadline(), Fake(ttft_target=0.001, deadline=10.001), ignorant) is None


def test_deadline_learns_output_lengths_over_a_window() -> None:
    policy = taught(Deadline(window=4), *[100] * 50, *[0] * 50, *[10] * 40)
    assert policy._output == pytest.approx(10, abs=0.01), "old lengths fade; what never generated teaches nothing"


def first_tokens(policy: Any, *, requests: int, target: float) -> tuple[list[float], int]:
    """Serve a burst in virtual time; the seconds to each first token, and how many were refused."""
    cost = LinearCost(fixed=0.01, per_decode_row=0.001, per_context_token=0.0, per_prefill_token=0.001)

    def latency(plan: StepPlan) -> float:
        rows = int(executor.device.active.sum()) if plan.decode else 0
        return cost.seconds(StepWork(rows, 0, [(chunk.start, len(chunk.tokens)) for chunk in plan.prefill]))

    limits = ExecutorLimits(max_rows=4, pages=200, page_size=4, max_model_len=128, vocab_size=1000)
    executor = SimulatedExecutor(limits, latency=latency)
    seconds: list[float] = []
    rejected = 0

    async def one(engine: Engine, index: int) -> None:
        await trio.sleep(index * 0.002)
        started = trio.current_time()
        async with engine.stream(prompt(40, index), max_tokens=20, ttft_target=target, seed=index) as stream:
            try:
                await anext(aiter(stream))
            except AdmissionRejectedError:
                return
            seconds.append(trio.current_time() - started)
            await stream.result()

    async def main() -> None:
        nonlocal rejected
        async with Engine(
            backend=Backend(executor, None, "simulated"), admission_policy=policy, token_budget=64, cost_model=cost
        ) as engine:
            await engine.generate(prompt(8, 99), max_tokens=20)  # so that the policy has seen an output length
            async with trio.open_nursery() as nursery:
                for index in range(requests):
                    nursery.start_soon(one, engine, index)
            rejected = engine.statistics().rejected

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return seconds, rejected


def test_deadline_refuses_what_would_be_late_and_little_else() -> None:
    """A burst of forty, of which a part can be in time: those it lets in are, and no fewer than without it."""
    everybody, _ = first_tokens(None, requests=40, target=1.0)
    in_time = sum(seconds <= 1.0 for seconds in everybody)
    assert 5 < in_time < 35, "a burst that all or none can survive shows nothing"
    accepted, rejected = first_tokens(Deadline(), requests=40, target=1.0)
    assert len(accepted) + rejected == 40
    assert max(accepted) <= 1.1, "the forecast is right within a tenth"
    assert sum(seconds <= 1.0 for seconds in accepted) >= in_time, "and what could be in time is let in"


# Past and future


def simulated_peak(held: list[int], left: list[int]) -> int:
    """The peak by running the batch: a token each per step; who has ended leaves after its last token."""
    peak = 0
    batch = list(zip(held, left, strict=True))
    while batch:
        batch = [(tokens + 1, more - 1) for tokens, more in batch if more > 0]
        peak = max(peak, sum(tokens for tokens, _ in batch))
    return max(peak, sum(held))


@pytest.mark.parametrize("seed", range(8))
def test_the_forecast_peak_is_that_of_the_batch_run_out(seed: int) -> None:
    random = Random(seed)
    lengths = OutputLengths(100)
    for _ in range(random.randint(1, 150)):
        lengths.add(random.randint(1, 60))
    requests: Any = [
        Fake(number, random.randint(1, 50), generated_tokens=random.randint(0, 30), max_tokens=random.randint(30, 80))
        for number in range(random.randint(1, 25))
    ]
    facts = [lengths.one(request) for request in requests]
    forecast = lengths.forecast(requests)
    assert forecast.peak == simulated_peak(*map(list, zip(*facts, strict=True)))
    parts = lengths.forecast(())
    for one in facts:
        parts = parts.plus(*one)
    assert (parts.left.tolist(), parts.peak) == (forecast.left.tolist(), forecast.peak), "the same, one after the other"


def test_an_empty_forecast_needs_nothing() -> None:
    assert OutputLengths(5).forecast(()).peak == 0


def remaining(lengths: OutputLengths, *requests: Any) -> list[int]:
    return [lengths.one(request)[1] for request in requests]


def test_lengths_are_forecast_from_those_above_what_was_generated() -> None:
    lengths = OutputLengths(100)
    for length in [10, 20, 30, 40, 50]:
        lengths.add(length)
    many = remaining(lengths, *(Fake(number, max_tokens=1000) for number in range(1000)))
    assert {value: many.count(value) for value in set(many)} == {
        value: pytest.approx(200, abs=3) for value in (10, 20, 30, 40, 50)
    }
    later = remaining(lengths, *(Fake(number, generated_tokens=30, max_tokens=1000) for number in range(1000)))
    assert {value: later.count(value) for value in set(later)} == {10: pytest.approx(500, abs=3), 20: pytest.approx(500, abs=3)}
    assert remaining(lengths, Fake(generated_tokens=50, max_tokens=90)) == [40], "it has outlived all: up to its limit"
    assert remaining(lengths, Fake(max_tokens=7)) == [7]
    assert remaining(OutputLengths(3), Fake(max_tokens=70)) == [70], "nothing is known yet"


def test_only_the_last_lengths_are_remembered() -> None:
    lengths = OutputLengths(10)
    for length in [500] * 30 + [3] * 10:
        lengths.add(length)
    assert set(remaining(lengths, *(Fake(number, max_tokens=1000) for number in range(50)))) == {3}
    assert len(lengths) == 10


def test_past_future_refuses_when_the_forecast_exceeds_its_pools() -> None:
    """A pool of 1,000 tokens; outputs end after 20 tokens, whatever their limit."""
    view = FakeView(LINEAR, running=[Fake(number, 80, 900) for number in range(5)], waiting=[])
    assert ask(PastFuture(factor=0.1), Fake(9), view) is None, "nothing has finished, so nothing is known"
    policy = taught(PastFuture(factor=1.0), 20)
    for number in range(5, 10):
        assert ask(policy, Fake(number, 80, 900), view) is None, "ten of 80 and 20 tokens fill the pool"
        assert isinstance(view.waiting, list)
        view.waiting.append(Fake(number, 80, 900))
        policy.on_submit(view.waiting[-1])
    reason = ask(policy, Fake(10, 80, 900), view)
    assert reason == "with it 1.10 pools' worth of memory would be needed, the bound is 1.0; retry later"
    view.waiting = []
    assert ask(policy, Fake(11, 80, 900), view) is None, "the queue has shrunk"
    view.running, view.step = [], 2
    assert ask(policy, Fake(12, 5000, 900), view) is None, "nothing else runs or waits"


class Glances(FakeView):
    """A view that counts how often somebody looks at all that run."""

    looked = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "running":
            Glances.looked += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "make",
    [lambda: taught(Deadline(), 30), lambda: taught(PastFuture(factor=0.2), 30)],
    ids=["deadline", "past-future"],
)
def test_of_a_burst_only_the_first_has_all_that_run_looked_at(make: Callable[[], Any]) -> None:
    policy, running = make(), [Fake(number, generated_tokens=3) for number in range(10)]
    view = Glances(LINEAR, running=running, waiting=[Fake(10)], free_rows=0)
    other = FakeView(LINEAR, running=running, waiting=[Fake(10)], free_rows=0)
    Glances.looked = 0
    answers = []
    for number in range(11, 31):
        answers.append(ask(policy, Fake(number, ttft_target=4.0), view))
        assert answers[-1] == ask(make(), Fake(number, ttft_target=4.0), other), "as one that sees it all for the first time"
    assert Glances.looked < 5
    assert all(answers)
    ended = Glances(LINEAR, step=1, running=[])
    assert ask(policy, Fake(40, ttft_target=4.0), ended) is None, "in the same step, but they have ended"


def test_past_future_counts_anew_now_and_then_and_nobody_too_few() -> None:
    """A queue that grows for long, with nobody leaving it, up to the bound; then one of as many that come and go."""
    policy = taught(PastFuture(factor=1.0), 5)
    waiting: list[Fake] = []
    view = FakeView(LINEAR, total_pages=1050, waiting=waiting)
    while ask(policy, Fake(len(waiting), 15), view) is None and len(waiting) < 1000:
        waiting.append(Fake(len(waiting), 15))
        policy.on_submit(waiting[-1])
    assert len(waiting) == 525, "of 20 tokens each at their end, in a pool of 10,500"
    for number in range(3000):
        waiting[:] = [Fake(number, 15)] * 3
        assert ask(policy, Fake(number, 15), view) is None
        policy.on_submit(waiting[-1])


@ONE_LOOP
async def test_past_future_bounds_the_memory_of_what_waits() -> None:
    async with simulation(admission_policy=PastFuture(factor=2.0), max_rows=2) as sim:
        assert await enters(sim, 4, 12)
        await sim.run_out()
        sim.executor.hold()
        accepted = 0
        while accepted < 50 and await enters(sim, 20, 100):
            accepted += 1
        assert accepted == 2 * 64 * 4 // (20 + 12), "two pools of 256 tokens; 12 tokens is all that an output was so far"
        await sim.finish()


def of_length(sim: Simulation, size: int, index: int, length: int, max_tokens: int) -> Sent:
    """A request whose output ends after ``length`` tokens, by a stop token that only the oracle knows."""
    tokens = prompt(size, index)
    for seed in range(index * 100, index * 100 + 100):
        output = expected_tokens(tokens, seed, length, sim.executor.limits.vocab_size)
        if output[-1] not in output[:-1]:
            return sim.send(tokens, max_tokens, seed=seed, stop_token_ids=(output[-1],))
    raise AssertionError("no seed will do")


async def burst(policy: Any, **options: Any) -> tuple[int, int]:
    """Serve requests that end after 16 of at most 80 tokens: how many were preempted, and most rows that decoded at once."""
    async with simulation(policy=policy, pages=80, max_rows=24, **options) as sim:
        for index in range(10):
            of_length(sim, 8, index, 16, 80)
            await sim.run_out()
        sim.executor.hold()
        most = 0
        for index in range(10, 40):
            of_length(sim, 8, index, 16, 80)
        await sim.settle()
        for _ in range(400):
            if not sim.statistics.running and not sim.statistics.waiting:
                break
            await sim.step()
            most = max(most, sim.statistics.running)
        await sim.finish()
        return sim.statistics.preemptions, most


@ONE_LOOP
async def test_past_future_order_runs_more_than_reserving_and_preempts_less_than_not() -> None:
    """The paper's claim, on outputs a fifth as long as their limit."""
    never, few = await burst("fcfs", reserve="full")
    often, _ = await burst("fcfs", reserve="prompt")
    rarely, many = await burst(PastFutureOrder(within=FCFS()), reserve="prompt")
    assert never == 0
    assert often >= 3, "without a forecast this load must preempt, or the comparison shows nothing"
    assert rarely < often / 2
    assert many >= 2 * few


@ONE_LOOP
async def test_past_future_order_keeps_the_order_within_and_passes_nobody_by() -> None:
    class Backwards:
        def order(self, waiting: Sequence[RequestView], view: EngineView) -> Sequence[RequestView]:
            return list(waiting)[::-1]

    async with simulation(policy=PastFutureOrder(within=Backwards()), max_rows=8, depth=1) as sim:
        for index, (size, limit) in enumerate([(8, 8), (8, 8), (90, 30), (90, 30), (60, 60)]):
            sim.send(prompt(size, index), limit)
        await sim.finish()
        assert sim.joined() == [5, 4, 3, 2, 1], "small ones that would fit wait behind the large one that does not"


@ONE_LOOP
async def test_past_future_order_always_lets_somebody_run() -> None:
    async with simulation(policy=PastFutureOrder(within=FCFS(), share=0.01), max_rows=4) as sim:
        for index in range(3):
            sim.send(prompt(20, index), 3)
        await sim.finish()
        assert sim.statistics.policy_faults == {}


@ONE_LOOP
async def test_past_future_order_keeps_what_its_inner_policy_can_do() -> None:
    told: list[str] = []

    class Inner:
        def order(self, waiting: Sequence[RequestView], view: EngineView) -> Sequence[RequestView]:
            return waiting

        def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> list[RequestView]:
            told.append("victims")
            return []

        def on_submit(self, request: RequestView) -> None:
            told.append("submit")

    policy = PastFutureOrder(within=Inner(), share=1.0)
    async with simulation(policy=policy, reserve="prompt", pages=20, max_rows=3, max_preemptions=100) as sim:
        policy._lengths.add(1)  # believes that outputs end at once, so that pages do run out
        for index in range(3):
            sim.send(prompt(8, index), 24, seed=index)
        await sim.finish()
        assert told.count("submit") == 3
        assert "victims" in told
        assert not hasattr(policy, "budget"), "what the inner one cannot do is left to the engine"


def test_past_future_order_needs_an_order_to_wrap() -> None:
    with pytest.raises(PolicyLoadError, match=r"has no method order\(\)"):
        PastFutureOrder(within="lru")


# Options


@pytest.mark.parametrize(
    "make",
    [
        QueueBounds, lambda: QueueBounds(requests=0), lambda: QueueBounds(per_tenant=0), TokenBounds,
        lambda: TokenBounds(tokens=0), lambda: TokenBounds(per_tenant=-1), lambda: Deadline(factor=0.0),
        lambda: Deadline(window=0), lambda: PastFuture(factor=0.0), lambda: PastFuture(window=0),
        lambda: PastFutureOrder(share=0.0), lambda: PastFutureOrder(share=1.1), lambda: PastFutureOrder(window=0),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"(queue|token)-bounds: |deadline: |past-future(-order)?: "):
        make()
