"""Every way to give up a request, at every stage of its life: it is released at once and nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asyncsched import TokenStream
from asyncsched.testing import ByteTokenizer, check_invariants

from .engine_helpers import (
    ASYNCIO,
    LETTERS,
    BlockedTokenizer,
    Rig,
    assert_threads_end,
    limits,
    oracle,
    read,
    tokens_of,
    turns,
    until,
)

LONG = list(range(300, 340))
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3])


class Boom(Exception):
    """Raised in the body of a loop."""


# Ways to give up


async def leave_block(rig: Rig, stream: TokenStream) -> None:
    async with stream:
        pass


async def raise_in_block(rig: Rig, stream: TokenStream) -> None:
    with pytest.raises(Boom):
        async with stream:
            raise Boom


async def close(rig: Rig, stream: TokenStream) -> None:
    stream.close()
    stream.close()


async def aclose_twice(rig: Rig, stream: TokenStream) -> None:
    await stream.aclose()
    await stream.aclose()


async def aclose_without_waiting(rig: Rig, stream: TokenStream) -> None:
    coroutine = stream.aclose()
    with pytest.raises(StopIteration):
        coroutine.send(None)  # done without a single suspension


async def cancel_reader(rig: Rig, stream: TokenStream) -> None:
    async def reader() -> None:
        async for _ in stream:
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        await turns(20)
        tasks.cancel_scope.cancel()


async def cancel_waiter(rig: Rig, stream: TokenStream) -> None:
    async def waiter() -> None:
        await stream.result()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiter)
        await turns(20)
        tasks.cancel_scope.cancel()


async def cancelled_scope(rig: Rig, stream: TokenStream) -> None:
    with anyio.CancelScope() as scope:
        async with stream:
            scope.cancel()
            await read(stream)
    assert scope.cancelled_caught


async def abort(rig: Rig, stream: TokenStream) -> None:
    assert rig.engine.abort(stream.request_id)
    assert not rig.engine.abort(stream.request_id)


WAYS: list[Callable[[Rig, TokenStream], Awaitable[None]]] = [
    leave_block, raise_in_block, close, aclose_twice, aclose_without_waiting, cancel_reader, cancel_waiter, cancelled_scope,
    abort,
]  # fmt: skip


# Stages of a request's life


async def just_submitted(rig: Rig, n: int) -> TokenStream:
    return rig.engine.stream(LONG, seed=1, max_tokens=50, n=n)


async def queued(rig: Rig, n: int) -> TokenStream:
    stream = rig.engine.stream(LONG, seed=1, max_tokens=50, n=n)
    await turns()
    return stream


async def mid_chunk(rig: Rig, n: int) -> TokenStream:
    stream = await queued(rig, n)
    await rig.step()
    assert stream.usage.completion_tokens == 0
    return stream


async def decoding(rig: Rig, n: int) -> TokenStream:
    stream = await queued(rig, n)
    while stream.usage.completion_tokens < 5:
        await rig.step()
    return stream


STAGES: list[Callable[[Rig, int], Awaitable[TokenStream]]] = [just_submitted, queued, mid_chunk, decoding]


def name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


async def assert_released(rig: Rig, stream: TokenStream, depth: int) -> None:
    """Rows and pages are free as soon as the steps in flight have completed, and no further step is planned."""
    await turns(5)
    received = stream.usage.completion_tokens
    plans = len(rig.plans)
    in_flight = rig.statistics.steps_in_flight
    assert in_flight <= max(1, depth)
    assert rig.statistics.running == 0
    assert rig.statistics.waiting == 0
    check_invariants(rig.engine)
    await rig.step(in_flight)
    assert rig.released
    assert len(rig.plans) == plans
    assert stream.usage.completion_tokens == received  # what was in flight is not delivered
    check_invariants(rig.engine, idle=True)


@ASYNCIO
@pytest.mark.parametrize(("depth", "n"), [(0, 1), (1, 3), (2, 1), (2, 3), (3, 3)])
@pytest.mark.parametrize("stage", STAGES, ids=name)
@pytest.mark.parametrize("way", WAYS, ids=name)
async def test_giving_up_frees_everything(
    way: Callable[[Rig, TokenStream], Awaitable[None]], stage: Callable[[Rig, int], Awaitable[TokenStream]], n: int, depth: int
) -> None:
    async with Rig(limits(max_rows=4), hold=True, depth=depth, chunk_cap=16, token_budget=32) as rig:
        stream = await stage(rig, n)
        await way(rig, stream)
        await assert_released(rig, stream, depth)
        assert stream.finish_reason == "abort"
        if way is not abort:
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert rig.statistics.finished["abort"] == n
        await rig.serves()


@pytest.mark.parametrize("stage", STAGES, ids=name)
@pytest.mark.parametrize("way", WAYS, ids=name)
async def test_giving_up_in_every_event_loop(
    way: Callable[[Rig, TokenStream], Awaitable[None]], stage: Callable[[Rig, int], Awaitable[TokenStream]]
) -> None:
    async with Rig(hold=True, chunk_cap=16) as rig:
        stream = await stage(rig, 1)
        await way(rig, stream)
        await assert_released(rig, stream, 2)
        await rig.serves()


@DEPTHS
async def test_giving_up_a_request_that_waits_for_a_row(depth: int) -> None:
    async with Rig(limits(max_rows=1), hold=True, depth=depth) as rig:
        runner = rig.engine.stream(LONG, seed=0, max_tokens=12)
        await turns()
        waiters = [rig.engine.stream([i], seed=0, max_tokens=5) for i in range(3)]
        await turns()
        assert (rig.statistics.running, rig.statistics.waiting) == (1, 3)
        waiters[1].close()
        assert rig.statistics.waiting == 2
        rig.executor.unhold()
        assert tokens_of(await read(runner)) == oracle(LONG, 0, 12)
        assert tokens_of(await read(waiters[0])) == oracle([0], 0, 5)
        assert tokens_of(await read(waiters[2])) == oracle([2], 0, 5)
        assert len([join for plan in rig.plans for join in plan.joins]) == 3


async def test_what_was_given_up_at_once_does_not_count_as_waiting() -> None:
    async with Rig(max_queued_requests=3) as rig:
        for i in range(9):  # more than may wait, but none of them does
            rig.engine.stream([i], max_tokens=5).close()
            assert rig.statistics.waiting == 0
        await rig.serves()


@DEPTHS
async def test_the_others_are_not_disturbed(depth: int) -> None:
    async with Rig(hold=True, depth=depth, chunk_cap=8) as rig:
        streams = [rig.engine.stream(LONG[: 20 + i], seed=i, max_tokens=20) for i in range(8)]
        for victim in range(0, 8, 2):
            await rig.step(2)
            streams[victim].close()
            check_invariants(rig.engine)
        rig.executor.unhold()
        for i in range(1, 8, 2):
            assert tokens_of(await read(streams[i])) == oracle(LONG[: 20 + i], i, 20)


# Loops


async def test_break_without_a_block_releases(held: Rig) -> None:
    await prime(held)
    async for _ in held.engine.stream(LONG, max_tokens=50):
        break
    gc.collect()
    await until(lambda: not held.statistics.running)
    await held.step(held.statistics.steps_in_flight)
    assert held.released


async def test_break_inside_a_block_releases_at_once(held: Rig) -> None:
    await prime(held)
    async with held.engine.stream(LONG, max_tokens=50) as stream:
        async for chunk in stream:
            assert len(chunk.token_ids) == 1
            break
    assert held.statistics.running == 0


async def test_an_exception_in_the_body_is_not_wrapped(held: Rig) -> None:
    await prime(held)

    async def body() -> None:
        async with held.engine.stream(LONG, max_tokens=50) as stream:
            async for _ in stream:
                raise Boom

    with pytest.raises(Boom):
        await body()
    assert held.statistics.running == 0


async def prime(rig: Rig) -> None:
    """One step may complete as soon as it is planned."""
    rig.executor.step()


async def test_nothing_is_delivered_after_a_close(held: Rig) -> None:
    stream = held.engine.stream(LONG, seed=0, max_tokens=50)
    await held.step(4)
    stream.close()  # four tokens are unread
    assert await read(stream) == []
    await held.step(2)
    assert await read(stream) == []
    assert stream.usage.completion_tokens == 4
    assert stream.text == ""


async def test_an_aborted_request_delivers_what_it_had(held: Rig) -> None:
    stream = held.engine.stream(LONG, seed=0, max_tokens=50, n=2, request_id="a")
    await held.step(4)
    assert held.engine.abort("a")
    await held.step(2)
    chunks = await read(stream)
    for index in (0, 1):
        count = len(tokens_of(chunks, index))
        assert count in (3, 4)
        assert tokens_of(chunks, index) == oracle(LONG, index, count)
    assert [chunk.finish_reason for chunk in chunks] == ["abort", "abort"]


async def test_an_abort_wakes_the_reader(held: Rig) -> None:
    chunks = []

    async def reader() -> None:
        chunks.extend(await read(held.engine.stream([1], max_tokens=50, request_id="a")))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        await turns()
        assert held.engine.abort("a")
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [((), "abort")]


async def test_an_abort_ends_a_generate_with_what_there_is(held: Rig) -> None:
    async with anyio.create_task_group() as tasks:

        async def generate() -> None:
            result = await held.engine.generate([1, 2], seed=0, max_tokens=50, request_id="g")
            assert result.finish_reason == "abort"
            assert result.token_ids == oracle([1, 2], 0, 3)

        tasks.start_soon(generate)
        await turns()
        await held.step(3)
        assert held.engine.abort("g")


async def test_ids_must_match_exactly(held: Rig) -> None:
    streams = {name: held.engine.stream([1], seed=0, max_tokens=9, request_id=name) for name in ("ab", "abc", "b", "request-1")}
    await held.step(2)
    for other in ("a", "", "AB", "bc", "request-", "request-10"):
        assert not held.engine.abort(other)
    assert held.engine.abort("ab")
    held.executor.unhold()
    assert len(tokens_of(await read(streams["ab"]))) == 2
    for name in ("abc", "b", "request-1"):
        assert tokens_of(await read(streams[name])) == oracle([1], 0, 9)
    assert not held.engine.abort("abc")  # it has ended


@DEPTHS
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no_cache"])
async def test_an_id_can_be_used_again_at_once(depth: int, prefix_cache: bool) -> None:
    async with Rig(limits(max_rows=2, pages=32), depth=depth, prefix_cache=prefix_cache) as rig:
        for round_ in range(100):  # 300 with the three event loops
            stream = rig.engine.stream([round_, *LONG[:9]], seed=round_, max_tokens=50, request_id="same")
            await turns(round_ % 7)
            assert rig.engine.abort("same")
        stream = rig.engine.stream(LONG, seed=5, max_tokens=6, request_id="same")
        assert tokens_of(await read(stream)) == oracle(LONG, 5, 6)


@ASYNCIO
@DEPTHS
async def test_three_hundred_aborts_of_one_id(depth: int) -> None:
    async with Rig(limits(max_rows=3, pages=40), depth=depth, chunk_cap=4) as rig:
        for round_ in range(300):
            stream = rig.engine.stream(LONG[: 1 + round_ % 40], seed=round_, max_tokens=50, request_id="same")
            await turns(round_ % 13)
            rig.engine.abort("same")
            chunks = await read(stream)
            assert chunks[-1].finish_reason == "abort"
            tokens = tokens_of(chunks)
            assert tokens == oracle(LONG[: 1 + round_ % 40], round_, 50)[: len(tokens)]


# Dropped streams


@pytest.mark.parametrize("reads", [0, 1, 3])
async def test_a_dropped_stream_is_released(held: Rig, reads: int) -> None:
    stream = held.engine.stream(LONG, max_tokens=50)
    await turns()
    for _ in range(reads):
        held.executor.step()
        await anext(stream)
    del stream
    gc.collect()
    await until(lambda: not held.statistics.running and not held.statistics.waiting)
    await held.step(held.statistics.steps_in_flight)
    assert held.released


async def test_a_stream_dropped_in_another_thread_is_released(held: Rig) -> None:
    streams = [held.engine.stream(LONG, max_tokens=50) for _ in range(4)]
    await held.step(3)
    await anyio.to_thread.run_sync(streams.clear)
    await until(lambda: not held.statistics.running)
    await held.step(held.statistics.steps_in_flight)
    assert held.released


async def test_a_stream_in_a_reference_cycle_is_released(held: Rig) -> None:
    cycle: list[Any] = [held.engine.stream(LONG, max_tokens=50)]
    cycle.append(cycle)
    await held.step(2)
    del cycle
    gc.collect()
    await until(lambda: not held.statistics.running)


async def test_a_stream_may_outlive_its_engine() -> None:
    async with Rig(hold=True, check=False) as rig:
        stream = rig.engine.stream(LONG, max_tokens=50)
        await rig.step(2)
    stream.close()
    await stream.aclose()
    del stream
    gc.collect()


# Cancellation at every point


async def consume(rig: Rig, prompt: Any, done: list[bool]) -> None:
    async with rig.engine.stream(prompt, seed=0, max_tokens=6, n=2, stop="never") as stream:
        async for _ in stream:
            await anyio.lowlevel.checkpoint()
    done.append(True)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5, 6], "a text"], ids=["tokens", "text"])
async def test_a_scope_cancelled_after_any_number_of_turns(depth: int, prompt: Any) -> None:
    async with Rig(limits(vocab_size=26), tokenizer=LETTERS, depth=depth, chunk_cap=3) as rig:
        done: list[bool] = []
        for count in range(400):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume, rig, prompt, done)
                await turns(count)
                tasks.cancel_scope.cancel()
            await until(lambda: rig.released and not rig.statistics.steps_in_flight)
            check_invariants(rig.engine, idle=True)
            if done:
                break
        assert done
        assert count > 8


@ASYNCIO
@pytest.mark.parametrize("depth", [0, 2])
async def test_a_task_cancelled_after_any_number_of_turns(depth: int) -> None:
    async with Rig(limits(vocab_size=26), tokenizer=LETTERS, depth=depth, chunk_cap=3) as rig:
        for count in range(400):
            done: list[bool] = []
            task = asyncio.create_task(consume(rig, [1, 2, 3, 4, 5, 6], done))
            await turns(count)
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: rig.released and not rig.statistics.steps_in_flight)
            check_invariants(rig.engine, idle=True)
            if done:
                break
            assert task.cancelled()
        assert done
        assert count > 8


async def test_a_cancelled_batch_releases_every_request(held: Rig) -> None:
    async def batch() -> None:
        await held.engine.generate([[i] for i in range(20)], max_tokens=20, n=2)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batch)
        await turns()
        await held.step(3)
        assert (held.statistics.running, held.statistics.waiting) == (8, 32)
        tasks.cancel_scope.cancel()
    assert (held.statistics.running, held.statistics.waiting) == (0, 0)


@ASYNCIO
async def test_native_timeouts_release(held: Rig) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await held.engine.generate(LONG, max_tokens=50)
    assert held.statistics.running == held.statistics.waiting == 0
    stream = held.engine.stream(LONG, max_tokens=50)
    await held.step(2)
    await anext(stream)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await read(stream)
    assert held.statistics.running == 0
    stream = held.engine.stream(LONG, max_tokens=50)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.001)
    assert held.statistics.running == held.statistics.waiting == 0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(held.engine.generate(LONG, max_tokens=50), 0.001)
    assert held.statistics.running == held.statistics.waiting == 0


async def test_a_deadline_of_anyio_releases(held: Rig) -> None:
    with anyio.move_on_after(0.001) as scope:
        await held.engine.generate(LONG, max_tokens=50)
    assert scope.cancelled_caught
    assert held.statistics.running == held.statistics.waiting == 0


# Before and while tokenising


async def test_giving_up_before_the_text_is_looked_at() -> None:
    tokenizer = BlockedTokenizer()
    tokenizer.open.set()
    async with Rig(limits(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer) as rig:
        stream = rig.engine.stream("some text", max_tokens=9, request_id="t")
        assert rig.engine.abort("t")
        again = rig.engine.stream("other text", max_tokens=2, request_id="t", ignore_eos=True)
        assert await read(stream) == []
        assert stream.finish_reason == "abort"
        assert len(tokens_of(await read(again))) == 2
        assert tokenizer.texts == ["other text"]


@pytest.mark.parametrize("way", WAYS, ids=name)
async def test_giving_up_while_the_text_is_tokenised(way: Callable[[Rig, TokenStream], Awaitable[None]]) -> None:
    tokenizer = BlockedTokenizer()
    async with Rig(limits(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer) as rig:
        try:
            stream = rig.engine.stream("some text", max_tokens=9, n=2)
            await until(tokenizer.entered.is_set)
            await way(rig, stream)
            assert stream.finish_reason == "abort"
            assert await read(stream) == []
            again = rig.engine.stream("more", seed=0, max_tokens=3, request_id=stream.request_id, ignore_eos=True)
        finally:
            tokenizer.open.set()
        assert tokens_of(await read(again)) == oracle([256, *b"more"], 0, 3, tokenizer.vocab_size)
        assert not rig.plans[0].joins[0].row
        assert sum(len(plan.joins) for plan in rig.plans) == 1


async def test_a_stream_dropped_while_its_text_is_tokenised_is_released() -> None:
    tokenizer = BlockedTokenizer()
    async with Rig(limits(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer) as rig:
        try:
            stream = rig.engine.stream("some text", max_tokens=9, request_id="x")
            await until(tokenizer.entered.is_set)
            del stream
            gc.collect()
            await until(lambda: not rig.engine.abort("x"))
        finally:
            tokenizer.open.set()
        await turns(200)
        assert not rig.plans


async def test_a_result_that_is_aborted_while_its_text_is_tokenised() -> None:
    tokenizer = BlockedTokenizer()
    async with Rig(limits(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer) as rig:
        stream = rig.engine.stream("some text", max_tokens=9, n=2)
        await until(tokenizer.entered.is_set)
        rig.engine.abort(stream.request_id)
        result = await stream.result()
        tokenizer.open.set()
        assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in result.completions] == [
            (0, "", (), "abort"),
            (1, "", (), "abort"),
        ]
        assert result.usage.total_tokens == 0


async def test_a_stress_of_everything_at_once(rig: Rig) -> None:
    """Many readers that give up after different numbers of chunks, while others finish."""
    finished: list[int] = []

    async def reader(index: int) -> None:
        prompt = LONG[: 1 + index % 30]
        count = 0
        async with rig.engine.stream(prompt, seed=index, max_tokens=20) as stream:
            async for _ in stream:
                count += 1
                if index % 3 and count == index % 11:
                    return
        assert stream.finish_reason == "length"
        finished.append(index)

    async with anyio.create_task_group() as tasks:
        for index in range(120):
            tasks.start_soon(reader, index)
            if index % 10 == 0:
                await turns(3)
            check_invariants(rig.engine)
    assert {index for index in range(120) if index % 3 == 0} <= set(finished)


def test_threads_do_not_pile_up() -> None:
    """Tokenising that was given up leaves no worker thread behind once the loop has ended."""
    before = set(threading.enumerate())

    async def main() -> None:
        tokenizer = ByteTokenizer()
        async with Rig(limits(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer) as rig:
            for i in range(30):
                rig.engine.stream(f"text {i}", max_tokens=4).close()
                await turns(i)

    anyio.run(main)
    assert_threads_end(before)
