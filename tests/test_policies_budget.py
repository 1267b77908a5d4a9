"""The bundled budget policies: what they promise about the steps of a real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from asyncsched.contract import StepPlan
from asyncsched.cost import CostModel, LinearCost, StepWork
from asyncsched.errors import ConfigError
from asyncsched.events import StepCompleted
from asyncsched.policies.decode_first import DecodeFirst
from asyncsched.policies.interval import Interval
from asyncsched.policies.prefill_first import PrefillFirst
from asyncsched.policies.slo import SLO
from asyncsched.policy import EngineView, PrefillBudget, StepReport

from .control_helpers import ONE_LOOP, Simulation, prompt, simulation


@dataclass
class FakeRequest:
    """A running request, as far as budgets look at it."""

    tpot_target: float | None = None
    prefill_left: int = 0
    prompt_tokens: int = 100
    generated_tokens: int = 0


@dataclass
class FakeView:
    """An engine, as far as budgets look at it."""

    step: int = 1
    token_budget: int = 1024
    decoding: int = 0
    page_size: int = 32
    context_tokens: int = 0
    running: Sequence[FakeRequest] = ()
    cost: CostModel = field(default_factory=lambda: LinearCost(0, 0, 0, 0))


def ask(policy: Any, view: FakeView) -> PrefillBudget:
    answer: PrefillBudget = policy.budget(view)
    return answer


def prompts_of(plan: StepPlan) -> int:
    """Prompt tokens in a plan."""
    return sum(len(chunk.tokens) for chunk in plan.prefill)


async def decoding_rows(sim: Simulation, rows: int, outputs: int = 60) -> None:
    """Have ``rows`` rows decode."""
    for index in range(rows):
        sim.send(prompt(4, index), outputs, seed=index)
    await sim.settle()
    for _ in range(50):
        if len(sim.state.rows.decode_rows()) == rows:
            return
        await sim.step()
    raise AssertionError(f"{rows} rows should decode by now")


async def plans_from_here(sim: Simulation) -> list[StepPlan]:
    """Every plan from now to the end."""
    start = len(sim.plans)
    await sim.finish()
    return sim.plans[start:]


# Decode first


@ONE_LOOP
async def test_decode_first_never_leaves_a_row_out() -> None:
    async with simulation(budget_policy=DecodeFirst(tokens=12), pages=200) as sim:
        await decoding_rows(sim, 4)
        sim.send(prompt(60, 7), 3)
        plans = await plans_from_here(sim)
        computing = [plan for plan in plans if plan.prefill]
        assert [prompts_of(plan) for plan in computing] == [8] * 7 + [4], "12 tokens less 4 rows, until 60 are done"
        assert all(plan.decode for plan in computing)


@ONE_LOOP
async def test_decode_first_serves_prompts_however_many_rows_decode() -> None:
    async with simulation(budget_policy=DecodeFirst(tokens=3), pages=200) as sim:
        await decoding_rows(sim, 6)
        late = sim.send(prompt(60, 8), 3)
        await sim.step(6)
        assert late.number in sim.joined(), "six rows are over the budget of three tokens, and yet it has begun"
        assert max(prompts_of(plan) for plan in await plans_from_here(sim)) == 4, "a page at a time"


@ONE_LOOP
async def test_decode_first_cuts_one_request_shorter_than_the_step() -> None:
    async with simulation(budget_policy=DecodeFirst(tokens=20, chunk=6), depth=0) as sim:
        for index in range(4):
            sim.send(prompt(12, index), 1)
        await sim.finish()
        assert sim.shapes()[0] == [(1, 0, 6), (2, 0, 6), (3, 0, 6), (4, 0, 2)]


# Prefill first


@ONE_LOOP
async def test_prefill_first_computes_prompts_alone_and_decodes_when_no_row_is_free() -> None:
    async with simulation(budget_policy=PrefillFirst(), token_budget=8, max_rows=3) as sim:
        for index in range(7):
            sim.send(prompt(8, index), 5, seed=index)
        await sim.finish()
        assert all(bool(plan.prefill) != plan.decode for plan in sim.plans), "prompts or rows, never both"
        first_decode = next(plan.step for plan in sim.plans if plan.decode)
        assert first_decode == 4, "three steps fill the three rows; only then do they decode"


@pytest.mark.parametrize("most", [1, 3, 10**9])
@ONE_LOOP
async def test_prefill_first_lets_rows_decode_within_a_flood_of_prompts(most: int) -> None:
    policy = PrefillFirst(max_prefill_steps=most)
    async with simulation(budget_policy=policy, token_budget=8, pages=200) as sim:
        await decoding_rows(sim, 1)
        for index in range(6):
            sim.send(prompt(40, 1 + index), 2)
        runs, run = [], 0
        for plan in await plans_from_here(sim):
            run = 0 if plan.decode else run + 1
            runs.append(run)
        assert max(runs) == (most if most < 30 else 30), "30 chunks of 8 tokens, in runs of at most so many"


def test_prefill_first_begins_a_new_run_after_a_step_without_prompts() -> None:
    policy = PrefillFirst(max_prefill_steps=2)
    answers = [ask(policy, FakeView(step=step, decoding=1)).decode for step in (1, 2, 4, 5, 6, 7, 8, 9)]
    assert answers == [False, False, False, False, True, False, False, True], "step 3 had none, 6 and 9 were the rows' turn"


# Interval


@pytest.mark.parametrize("every", [1, 2, 5])
@ONE_LOOP
async def test_interval_computes_prompts_in_every_kth_step_at_most(every: int) -> None:
    async with simulation(budget_policy=Interval(every=every), token_budget=16) as sim:
        await decoding_rows(sim, 1, outputs=100)
        for index in range(5):
            sim.send(prompt(20, 1 + index), 3)
            await sim.step(3)
        plans = await plans_from_here(sim)
        assert all(plan.decode for plan in plans if not plan.prefill)
        steps = [plan.step for plan in sim.plans if plan.prefill]
        assert all(later - earlier >= every for earlier, later in pairwise(steps))
        assert any(later - earlier == every for earlier, later in pairwise(steps)), "and no rarer"


@ONE_LOOP
async def test_interval_serves_at_once_when_nothing_decodes() -> None:
    async with simulation(budget_policy=Interval(every=1000), token_budget=8) as sim:
        sim.send(prompt(40, 1), 1)
        sim.send(prompt(24, 2), 1)
        await sim.finish()
        assert len(sim.plans) == 8, "64 prompt tokens, 8 a step, without a pause"
    policy = Interval(every=1000)
    assert [ask(policy, FakeView(step=step)).tokens for step in (1, 2, 3)] == [1024] * 3


@ONE_LOOP
async def test_interval_keeps_the_door_open_until_somebody_comes_in() -> None:
    """All rows are taken when prompts are allowed next; one that is freed is given out soon, not ``every`` steps later."""
    async with simulation(budget_policy=Interval(every=30), max_rows=2) as sim:
        sim.send(prompt(4, 1), 90)
        sim.send(prompt(4, 2), 50)
        late = sim.send(prompt(4, 3), 2)
        await sim.finish()
        assert 51 <= sim.join_of(late.number)[0] <= 56


def test_interval_reopens_only_for_the_step_it_opened() -> None:
    policy = Interval(every=4)
    opened = []
    for step in range(1, 13):
        if ask(policy, FakeView(step=step, decoding=1)).tokens:
            opened.append(step)
        policy.on_step(StepReport(step, 0.0, {1: 5} if step in (1, 9) else {}, [1], {}))
    assert opened == [1, 5, 6, 7, 8, 9], "step 1 was used; 5 to 8 were not; 9 was"


# Service-level objective


COST = LinearCost(fixed=0.004, per_decode_row=1e-4, per_context_token=1e-7, per_prefill_token=2e-5, per_attention_pair=1e-9)


@pytest.mark.parametrize("target", [0.006, 0.0101, 0.015, 0.0199])
@pytest.mark.parametrize(("rows", "context", "start"), [(1, 500, 0), (16, 20_000, 0), (8, 4000, 9000)])
def test_slo_takes_the_largest_chunk_that_meets_the_target(target: float, rows: int, context: int, start: int) -> None:
    running = [FakeRequest(tpot_target=target)] * rows
    if start:
        running.append(FakeRequest(prefill_left=5000, prompt_tokens=start + 5000))
    view = FakeView(decoding=rows, context_tokens=context, running=running, cost=COST, page_size=16)

    def seconds(size: int) -> float:
        return COST.seconds(StepWork(rows, context, [(start, size)]))

    best = max((size for size in range(32, 1024 - rows + 1) if seconds(size) <= target), default=32)
    answer = ask(SLO(), view)
    assert answer.decode
    assert answer.chunk == answer.tokens
    assert best - 16 < answer.tokens <= best, "within a page, and never over"


def test_slo_goes_by_the_tightest_target_of_the_rows_that_decode() -> None:
    def size(*running: FakeRequest, default: float | None = None) -> int:
        view = FakeView(decoding=len(running), running=running, cost=LinearCost(0, 0, 0, 1e-3), page_size=1)
        return ask(SLO(tpot_target=default), view).tokens

    assert size(FakeRequest(0.1), FakeRequest(0.2)) == 100
    assert size(FakeRequest(0.2), FakeRequest(0.1, prefill_left=50)) == 200, "one that does not decode yet has no next token"
    assert size(FakeRequest(0.2), FakeRequest(), default=0.15) == 150
    assert size(FakeRequest(0.2), FakeRequest()) == 200, "who has no target is not asked"
    assert size(FakeRequest(), FakeRequest()) == 1022, "nobody has one: the whole step"


def test_slo_goes_on_with_prompts_when_no_chunk_meets_the_target() -> None:
    view = FakeView(decoding=1, running=[FakeRequest(tpot_target=0.001)], cost=COST)
    assert ask(SLO(least=48), view).tokens == 48


def test_slo_uses_the_given_chunk_until_prompts_have_a_cost() -> None:
    running = [FakeRequest(tpot_target=0.001)]
    for model in (
        LinearCost(0, 0, 0, 0),
        LinearCost(fixed=0.01, per_decode_row=0.001, per_context_token=0, per_prefill_token=0),
    ):
        assert ask(SLO(chunk=96), FakeView(decoding=1, running=running, cost=model)) == PrefillBudget(96, 96)


class NotedSLO(SLO):
    """Writes down the target it went by in each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.targets: dict[int, float | None] = {}

    def budget(self, view: EngineView) -> PrefillBudget:
        targets = [request.tpot_target for request in view.running if not request.prefill_left]
        self.targets[view.step] = min((target for target in targets if target is not None), default=None)
        return super().budget(view)


