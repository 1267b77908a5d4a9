"""Giving up, ids, and ends that race each other.

Cases from reports of other engines; each test names the report it comes from. Every way to give up at every
stage is in ``test_cancellation.py``.
"""

from __future__ import annotations

import asyncio
from random import Random

import anyio
import pytest

from asyncsched import Finished
from asyncsched.errors import DuplicateRequestError, TokenizeError
from asyncsched.testing import ScriptedRun, check_invariants

from .engine_helpers import ASYNCIO, FailingTokenizer, Rig, limits, oracle, read, tokens_of, turns, until

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3])


@ASYNCIO
@DEPTHS
async def test_the_device_never_sees_what_was_cancelled_in_the_queue(depth: int) -> None:
    """vllm-project/vllm 7111, 9428: prompts that were cancelled in the queue were computed all the same."""
    async with ScriptedRun(depth=depth, token_budget=8) as run:
        first = await run.submit([1, 2, 3, 4, 5, 6], max_tokens=3)
        marked = [await run.submit([900 + index] * 9, max_tokens=3, n=1 + index % 3) for index in range(6)]
        before = len(run.plans)
        for index, stream in enumerate(marked):
            stream.close() if index % 2 else run.engine.abort(stream.request_id)
        await run.steps(10)
        assert first.finish_reason == "length"
        computed = {token for plan in run.plans[before:] for chunk in plan.prefill for token in chunk.tokens.tolist()}
        assert computed.isdisjoint(range(900, 906))


@ASYNCIO
@DEPTHS
async def test_steps_stop_within_the_depth_of_a_cancel(depth: int) -> None:
    """sgl-project/sglang 3520, 8339: generation went on after the client had gone, or for seconds."""
    async with ScriptedRun(depth=depth) as run:
        stream = await run.submit([1, 2], max_tokens=100)
        while stream.usage.completion_tokens < 3:
            await run.steps()
        in_flight = run.engine.statistics().steps_in_flight
        plans = len(run.plans)
        stream.close()
        await run.steps(in_flight)
        assert len(run.plans) == plans
        assert in_flight <= max(1, depth)
        check_invariants(run.engine, idle=True)


@ASYNCIO
async def test_one_id_aborted_and_used_again_a_thousand_times() -> None:
    """vllm-project/vllm 23697: a late abort hit the newcomer with the same id."""
    random = Random(4)
    async with Rig(depth=2, max_preemptions=0) as rig:
        for index in range(1000):
            stream = rig.engine.stream([index % 9, 2], seed=index % 50, max_tokens=6, request_id="same")
            for _ in range(random.randrange(6)):
                await anyio.lowlevel.checkpoint()
            if index % 10:
                rig.engine.abort("same") if index % 2 else stream.close()
            else:
                assert (await stream.result()).token_ids == oracle([index % 9, 2], index % 50, 6)
        assert rig.statistics.submitted == 1000


@ASYNCIO
async def test_two_live_requests_with_one_id() -> None:
    """sgl-project/sglang 19035; vllm-project/vllm 15041, 10583: the second one crashed the engine or the first."""
    async with ScriptedRun() as run:
        first = await run.submit([1, 2, 3], seed=1, max_tokens=9, request_id="x")
        for _ in range(5):
            with pytest.raises(DuplicateRequestError, match="'x'"):
                await run.submit([4], max_tokens=2, request_id="x")
            await run.steps()
        await run.steps(12)
        assert (await first.result()).token_ids == oracle([1, 2, 3], 1, 9)
        assert run.engine.statistics().submitted == 1
        again = await run.submit([4], seed=3, max_tokens=2, request_id="x")
        await run.steps(4)
        assert (await again.result()).token_ids == oracle([4], 3, 2)


@ASYNCIO
async def test_ids_that_begin_alike() -> None:
    """sgl-project/sglang 25561, 30912, 32237: an abort by prefix ended other people's requests."""
    ids = ["a", "ab", "abc", "", "a*", "A", "a-1", "1", "request-1"]
    async with ScriptedRun(depth=2) as run:
        streams = {name: await run.submit([7, 7], max_tokens=5, seed=3, request_id=name) for name in ids[:8]}
        assert run.engine.abort("a")
        assert not run.engine.abort("a")
        assert not run.engine.abort("no such")
        await run.steps(8)
        assert {name: stream.finish_reason for name, stream in streams.items() if name != "a"} == dict.fromkeys(
            [name for name in ids[:8] if name != "a"], "length"
        )


@ASYNCIO
@DEPTHS
async def test_an_end_and_a_cancel_in_one_step(depth: int) -> None:
    """vllm-project/vllm, async API: an end that races a cancel wins; a stopped sequence ignores an abort."""
    async with ScriptedRun(depth=depth) as run:
        ended = await run.submit([1, 2], seed=1, max_tokens=2)
        await run.steps(2)
        assert ended.finish_reason == "length"
        assert not run.engine.abort(ended.request_id)
        ended.close()
        assert ended.finish_reason == "length"
        assert run.engine.statistics().finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
        cancelled = await run.submit([1, 2], seed=1, max_tokens=2)
        await run.steps(1)
        run.executor.step()  # its last step completes, and before the loop hears of it the request is given up
        cancelled.close()
        await run.settle()
        assert cancelled.finish_reason == "abort"
        assert cancelled.usage.completion_tokens == 1
        check_invariants(run.engine, idle=True)


