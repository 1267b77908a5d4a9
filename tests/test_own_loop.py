"""``own_loop=True``: the same engine behind the same methods, with the control plane in a thread of its own."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncsched import (
    Backend,
    ConfigError,
    DuplicateRequestError,
    Engine,
    EngineClosedError,
    EngineDeadError,
    EngineDrainingError,
    ExecutorLimits,
    Finished,
    InvalidTokenError,
    PolicyNotFoundError,
    QueueFullError,
    StepResult,
    Submitted,
    TokenizeError,
    WrongLoopError,
)
from asyncsched.testing import ByteTokenizer, SimulatedExecutor, check_invariants, expected_tokens

VOCABULARY = ByteTokenizer().vocab_size
LIMITS = ExecutorLimits(max_rows=8, pages=256, page_size=4, max_model_len=256, vocab_size=VOCABULARY)


class Counting(SimulatedExecutor):
    """Sets ``reached`` when so many steps have been delivered."""

    def __init__(self, steps: int, **options: Any) -> None:
        super().__init__(LIMITS, **options)
        self.steps = steps
        self.reached = threading.Event()

    def start(self, deliver: Any) -> None:
        def counted(result: StepResult) -> None:
            deliver(result)
            if result.step >= self.steps:
                self.reached.set()

        super().start(counted)


@asynccontextmanager
async def engine(executor: SimulatedExecutor | None = None, **options: Any) -> AsyncIterator[Engine]:
    """A small engine in a loop of its own; whatever ran in it must have left nothing behind."""
    executor = executor or SimulatedExecutor(LIMITS, latency=0.002)  # long enough to be caught half-way
    async with Engine(backend=Backend(executor, ByteTokenizer(), "simulated"), own_loop=True, **options) as running:
        yield running
        if running.health().alive:
            await running.drain()
            await running.pause()  # the last steps may still be in flight
            check_invariants(running, idle=True)
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncsched-control"]


async def test_tokens_text_usage_and_times_are_those_of_any_engine() -> None:
    prompt = list(b"the same prompt")
    async with engine() as own, Engine(backend=Backend(SimulatedExecutor(LIMITS), ByteTokenizer(), "simulated")) as plain:
        for options in ({"n": 2}, {"stop": ["e"]}, {"stop_token_ids": list(range(60))}, {"detokenize": False}):
            results = [await one.generate(prompt, max_tokens=40, ignore_eos=True, seed=7, **options) for one in (own, plain)]
            assert results[0].completions == results[1].completions
            assert results[0].usage == results[1].usage
        assert list(results[0].token_ids) == expected_tokens(prompt, 7, 40, VOCABULARY)
        times = results[0].times
        stamps = [times.arrived, times.admitted, times.first_token, times.finished]
        assert stamps == sorted(stamps, key=lambda stamp: stamp or 0.0)


async def test_a_stream_yields_every_token_once() -> None:
    async with engine() as own:
        chunks = []
        async with own.stream("some text", max_tokens=50, ignore_eos=True, seed=3) as stream:
            async for chunk in stream:
                chunks.append(chunk)  # noqa: PERF401 - the reader is what is tested
        assert stream.finish_reason == "length"
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        whole = await own.generate("some text", max_tokens=50, ignore_eos=True, seed=3)
        assert tuple(tokens) == whole.token_ids
        assert "".join(chunk.text for chunk in chunks) == whole.text == stream.text


async def test_many_streams_at_once() -> None:
    async with engine(max_rows=8) as own:
        results = await own.generate([[i, i + 1, i + 2] for i in range(40)], max_tokens=17, ignore_eos=True, seed=1)
        for i, result in enumerate(results):
            assert list(result.token_ids) == expected_tokens([i, i + 1, i + 2], 1, 17, VOCABULARY)


async def test_the_engine_goes_on_while_the_application_blocks_its_loop(no_blocking_calls: Any) -> None:
    executor = Counting(30)
    async with engine(executor) as own:
        stream = own.stream([1, 2, 3], max_tokens=40, ignore_eos=True, seed=2)
        no_blocking_calls.deactivate()
        assert executor.reached.wait(30), "no step completes while the application's loop is blocked"
        no_blocking_calls.activate()
        assert list((await stream.result()).token_ids) == expected_tokens([1, 2, 3], 2, 40, VOCABULARY)


async def test_what_can_be_known_at_once_is_raised_at_once() -> None:
    async with engine() as own:
        with pytest.raises(InvalidTokenError):
            own.stream([VOCABULARY])
        first = own.stream([1, 2], max_tokens=200, ignore_eos=True, request_id="mine")
        with pytest.raises(DuplicateRequestError):
            own.stream([1, 2], request_id="mine")
        first.close()
        with pytest.raises(ConfigError):
            await own.pause("soon")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="unknown kind"):
            await own.set_policy(order="lpm")


async def test_what_the_queue_decides_is_raised_from_the_stream() -> None:
    async with engine(max_queued_requests=1) as own:
        await own.pause()
        streams = [own.stream([1, 2, 3], max_tokens=2, ignore_eos=True) for _ in range(3)]
        with pytest.raises(QueueFullError):
            await streams[2].result()
        own.resume()
        await streams[0].result()


async def test_a_text_that_cannot_be_encoded_ends_its_stream() -> None:
    class Broken(ByteTokenizer):
        def encode(self, *args: Any, **options: Any) -> Any:
            raise ValueError("no")

    async with Engine(backend=Backend(SimulatedExecutor(LIMITS), Broken(), "simulated"), own_loop=True) as own:
        with pytest.raises(TokenizeError):
            await own.generate("text")


async def test_abort_by_id_gives_the_reader_what_there_is() -> None:
    async with engine() as own:
        stream = own.stream([1, 2, 3], max_tokens=250, ignore_eos=True, request_id="mine", seed=5)
        first = await stream.__anext__()
        assert own.abort("mine")
        assert not own.abort("mine")
        result = await stream.result()
        assert result.finish_reason == "abort"
        assert list(result.token_ids) == expected_tokens([1, 2, 3], 5, len(result.token_ids), VOCABULARY)
        assert len(result.token_ids) >= len(first.token_ids)


@pytest.mark.parametrize("way", ["close", "break", "cancel", "drop"])
async def test_however_a_reader_leaves_the_request_is_released(way: str) -> None:
    async with engine() as own:
        stream = own.stream([1, 2, 3], max_tokens=250, ignore_eos=True)
        if way == "close":
            stream.close()
        elif way == "break":
            async with stream:
                async for _ in stream:
                    break
        elif way == "cancel":
            with anyio.CancelScope() as scope:
                async for _ in stream:
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
        else:
            await stream.__anext__()
        del stream
        gc.collect()
        await own.generate([4, 5], max_tokens=1, ignore_eos=True)  # goes over after the release
        statistics = own.statistics()
        assert statistics.finished["abort"] == 1
        assert not statistics.running


async def test_operations() -> None:
    async with engine() as own:
        await own.generate(list(range(20)), max_tokens=4, ignore_eos=True)
        assert await own.flush_cache() == 5
        await own.pause("keep")
        assert own.health().status == "paused"
        waiting = own.stream([1, 2], max_tokens=3, ignore_eos=True, seed=1)
        own.resume()
        assert len((await waiting.result()).token_ids) == 3
        await own.set_policy("lpm")
        with pytest.raises(PolicyNotFoundError):
            await own.set_policy("no-such-policy")
        long = own.stream([1, 2], max_tokens=250, ignore_eos=True)
        await own.pause("abort")
        assert (await long.result()).finish_reason == "abort"
        own.resume()
        await own.drain()
        with pytest.raises(EngineDrainingError):
            own.stream([1])
        own.resume()
        assert (await own.generate([1], max_tokens=1, ignore_eos=True)).finish_reason == "length"
        assert own.limits is LIMITS


async def test_events_come_over() -> None:
    async with engine() as own, own.events() as events:
        await own.generate([1, 2, 3], max_tokens=2, ignore_eos=True, request_id="mine")
        seen = []
        async for event in events:
            seen.append(event)
            if isinstance(event, Finished):
                break
        assert isinstance(seen[0], Submitted)
        assert seen[0].request_id == "mine"


async def test_closing_ends_open_streams() -> None:
    async with engine() as own:
        stream = own.stream([1, 2, 3], max_tokens=250, ignore_eos=True)
        await stream.__anext__()
        await own.aclose()
        with pytest.raises(EngineClosedError):
            await stream.result()
        with pytest.raises(EngineClosedError):
            own.stream([1])


async def test_a_lost_device_is_told_to_everyone() -> None:
    async with engine(SimulatedExecutor(LIMITS, lost_at=5)) as own:
        await own.pause()
        streams = [own.stream([i, 2, 3], max_tokens=250, ignore_eos=True) for i in range(3)]
        own.resume()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="device was lost"):
                await stream.result()
        with pytest.raises(EngineDeadError):
            own.stream([1])
        assert own.health().status == "dead"


async def test_an_executor_that_does_not_start_leaves_no_thread() -> None:
    class Refusing(SimulatedExecutor):
        def start(self, deliver: Any) -> None:
            raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        async with engine(Refusing(LIMITS)):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncsched-control"]


async def test_calls_from_elsewhere_are_refused() -> None:
    async with engine() as own:
        with pytest.raises(WrongLoopError):
            await anyio.to_thread.run_sync(own.statistics)
