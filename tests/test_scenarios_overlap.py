"""Steps that overlap: outputs equal the serial run, decisions do not depend on time, nothing hangs.

Cases from reports of other engines; each test names the report it comes from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import anyio
import pytest
import trio
from trio.testing import MockClock

from asyncsched import Backend, Engine, ExecutorLimits, StepPlan
from asyncsched.testing import ScriptedRun, SimulatedExecutor, check_invariants

from .control_helpers import digest, owners, plain, prompt, simulation, traffic
from .engine_helpers import ASYNCIO, limits, oracle

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3])


def virtually(main: Callable[[], Awaitable[None]], clock: MockClock | None = None) -> None:
    """Run in virtual time: the clock jumps as soon as everybody waits."""
    trio.run(main, clock=clock or MockClock(autojump_threshold=0))


def simulated(
    capacities: ExecutorLimits, latency: float | Callable[[StepPlan], float], **options: object
) -> tuple[Engine, SimulatedExecutor]:
    budget = options.setdefault("token_budget", 64)
    assert isinstance(budget, int)
    executor = SimulatedExecutor(capacities, latency=latency, token_budget=budget)
    return Engine(backend=Backend(executor, None, "simulated"), **options), executor  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 2])
def test_five_minutes_of_poisson_arrivals(depth: int) -> None:
    """sgl-project/sglang 2312: at two requests a second the overlapped scheduler crashed in the device."""
    random = Random(depth)
    engine, _executor = simulated(limits(), 0.2, depth=depth, chunk_cap=10)

    async def one(index: int) -> None:
        tokens, count = prompt(random.randint(1, 40), index % 11), random.randint(1, 25)
        result = await engine.generate(tokens, max_tokens=count, seed=index)
        assert result.token_ids == oracle(tokens, index, count)

    async def main() -> None:
        async with engine:
            async with anyio.create_task_group() as tasks:
                while anyio.current_time() < 300:
                    tasks.start_soon(one, engine.statistics().submitted)
                    await anyio.sleep(random.expovariate(2.0))
            assert engine.statistics().submitted > 500
            check_invariants(engine, idle=True)

    virtually(main)


@pytest.mark.parametrize("reserve", ["full", "expected"])
def test_ten_thousand_steps_with_random_delays(reserve: str) -> None:
    """sgl-project/sglang 31072, 26380: a copy that came late deadlocked the device or changed the output."""
    random = Random(1)
    engine, _executor = simulated(
        limits(pages=40), lambda plan: random.choice([0.0, 0.0, 0.001, 0.02, 0.5]), depth=2, reserve=reserve
    )
    half = 5_000

    async def client(first: int) -> None:
        index = first
        while engine.statistics().steps < half:
            tokens, count = prompt(1 + index % 17, index % 5), 20 + index % 60
            result = await engine.generate(tokens, max_tokens=count, seed=index % 40)
            assert result.token_ids == oracle(tokens, index % 40, count)
            index += 1000

    async def main() -> None:
        async with engine:
            async with anyio.create_task_group() as tasks:
                for index in range(5):
                    tasks.start_soon(client, index)
            assert engine.statistics().steps >= half
            assert engine.statistics().stuck_warnings == 0
            check_invariants(engine, idle=True)

    virtually(main)


@ASYNCIO
async def test_streams_and_answers_in_turn() -> None:
    """sgl-project/sglang 26454, 20315: streaming, then not, one after the other, until all ranks were stuck."""
    async with Engine(backend=Backend(SimulatedExecutor(), None, "simulated"), depth=2) as engine:
        for index in range(500):
            tokens, expected = [index % 7, 5, 9], oracle([index % 7, 5, 9], index % 20, 3)
            with anyio.fail_after(20):
                if index % 2:
                    assert (await engine.generate(tokens, max_tokens=3, seed=index % 20)).token_ids == expected
                else:
                    stream = engine.stream(tokens, max_tokens=3, seed=index % 20)
                    assert tuple([token async for chunk in stream for token in chunk.token_ids]) == expected
        await engine.pause("finish")
        check_invariants(engine, idle=True)


def test_planners_whose_clocks_disagree_make_the_same_plans() -> None:
    """sgl-project/sglang 27221, 27164: ranks whose local clocks disagreed scheduled differently and deadlocked."""

    def plans_of(start: float, seconds: float) -> list[tuple[object, ...]]:
        clock = MockClock(autojump_threshold=0)
        executor = SimulatedExecutor(limits(max_rows=3, pages=24), latency=seconds, token_budget=20)
        engine = Engine(
            backend=Backend(executor, None, "simulated"),
            token_budget=20,
            chunk_cap=8,
            reserve="expected",
            policy="lpm",
            queue_timeout=1e9,
            request_timeout=1e9,
        )

        async def main() -> None:
            clock.jump(start)
            async with engine:
                streams = [
                    engine.stream(prompt(1 + index % 13, index % 4), max_tokens=30, seed=index, deadline=1e8)
                    for index in range(20)
                ]
                for stream in streams:
                    await stream.result()

        virtually(main, clock)
        return [plain(plan) for plan in executor.plans]

    usual = plans_of(0.0, 0.03)
    assert len(usual) > 100
    assert plans_of(123_456.7, 0.03) == usual
    assert plans_of(5.0, 2.5) == usual


@ASYNCIO
@DEPTHS
async def test_the_same_arrivals_give_the_same_plans(depth: int) -> None:
    """sgl-project/mini-sglang 113; sgl-project/sglang 27221: the same arrivals give the same plans, run by run."""

    async def run() -> str:
        async with simulation(depth=depth, reserve="expected", pages=24, max_rows=4, token_budget=24, chunk_cap=9) as sim:
            await traffic(sim, 11 + depth)
            await sim.finish()
            return digest(sim.plans)

    assert await run() == await run()


@ASYNCIO
@DEPTHS
async def test_aborts_in_any_order_while_steps_are_in_flight(depth: int) -> None:
    """vllm-project/vllm, async scheduling: each keeps exactly the tokens that arrived before its abort."""
    random = Random(depth)
    async with ScriptedRun(depth=depth) as run:
        streams = [await run.submit([index, 1, 2], max_tokens=40, seed=index) for index in range(8)]
        await run.steps(3)
        order = list(range(8))
        random.shuffle(order)
        kept: dict[int, int] = {}
        for index in order:
            kept[index] = streams[index].usage.completion_tokens
            run.engine.abort(streams[index].request_id)
            await run.steps(random.randint(0, 2))
        await run.steps(4)
        for index, stream in enumerate(streams):
            result = await stream.result()
            assert result.token_ids == oracle([index, 1, 2], index, kept[index])
            assert result.finish_reason == "abort"
        check_invariants(run.engine, idle=True)


@ASYNCIO
@pytest.mark.parametrize("depth", [2, 3])
async def test_steps_are_planned_before_any_output_arrives(depth: int) -> None:
    """vllm-project/vllm, async scheduling: a request is planned again before its first token is known."""
    async with ScriptedRun(depth=depth) as run:
        await run.submit([1, 2, 3], max_tokens=9)
        assert run.engine.statistics().generated_tokens == 0
        assert [plan.decode for plan in run.plans] == [False] + [True] * (depth - 1)
        assert all(not plan.joins for plan in run.plans[1:]), "a steady step changes nothing"


@ASYNCIO
@DEPTHS
async def test_a_preempted_requests_token_in_flight_is_counted_once(depth: int) -> None:
    """vllm-project/vllm 48245, 46066: a token of a preempted request came back and broke the counters."""
    async with simulation(depth=depth) as sim:
        sent = sim.send(prompt(5), 15, seed=2)
        await sim.settle()
        await sim.step(5)
        received = sent.stream.usage.completion_tokens
        in_flight = sim.statistics.steps_in_flight
        sim.state.preempt(sim.state.running()[0])
        sim.engine._running().control.planner.wake.set()
        await sim.finish()
        assert sim.statistics.dropped_tokens == in_flight, "sampled for the row it gave up: dropped, and sampled again"
        assert sim.statistics.generated_tokens == 15
        assert received <= 15


@ASYNCIO
@DEPTHS
async def test_each_row_leaves_once_and_each_end_is_told_once(depth: int) -> None:
    """LMCache 2356: a finished id was reported to the worker twice."""
    async with simulation(depth=depth, max_rows=3, token_budget=16, chunk_cap=5, reserve="expected", pages=30) as sim:
        await traffic(sim, 3)
        await sim.finish()
        await sim.step()
        left = sum(len(plan.leaves) for plan in sim.plans)
        assert left <= len(sim.joined())
        assert len(owners(sim.plans, sim.plans[-1].step)) == len(sim.joined()) - left


@ASYNCIO
async def test_a_long_prompt_and_a_short_one_at_every_chunk() -> None:
    """sgl-project/sglang 35537: what arrived during a last chunk waited until somebody finished."""
    for chunk in range(1, 5):
        async with ScriptedRun(depth=2, token_budget=32, chunk_cap=16) as run:
            long = await run.submit(list(range(64)), max_tokens=30)
            plan = await run.to_chunk(long, chunk)
            short = await run.submit([7, 8], max_tokens=1)
            await run.steps(1)
            assert run.chunks_of(short)[0].step <= plan.step + 2


@ASYNCIO
async def test_nothing_runs_and_somebody_waits_never() -> None:
    """vllm-project/vllm 45387, 45388: nothing ran, requests waited, for ever."""

    class Nobody:
        def order(self, waiting: object, view: object) -> list[object]:
            return []

    async with ScriptedRun(policy=Nobody()) as run:
        streams = [await run.submit([index, 3], max_tokens=2, seed=index) for index in range(3)]
        for _ in range(20):
            assert run.engine.statistics().steps_in_flight or not run.engine.statistics().waiting
            await run.steps()
        assert [stream.finish_reason for stream in streams] == ["length"] * 3
