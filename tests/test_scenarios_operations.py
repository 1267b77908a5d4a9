"""Pauses, time limits, slow and stuck steps, health: all in virtual time or step by step.

Cases from reports of other engines; each test names the report it comes from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import anyio
import pytest
import trio
from trio.testing import MockClock

from asyncsched import Backend, Engine, RequestView, StepPlan
from asyncsched.errors import (
    ConfigError,
    DeadlineExpiredError,
    EngineDeadError,
    EngineDrainingError,
    QueueTimeoutError,
    RequestTimeoutError,
    StepFailedError,
)
from asyncsched.testing import ScriptedRun, SimulatedExecutor, check_invariants

from .engine_helpers import ASYNCIO, limits, oracle, turns

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3])


def virtually(main: Callable[[], Awaitable[None]]) -> None:
    """Run in virtual time: the clock jumps as soon as everybody waits."""
    trio.run(main, clock=MockClock(autojump_threshold=0))


def engine_with(
    latency: float | Callable[[StepPlan], float], *, faults: dict[int, BaseException] | None = None, **options: Any
) -> Engine:
    rows = options.pop("rows", 8)
    executor = SimulatedExecutor(limits(max_rows=rows), latency=latency, faults=faults)
    return Engine(backend=Backend(executor, None, "simulated"), **options)


# Pause, resume, flush, drain


@ASYNCIO
@DEPTHS
@pytest.mark.parametrize("mode", ["keep", "finish", "abort"])
async def test_pause_and_resume_when_idle_twice(depth: int, mode: Literal["keep", "finish", "abort"]) -> None:
    """sgl-project/sglang 20272: a pause with an empty batch crashed."""
    async with ScriptedRun(depth=depth) as run:
        for _ in range(2):
            await run.engine.pause(mode)
            await run.engine.pause(mode)
            assert run.engine.health().status == "paused"
            await run.engine.flush_cache()
            run.engine.resume()
            run.engine.resume()
            assert run.engine.health().status == "idle"
            stream = await run.submit([1, 2, 3], seed=1, max_tokens=3)
            await run.steps(5)
            assert (await stream.result()).token_ids == oracle([1, 2, 3], 1, 3)
        check_invariants(run.engine, idle=True)


@ASYNCIO
@DEPTHS
async def test_paused_in_the_middle_of_a_prompt_cancelled_resumed_drained(depth: int) -> None:
    """sgl-project/sglang 21705: an in-place pause leaked."""
    for chunk in range(1, 5):
        async with ScriptedRun(depth=depth, token_budget=16, chunk_cap=8) as run:
            victim = await run.submit(list(range(40)), max_tokens=5)
            other = await run.submit(list(range(40)), seed=2, max_tokens=5)
            await run.to_chunk(victim, chunk)
            run.executor.unhold()
            await run.engine.pause("keep")
            plans = len(run.plans)
            late = await run.submit([9, 9], seed=3, max_tokens=2)
            assert run.engine.health().blocked == "paused"
            victim.close()
            await run.settle()
            assert len(run.plans) == plans, "nothing is planned while paused"
            run.engine.resume()
            await run.engine.drain()
            assert (await other.result()).token_ids == oracle(range(40), 2, 5)
            assert (await late.result()).token_ids == oracle([9, 9], 3, 2)
            await run.engine.pause()
            check_invariants(run.engine, idle=True)


@ASYNCIO
@DEPTHS
async def test_pausing_to_finish_lets_nobody_in(depth: int) -> None:
    """vllm-project/vllm, sleep: running requests end first, waiting ones stay and are served afterwards."""
    async with ScriptedRun(limits(max_rows=2), depth=depth) as run:
        streams = [await run.submit([index, 4], seed=index, max_tokens=6) for index in range(4)]
        await run.steps(2)
        run.executor.unhold()
        await run.engine.pause("finish")
        assert [stream.finish_reason for stream in streams] == ["length", "length", None, None]
        assert run.engine.statistics().waiting == 2
        run.engine.resume()
        for index, stream in enumerate(streams):
            assert (await stream.result()).token_ids == oracle([index, 4], index, 6)


@ASYNCIO
async def test_pausing_to_abort_ends_everyone_and_nothing_is_delivered_later() -> None:
    """vllm-project/vllm, sleep: outputs queued before are not delivered after the wake-up; sessions are cancelled."""
    async with ScriptedRun(limits(max_rows=2), depth=2) as run:
        streams = [await run.submit([index, 4], seed=index, max_tokens=60) for index in range(4)]
        await run.steps(5)
        received = [stream.usage.completion_tokens for stream in streams]
        run.executor.unhold()
        await run.engine.pause("abort")
        run.engine.resume()
        await turns(20)
        assert [stream.finish_reason for stream in streams] == ["abort"] * 4
        assert [len((await stream.result()).token_ids) for stream in streams] == received
        check_invariants(run.engine, idle=True)


@ASYNCIO
async def test_a_pause_that_is_given_up_while_it_waits() -> None:
    """sgl-project/sglang 20272: pause, resume and pause again before the first has come through."""
    async with ScriptedRun(depth=2) as run:
        stream = await run.submit([1, 2], seed=1, max_tokens=10)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.engine.pause, "finish")
            await run.settle()
            run.engine.resume()
            await run.settle()
            run.executor.unhold()
            assert (await stream.result()).token_ids == oracle([1, 2], 1, 10)
        with anyio.move_on_after(0):
            await run.engine.pause("keep")
        with pytest.raises(ConfigError, match="pause mode"):
            await run.engine.pause("now")  # type: ignore[arg-type]
        run.engine.resume()
        assert run.engine.health().status == "idle"


@ASYNCIO
@DEPTHS
async def test_drain(depth: int) -> None:
    """sgl-project/sglang 12707: draining ends what is live, refuses what is new, and can be undone."""
    async with ScriptedRun(limits(max_rows=2), depth=depth) as run:
        streams = [await run.submit([index, 4], seed=index, max_tokens=5) for index in range(5)]
        run.executor.unhold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.engine.drain)
            await anyio.lowlevel.checkpoint()
            with pytest.raises(EngineDrainingError, match="resume"):
                run.engine.stream([1], max_tokens=1)
        assert [stream.finish_reason for stream in streams] == ["length"] * 5
        assert run.engine.health().status == "draining"
        await run.engine.drain()
        run.engine.resume()
        assert (await run.engine.generate([1], seed=4, max_tokens=2)).token_ids == oracle([1], 4, 2)


@ASYNCIO
async def test_draining_a_dead_engine_returns() -> None:
    """sgl-project/sglang 514: whoever waits for the engine must hear of its end."""
    executor = SimulatedExecutor(hold=True, lost_at=3)
    async with Engine(backend=Backend(executor, None, "simulated")) as engine:
        stream = engine.stream([1, 2], max_tokens=9)
        await turns()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.drain)
            tasks.start_soon(engine.pause, "finish")
            await turns()
            executor.unhold()
        with pytest.raises(EngineDeadError):
            await stream.result()
        health = engine.health()
        assert (health.status, health.alive) == ("dead", False)
        assert "device lost" in health.reason
    assert engine.health().status == "closed"


# Time limits


def test_time_limits_have_their_own_errors_and_compute_nothing() -> None:
    """sgl-project/sglang 27221 and vllm-project/vllm 9428: limits end a request, and nothing is computed for it."""

    async def main() -> None:
        engine = engine_with(1.0, rows=1)
        async with engine:
            hog = engine.stream([1, 2], seed=1, max_tokens=50)
            await anyio.sleep(0.5)
            queued = engine.stream([3] * 5, max_tokens=5, queue_timeout=4)
            late = engine.stream([4] * 5, max_tokens=5, deadline=6)
            slow = engine.stream([5] * 5, max_tokens=5, timeout=9)
            for stream, error, at in [
                (queued, QueueTimeoutError, 4.5),
                (late, DeadlineExpiredError, 6.5),
                (slow, RequestTimeoutError, 9.5),
            ]:
                with pytest.raises(error) as caught:
                    await stream.result()
                assert type(caught.value) is error
                assert isinstance(caught.value, TimeoutError)
                assert anyio.current_time() == pytest.approx(at)
                assert stream.usage.completion_tokens == 0
            assert engine.statistics().waiting == 0
            assert (await hog.result()).token_ids == oracle([1, 2], 1, 50)
            assert engine.statistics().prompt_tokens == 2, "only the first prompt was ever admitted"
            check_invariants(engine, idle=True)

    virtually(main)


def test_a_request_timeout_ends_a_running_request_and_frees_its_row() -> None:
    """sgl-project/sglang 36333: what ran into its limit held its slot for minutes."""

    async def main() -> None:
        engine = engine_with(1.0, rows=1, request_timeout=5.5)
        async with engine:
            stream = engine.stream([1, 2], seed=1, max_tokens=50)
            got: list[int] = []
            with pytest.raises(RequestTimeoutError, match=r"5\.5"):  # noqa: PT012 - it is raised by the last turn of the loop
                async for chunk in stream:
                    got += chunk.token_ids
            assert got == list(oracle([1, 2], 1, 5)), "what had arrived was delivered"
            assert (await engine.generate([3], seed=2, max_tokens=3)).token_ids == oracle([3], 2, 3)
            assert engine.health().status == "idle"
            check_invariants(engine, idle=True)

    virtually(main)


def test_limits_of_requests_go_before_the_engines() -> None:
    """vllm-project/vllm 4293: a limit is the caller's to choose."""

    async def main() -> None:
        engine = engine_with(1.0, rows=1, queue_timeout=2.0)
        async with engine:
            hog = engine.stream([1, 2], max_tokens=10)
            patient = engine.stream([3], seed=3, max_tokens=2, queue_timeout=100)
            with pytest.raises(QueueTimeoutError):
                await engine.generate([4], max_tokens=2)
            assert (await patient.result()).token_ids == oracle([3], 3, 2)
            await hog.result()
            at_once = engine.stream([5], max_tokens=2, timeout=0)
            with pytest.raises(RequestTimeoutError):
                await at_once.result()

    virtually(main)


