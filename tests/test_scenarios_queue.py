"""The queue: who is in it, in which order it empties, and what it says of itself.

Cases from reports and tests of other engines; each test names where it comes from.
"""

from __future__ import annotations

import pytest

from asyncsched import StepCompleted
from asyncsched.testing import ScriptedRun, check_invariants

from .control_helpers import prompt, simulation
from .engine_helpers import ASYNCIO, limits, oracle

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3])


@ASYNCIO
async def test_what_was_added_waits_and_can_be_found() -> None:
    """vllm-project/vllm, scheduler: N added requests wait, each known by its id; each that ends is one less."""
    async with ScriptedRun() as run:
        run.executor.unhold()
        await run.engine.pause()
        streams = [await run.submit([index, 1], max_tokens=2, request_id=f"r{index}") for index in range(10)]
        state = run.engine._running().control.state
        assert run.engine.statistics().waiting == 10
        assert list(state.live) == [f"r{index}" for index in range(10)]
        for left, index in zip(range(9, -1, -1), [3, 0, 9, 5, 1, 2, 8, 4, 7, 6], strict=True):
            assert run.engine.abort(f"r{index}")
            await run.settle()
            assert run.engine.statistics().waiting == left
            assert len(state.live) == left
            assert streams[index].finish_reason == "abort"
        run.engine.resume()
        check_invariants(run.engine, idle=True)
        assert run.plans == []


@ASYNCIO
@DEPTHS
async def test_one_token_requests_among_others(depth: int) -> None:
    """sgl-project/sglang 10871: a request that ends in its first prefill leaked its slot in a mixed batch."""
    async with simulation(depth=depth, max_rows=3, token_budget=12, chunk_cap=5) as sim:
        sim.send(prompt(9), 20, seed=1)
        for index in range(15):
            sim.send(prompt(1 + index % 7, index), 1, seed=index)
            await sim.step(index % 3)
        await sim.finish()


@ASYNCIO
@DEPTHS
async def test_a_step_tells_of_the_work_that_was_in_it(depth: int) -> None:
    """vllm-project/vllm, output processing: prompts count once, at their prefill; afterwards only decoding does."""
    async with simulation(depth=depth, chunk_cap=8, token_budget=16) as sim, sim.engine.events() as events:
        sim.send(prompt(20), 5)
        await sim.finish()
        events.close()
        told = [(event.prefill_tokens, event.decode_rows) async for event in events if isinstance(event, StepCompleted)]
        assert told == [(8, 0), (8, 0), (4, 0), (0, 1), (0, 1), (0, 1), (0, 1)]


@ASYNCIO
async def test_unchunked_prompts_are_refused_or_served() -> None:
    """sgl-project/sglang 9142: a prompt over the prefill limit, with chunking off, crashed the scheduler."""
    async with ScriptedRun(limits(max_model_len=64), token_budget=8, chunked_prefill=False) as run:
        run.executor.unhold()
        for length in (7, 8, 9, 63):
            result = await run.engine.generate(list(range(length)), seed=1, max_tokens=1)
            assert result.token_ids == oracle(range(length), 1, 1)
        with pytest.raises(ValueError, match="leaves room for 63"):
            run.engine.stream(list(range(64)), max_tokens=1)


@ASYNCIO
async def test_a_batch_larger_than_everything() -> None:
    """sgl-project/sglang 30294, 2812: a thousand prompts through three rows, in order, all rows in use."""
    async with simulation(max_rows=3, pages=24, token_budget=16, chunk_cap=6, depth=2) as sim:
        for index in range(1000):
            sim.send(prompt(1 + index % 5, index % 7), 1 + index % 3, seed=index % 50)
        await sim.settle()
        busiest = 0
        for _ in range(60):
            await sim.step()
            busiest = max(busiest, sim.statistics.running)
        assert busiest == 3
        await sim.finish()
        assert sim.joined() == list(range(1, 1001))
