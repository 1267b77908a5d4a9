"""A single wait: it ends with its value, whoever comes first, and a cancelled one says so."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched.bridge import LoopBinding
from asyncsched.detokenizer import Detokenizer
from asyncsched.testing import ByteTokenizer

from .engine_helpers import Rig, turns

TOKENIZER = ByteTokenizer()


async def test_a_value_that_comes_later_ends_the_wait() -> None:
    waiter, got = LoopBinding().new_waiter(), []

    async def wait() -> None:
        got.append(await waiter)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await turns()
        assert not waiter.done()
        waiter.set_result(7)
        assert waiter.done()
        assert got == []  # the waiting task has its turn later
    assert got == [7]


async def test_a_value_that_is_there_is_returned_at_once() -> None:
    waiter = LoopBinding().new_waiter()
    waiter.set_result(None)
    assert waiter.done()
    assert await waiter is None


async def test_a_cancelled_wait_is_done() -> None:
    waiter = LoopBinding().new_waiter()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                await waiter

            tasks.start_soon(wait)
            await turns()
            scope.cancel()
    assert scope.cancelled_caught
    assert waiter.done()


async def test_a_stream_closed_before_its_reader_has_the_token_delivers_nothing(held: Rig) -> None:
    stream = held.engine.stream([1, 2, 3], max_tokens=50)
    await held.step()
    assert len((await anext(stream)).token_ids) == 1
    got: list[object] = []

    async def read() -> None:
        got.extend([chunk async for chunk in stream])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await turns()
        stream._submission.wake(7)
        stream.close()
    assert got == []


@pytest.mark.parametrize("skip", [True, False], ids=["skip_special", "keep_special"])
@given(tokens=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20), strips=st.booleans())
def test_one_token_at_a_time_gives_the_same_pieces(skip: bool, tokens: list[int], strips: bool) -> None:
    tokenizer = ByteTokenizer(strips_leading_space=strips)
    one, many = (Detokenizer(tokenizer, skip_special_tokens=skip) for _ in range(2))
    for token in tokens:
        assert one.feed_one(token) == many.feed([token])
    assert one.finish() == many.finish()