def test_a_deadline_does_not_end_what_runs() -> None:
    """A deadline is for what waits: a request that got its row in time is served."""

    async def main() -> None:
        engine = engine_with(1.0)
        async with engine:
            assert len((await engine.generate([1], max_tokens=20, deadline=3, queue_timeout=3)).token_ids) == 20

    virtually(main)


# Slow and stuck steps


def test_an_hour_of_idling_then_a_request() -> None:
    """sgl-project/sglang 22779, 3752, 3836: the watchdog fired although nothing was the matter."""

    async def main() -> None:
        engine = engine_with(0.1, slow_step_seconds=5.0)
        async with engine:
            for _ in range(3):
                await anyio.sleep(3600)
                assert engine.health().status == "idle"
                await engine.generate([1, 2, 3], max_tokens=3)
            assert (engine.statistics().stuck_warnings, engine.statistics().slow_steps) == (0, 0)

    virtually(main)


def test_steady_traffic_with_pauses_raises_no_alarm() -> None:
    """sgl-project/sglang 22779: steps that are each quick, at any distance from each other, are no alarm."""

    async def main() -> None:
        engine = engine_with(4.9, slow_step_seconds=5.0, depth=2)
        async with engine:
            for pause in (0.0, 1.0, 4.9, 5.0, 5.1, 9.7, 12.0):
                await anyio.sleep(pause)
                await engine.generate([1, 2, 3], max_tokens=7)
            assert (engine.statistics().stuck_warnings, engine.statistics().slow_steps) == (0, 0)

    virtually(main)


