"""The engine in numbers: every count against what is known to have happened."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import anyio
import pytest
import trio
from trio.testing import MockClock

from asyncsched import StepFailedError

from .engine_helpers import LIMITS, Recorder, Rig, limits, oracle, read, turns

PROMPT = list(range(60, 77))


async def test_a_fresh_engine(rig: Rig) -> None:
    numbers = rig.statistics
    assert (numbers.total_rows, numbers.free_rows, numbers.running, numbers.waiting) == (8, 8, 0, 0)
    assert (numbers.total_pages, numbers.free_pages, numbers.cached_pages, numbers.limbo_pages) == (64, 64, 0, 0)
    assert (numbers.steps, numbers.steps_in_flight, numbers.submitted, numbers.rejected) == (0, 0, 0, 0)
    assert numbers.finished == {"stop": 0, "length": 0, "abort": 0, "error": 0}
    assert (numbers.hit_rate, numbers.overlap, numbers.device_busy, numbers.device_idle) == (0, 0, 0, 0)


async def test_a_snapshot_stays_as_it_was(rig: Rig) -> None:
    before = rig.statistics
    await rig.engine.generate(PROMPT, max_tokens=3)
    assert before.submitted == 0
    assert before.finished["length"] == 0
    assert rig.statistics.submitted == 1
    with pytest.raises(FrozenInstanceError):
        before.steps = 3  # type: ignore[misc]
    assert all(field.name in (type(before).__doc__ or "") for field in fields(before))


async def test_totals_after_a_known_load(rig: Rig) -> None:
    for _ in range(2):  # the second round finds 16 of 17 prompt tokens in the cache
        await rig.engine.generate(PROMPT, seed=0, max_tokens=5)
    tokens = oracle(PROMPT, 0, 5)
    await rig.engine.generate(PROMPT, seed=0, max_tokens=5, stop_token_ids=[tokens[2]])
    await rig.settle()
    numbers = rig.statistics
    assert numbers.submitted == 3
    assert numbers.finished == {"stop": 1, "length": 2, "abort": 0, "error": 0}
    assert (numbers.prompt_tokens, numbers.cached_tokens) == (51, 32)
    assert numbers.hit_rate == 32 / 51
    assert numbers.generated_tokens == 13
    assert numbers.dropped_tokens == sum(len(plan.prefill) + plan.decode for plan in rig.plans) - 13
    assert numbers.steps == len(rig.plans)
    assert numbers.failed_steps == numbers.slow_steps == numbers.restarts == 0


async def test_the_pool_while_a_request_runs(held: Rig) -> None:
    stream = held.engine.stream(PROMPT, max_tokens=12)  # 17 + 11 stored tokens are seven pages
    await turns()
    numbers = held.statistics
    assert (numbers.running, numbers.free_rows) == (1, 7)
    assert numbers.free_pages == 64 - 7
    assert numbers.steps_in_flight == 2
    await held.step(3)
    assert held.statistics.free_pages == 64 - 7
    stream.close()
    numbers = held.statistics
    assert numbers.running == 0
    assert numbers.free_rows == 7  # the row is named by a step in flight
    assert numbers.limbo_pages > 0
    assert numbers.free_pages + numbers.cached_pages + numbers.limbo_pages == 64
    await held.step(2)
    numbers = held.statistics
    assert (numbers.free_rows, numbers.limbo_pages) == (8, 0)
    assert numbers.cached_pages == 4  # whole pages of the prompt; only the third output token completes a fifth


async def test_running_and_waiting() -> None:
    async with Rig(limits(max_rows=3), hold=True) as rig:
        streams = [rig.engine.stream([i], max_tokens=5) for i in range(10)]
        assert (rig.statistics.running, rig.statistics.waiting) == (0, 10)
        await turns()
        assert (rig.statistics.running, rig.statistics.waiting) == (3, 7)
        more = rig.engine.stream([99], max_tokens=5, n=4)
        assert rig.statistics.waiting == 11
        await turns()
        assert (rig.statistics.running, rig.statistics.waiting) == (3, 11)
        assert rig.statistics.submitted == 11
        more.close()
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_busy_and_idle_seconds_on_a_virtual_clock(depth: int) -> None:
    async def main() -> None:
        async with Rig(latency=0.5, depth=depth, guard=float("inf"), slow_step_seconds=0.4) as rig:
            await rig.engine.generate([1], max_tokens=10)
            numbers = rig.statistics
            assert numbers.device_busy == 5.0
            assert numbers.device_idle == 0.0
            assert numbers.slow_steps == 10
            await anyio.sleep(100)
            await rig.engine.generate([1], max_tokens=2)
            assert rig.statistics.device_idle == 0.0  # there was nothing to do
            assert rig.statistics.device_busy == 6.0
            assert rig.statistics.overlap == (0 if depth < 2 else 10 / 12)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_dropped_tokens_are_the_price_of_depth() -> None:
    tokens = oracle(PROMPT, 0, 20)
    for depth in (0, 1, 2, 3):
        async with Rig(depth=depth) as rig:
            await rig.engine.generate(PROMPT, seed=0, max_tokens=20, stop_token_ids=[tokens[4]])
            await rig.settle()
            assert rig.statistics.dropped_tokens <= depth
            assert rig.statistics.generated_tokens == 5


async def test_failures_and_restarts_are_counted() -> None:
    async with Rig(faults={2: RuntimeError("broken")}) as rig:
        with pytest.raises(StepFailedError):
            await rig.engine.generate([1], max_tokens=5)
        await rig.settle()
        assert rig.statistics.failed_steps == 1
        assert rig.statistics.finished["error"] == 1


async def test_evictions_are_counted() -> None:
    async with Rig(limits(pages=12), low_watermark=0.0, high_watermark=0.0) as rig:
        await rig.engine.generate(list(range(32)), max_tokens=1)
        await rig.settle()
        assert (rig.statistics.cached_pages, rig.statistics.free_pages) == (8, 4)
        await rig.engine.generate(list(range(100, 124)), max_tokens=1)
        assert rig.statistics.evicted_pages == 2


async def test_the_watermark_is_kept() -> None:
    async with Rig(limits(pages=40), low_watermark=0.25, high_watermark=0.5) as rig:
        for start in range(0, 600, 30):
            await rig.engine.generate(list(range(start, start + 30)), max_tokens=1)
            await rig.settle()
            assert rig.statistics.free_pages >= 10
        assert rig.statistics.evicted_pages > 0


async def test_policy_faults_are_counted_by_hook() -> None:
    class Clumsy(Recorder):
        def on_submit(self, request: object) -> None:
            raise ValueError("no")

        def budget(self, view: object) -> str:
            return "plenty"

    async with Rig(policy=Clumsy()) as rig:
        result = await rig.engine.generate([1], seed=0, max_tokens=3)
        assert result.token_ids == oracle([1], 0, 3)
        faults = rig.statistics.policy_faults
        assert faults["on_submit"] == 1
        assert faults["budget"] >= 1
        assert set(faults) == {"on_submit", "budget"}


async def test_delivered_tokens_are_generated_tokens(rig: Rig) -> None:
    delivered = 0
    for i in range(12):
        stream = rig.engine.stream([i], seed=i, max_tokens=i)
        delivered += sum(len(chunk.token_ids) for chunk in await read(stream))
    assert delivered == rig.statistics.generated_tokens == sum(range(12))
    assert rig.engine.limits == LIMITS