@ONE_LOOP
async def test_slo_keeps_every_step_of_an_engine_within_the_target() -> None:
    """Rows of different targets, long prompts beside them: no mixed step is forecast to take longer than allowed."""
    cost = LinearCost(fixed=0.001, per_decode_row=1e-4, per_context_token=1e-6, per_prefill_token=1e-4)
    policy = NotedSLO(least=4)
    async with simulation(budget_policy=policy, cost_model=cost, pages=600, max_model_len=400) as sim:
        events = sim.engine.events()
        for index, target in enumerate([0.005, 0.0035, None]):
            sim.send(prompt(4, index), (80, 20, 80)[index], seed=index, tpot_target=target)
        await sim.settle()
        await sim.step(3)
        for index in range(4):
            sim.send(prompt(300, 4 + index), 2)
        await sim.finish()
        events.close()
        mixed = [event async for event in events if isinstance(event, StepCompleted) and event.decode_rows and event.prefill]
        for event in mixed:
            target = policy.targets[event.step]
            if target is not None:
                work = StepWork(event.decode_rows, event.context_tokens, event.prefill)
                assert cost.seconds(work) <= target
                if event.prefill_tokens > 4 and event.step < 40:
                    assert cost.seconds(work) > target - 0.0006, "within a page and the end of a prompt, the time is used"
        assert {policy.targets[event.step] for event in mixed} >= {0.0035, 0.005}


@ONE_LOOP
async def test_slo_learns_from_the_engine_it_runs_in() -> None:
    """Without a given model one is fitted once the policy asks; simulated steps take no time, so it stays at ``chunk``."""
    async with simulation(budget_policy=SLO(tpot_target=0.01, chunk=5)) as sim:
        await decoding_rows(sim, 2)
        sim.send(prompt(30, 5), 2)
        plans = await plans_from_here(sim)
        assert [prompts_of(plan) for plan in plans if plan.prefill] == [5] * 6
        learning = sim.state.costs.learning
        assert learning is not None
        assert learning.observed > 0


# Options


@pytest.mark.parametrize(
    "make",
    [
        lambda: DecodeFirst(tokens=0), lambda: DecodeFirst(chunk=0), lambda: PrefillFirst(max_prefill_steps=0),
        lambda: Interval(every=0), lambda: Interval(chunk=0), lambda: SLO(tpot_target=0.0), lambda: SLO(chunk=0),
        lambda: SLO(least=0),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"at least 1|above 0"):
        make()