def test_a_slow_step_warns_and_kills_nothing() -> None:
    """vllm-project/vllm 4293, 2067: a long step was taken for a dead engine."""

    async def main() -> None:
        engine = engine_with(lambda plan: 500.0 if plan.step == 3 else 0.1, slow_step_seconds=30.0)
        async with engine:
            async with anyio.create_task_group() as tasks:

                async def look() -> None:
                    await anyio.sleep(100)
                    health = engine.health()
                    assert (health.status, health.alive, health.steps, health.in_flight) == ("stalled", True, 2, 2)
                    assert health.oldest_step_seconds == pytest.approx(99.8, abs=0.3)
                    assert engine.statistics().stuck_warnings >= 2

                tasks.start_soon(look)
                result = await engine.generate([1, 2, 3], seed=1, max_tokens=8)
            assert result.token_ids == oracle([1, 2, 3], 1, 8)
            assert engine.statistics().slow_steps == 1
            assert 15 <= engine.statistics().stuck_warnings <= 17
            assert engine.health().status == "idle"

    virtually(main)


def test_a_step_that_never_ends_is_an_alarm_and_can_be_closed() -> None:
    """sgl-project/sglang 3752, 3836: a stuck device went unnoticed."""

    async def main() -> None:
        engine = engine_with(lambda plan: 1e9 if plan.step == 2 else 0.1, slow_step_seconds=10.0)
        await engine.start()
        stream = engine.stream([1, 2, 3], max_tokens=8)
        await anyio.sleep(65)
        assert engine.statistics().stuck_warnings >= 5
        assert engine.health().status == "stalled"
        with pytest.raises(RequestTimeoutError):
            await engine.generate([4], max_tokens=1, timeout=5)
        await engine.aclose()
        with pytest.raises(Exception, match="closed"):
            await stream.result()

    virtually(main)