@ASYNCIO
async def test_a_tokenizer_that_fails_leaves_no_trace() -> None:
    """sgl-project/sglang 28380: an error between registration and dispatch leaked the request's state."""
    async with Rig(tokenizer=FailingTokenizer()) as rig:
        for _ in range(20):
            with pytest.raises(TokenizeError):
                await rig.engine.generate("poison", max_tokens=2, request_id="p")
        run = rig.engine._running().control
        assert not run.state.live
        assert not run.state.waiting
        assert rig.statistics.submitted == 20


@ASYNCIO
async def test_every_tenth_of_a_hundred_is_cancelled() -> None:
    """vllm-project/vllm, async API: cancelled ones raise, the others are unaffected, the ids work again."""
    async with Rig(depth=2, token_budget=64) as rig:

        async def one(index: int) -> tuple[int, ...]:
            n = 3 if index % 20 == 0 else 1
            stream = rig.engine.stream([index, 5], seed=index, max_tokens=8, n=n, request_id=f"id-{index}")
            async with stream:
                chunks = await read(stream)
            assert sum(chunk.finish_reason is not None for chunk in chunks) == n, "each completion ends once"
            for completion in range(n):
                mine = [chunk for chunk in chunks if chunk.index == completion]
                assert [chunk.finish_reason is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]
                assert tokens_of(chunks, completion) == oracle([index, 5], index + completion, 8)
            return tokens_of(chunks)

        tasks = [asyncio.ensure_future(one(index)) for index in range(100)]
        await turns(3)
        for task in tasks[::10]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [index % 10 == 0 for index in range(100)]
        check_invariants(rig.engine)
        assert [await one(index) for index in range(0, 100, 10)] == [
            oracle([index, 5], index, 8) for index in range(0, 100, 10)
        ]


@ASYNCIO
async def test_a_reader_that_returns_early() -> None:
    """vllm-project/vllm, async API: the consumer returns after 20 tokens; the request disappears."""

    async def twenty(rig: Rig) -> int:
        got = 0
        async with rig.engine.stream([1, 2, 3], max_tokens=100, request_id="early") as stream:
            async for chunk in stream:
                got += len(chunk.token_ids)
                if got >= 20:
                    return got
        return got

    async with Rig() as rig:
        for _ in range(3):
            assert 20 <= await twenty(rig) < 100
            assert rig.statistics.running == 0


@ASYNCIO
async def test_cancelled_at_every_turn_of_a_submission() -> None:
    """vllm-project/vllm 57061: cancelled while the submission was awaited, it was registered for ever."""
    cancelled = 0
    for count in range(25):
        async with Rig(limits(vocab_size=FailingTokenizer().vocab_size), tokenizer=FailingTokenizer(), depth=2) as rig:
            task = asyncio.ensure_future(rig.engine.generate("some text", max_tokens=4, n=2))
            await turns(count)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            await until(lambda rig=rig: not rig.engine._running().control.state.live)  # type: ignore[misc]
    assert cancelled > 3


@ASYNCIO
@DEPTHS
async def test_the_observer_learns_the_final_reason(depth: int) -> None:
    """sgl-project/sglang 40360: the hook of an abort saw the state before it."""
    async with ScriptedRun(depth=depth) as run, run.engine.events() as events:
        waiting = run.engine.stream([3] * 40, max_tokens=9)
        waiting.close()
        running = await run.submit([4, 5], max_tokens=9)
        await run.steps(3)
        received = running.usage.completion_tokens
        run.engine.abort(running.request_id)
        await run.settle()
        events.close()
        ends = [
            (event.number, event.finish_reason, event.output_tokens) async for event in events if isinstance(event, Finished)
        ]
        assert ends == [(1, "abort", 0), (2, "abort", received)]


@ASYNCIO
async def test_stamps_of_requests_that_were_given_up() -> None:
    """vllm-project/vllm, output processing: intervals of aborted requests are undefined where nothing happened."""
    async with ScriptedRun(depth=1, token_budget=4) as run:
        decoding = await run.submit([1, 2], max_tokens=9)
        await run.steps(3)
        prefilling = await run.submit([3] * 12, max_tokens=9)
        await run.steps()
        queued = await run.submit([4] * 9, max_tokens=9)
        for stream in (queued, prefilling, decoding):
            stream.close()
        await run.settle()
        assert (queued.times.admitted, queued.times.first_token, queued.times.ttft) == (None, None, None)
        assert prefilling.times.admitted is not None
        assert (prefilling.times.first_token, prefilling.times.ttft) == (None, None)
        assert decoding.times.ttft is not None
        assert all(stream.times.e2e is not None for stream in (queued, prefilling, decoding))
        await run.steps(3)