def test_an_hour_of_traffic() -> None:
    """sgl-project/sglang 12707, 8439: hangs after hours; bursts, silence, slow steps and cancellations for an hour."""

    async def main() -> None:
        engine = engine_with(
            lambda plan: 20.0 if plan.step % 101 == 0 else 0.8, slow_step_seconds=10.0, reserve="expected", policy="lpm"
        )
        served = 0

        async def one(index: int) -> None:
            nonlocal served
            tokens, count = [index % 5] * (1 + index % 30), 1 + index % 37
            with anyio.move_on_after(9.0 if index % 6 == 0 else 1e6):
                assert (await engine.generate(tokens, seed=index % 40, max_tokens=count)).token_ids == oracle(
                    tokens, index % 40, count
                )
                served += 1

        async with engine:
            async with anyio.create_task_group() as tasks:
                for burst in range(36):
                    for index in range(14):
                        tasks.start_soon(one, burst * 14 + index)
                    await anyio.sleep(100.0 if burst % 3 else 60.0)
            assert anyio.current_time() > 3000
            assert served >= 36 * 14 * 5 // 6
            assert engine.statistics().slow_steps > 3
            check_invariants(engine, idle=True)

    virtually(main)


# Failures


def test_every_waiter_hears_of_a_failed_step_at_once() -> None:
    """sgl-project/sglang 514; vllm-project/vllm 5901, 5060, 7356, 2197: requests hung, or failed for ever."""

    async def main() -> None:
        engine = engine_with(1.0, faults={11: ValueError("eleven")}, depth=2)
        heard: list[float] = []

        async def one(index: int) -> None:
            with pytest.raises(StepFailedError, match="eleven") as caught:
                await engine.generate([index], max_tokens=20)
            assert isinstance(caught.value.__cause__, ValueError)
            heard.append(anyio.current_time())

        async with engine:
            start = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                for index in range(8):
                    tasks.start_soon(one, index)
            assert [at - start for at in heard] == [11.0] * 8
            assert engine.health().alive
            for index in range(3):
                assert (await engine.generate([index], seed=index, max_tokens=4)).token_ids == oracle([index], index, 4)
            check_invariants(engine, idle=True)

    virtually(main)


def test_a_lost_device_is_told_once_with_its_cause_and_refuses_at_once() -> None:
    """vllm-project/vllm, async API: the forward pass raises in step 11."""

    async def main() -> None:
        executor = SimulatedExecutor(latency=1.0, lost_at=11)
        engine = Engine(backend=Backend(executor, None, "simulated"), depth=2)
        async with engine:
            streams = [engine.stream([index], max_tokens=60) for index in range(12)]
            for stream in streams:
                with pytest.raises(EngineDeadError, match="step 11") as caught:
                    await stream.result()
                assert "device lost" in str(caught.value.__cause__)
            assert anyio.current_time() < 12
            for _ in range(3):
                with pytest.raises(EngineDeadError, match="step 11"):
                    engine.stream([1], max_tokens=1)
        assert executor.closed, "its memory is released"

    virtually(main)


# Why nothing happens


@ASYNCIO
async def test_health_says_what_holds_the_queue_up() -> None:
    """vllm-project/vllm 35541, 45387: requests waited, and nothing said why."""

    class Reluctant:
        def order(self, waiting: Sequence[RequestView], view: object) -> list[RequestView]:
            return []

    async with ScriptedRun(limits(max_rows=1)) as run:
        assert (run.engine.health().status, run.engine.health().blocked) == ("idle", "")
        kept = [await run.submit([index], max_tokens=9) for index in range(2)]
        await run.steps()
        health = run.engine.health()
        assert (health.status, health.blocked, health.running, health.waiting) == ("ok", "rows", 1, 1)
        run.executor.unhold()
        await run.engine.pause()
        assert (run.engine.health().status, run.engine.health().blocked) == ("paused", "paused")
        run.engine.resume()
        await run.engine.drain()
    async with ScriptedRun(limits(pages=8)) as run:
        kept = [await run.submit([1] * 16, max_tokens=17), await run.submit([2] * 5, max_tokens=9)]
        await run.steps()
        assert run.engine.health().blocked == "pages"
    async with ScriptedRun(token_budget=8) as run:
        kept = [await run.submit([1] * 60, max_tokens=2), await run.submit([2] * 5, max_tokens=9)]
        await run.steps()
        assert run.engine.health().blocked == "token budget"
    async with ScriptedRun(policy=Reluctant()) as run:
        kept = [await run.submit([index], max_tokens=9) for index in range(2)]
        await run.steps()
        assert run.engine.health().blocked == "policy"
        assert run.engine.statistics().running == 1, "the oldest is served when nothing else runs"
        del kept


@ASYNCIO
async def test_progress_can_be_read_from_health() -> None:
    """vllm-project/vllm, async API: a health check passes, and says so when the engine is dead."""
    async with ScriptedRun() as run:
        seen = [run.engine.health().steps]
        stream = await run.submit([1], max_tokens=6)
        for _ in range(5):
            await run.steps()
            seen.append(run.engine.health().steps)
        assert seen == [0, 1, 2, 3, 4, 5]
        assert run.engine.health().alive
        stream.close()
    assert not run.engine.health().alive
