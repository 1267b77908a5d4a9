"""The loop stays free: tokenising happens elsewhere, long texts hold up nobody, and idle means idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from blockbuster import BlockingError

from asyncsched import EngineDeadError, RequestTooLargeError
from asyncsched.testing import ByteTokenizer

from .engine_helpers import ASYNCIO, GUARD, BlockedTokenizer, Rig, limits, oracle, read, tokens_of, turns, until

LONG = "x" * 32_768
VOCAB = ByteTokenizer().vocab_size


def roomy() -> BlockedTokenizer:
    """Only texts that say so are slow."""
    return BlockedTokenizer(blocks=lambda text: text.startswith("slow") or len(text) >= 32_768)


@ASYNCIO
async def test_the_watchdog_of_these_tests_bites() -> None:
    """A policy that sleeps is caught, so the other tests would notice a control plane that does."""

    class Sleepy:
        def order(self, waiting: Sequence[object], view: object) -> Sequence[object]:
            time.sleep(0)
            return waiting

    async with Rig(policy=Sleepy(), strict_policies=True, check=False) as rig:
        with pytest.raises(EngineDeadError, match="control task failed") as caught:
            await rig.engine.generate([1])
        assert isinstance(caught.value.__cause__, BlockingError)


@pytest.mark.parametrize("length", [1, 1_000, 32_767, 32_768, 100_000])
async def test_texts_are_never_tokenised_on_the_loop(length: int) -> None:
    tokenizer = BlockedTokenizer()
    tokenizer.open.set()
    async with Rig(limits(vocab_size=VOCAB, max_model_len=120_000, pages=64), tokenizer=tokenizer) as rig:
        stream = rig.engine.stream("x" * length, max_tokens=1, ignore_eos=True)
        with suppress(RequestTooLargeError):  # which shows once it is tokenised
            await read(stream)
        assert tokenizer.texts
        assert threading.get_ident() not in tokenizer.threads


async def test_chats_are_never_rendered_on_the_loop() -> None:
    tokenizer = BlockedTokenizer()
    tokenizer.open.set()
    async with Rig(limits(vocab_size=VOCAB), tokenizer=tokenizer) as rig:
        messages = [{"role": "user", "content": "hi"}]
        batch: Any = [messages] * 3
        await rig.engine.chat(messages, max_tokens=1)
        await rig.engine.generate(batch, max_tokens=1)
        assert tokenizer.threads
        assert threading.get_ident() not in tokenizer.threads


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_a_long_text_does_not_hold_up_a_short_one(kind: str) -> None:
    """Long texts have workers of their own. (These would fit the model, but not the pool, as shows once they are tokens.)"""
    tokenizer = roomy()
    async with Rig(limits(vocab_size=VOCAB, max_model_len=40_000), tokenizer=tokenizer) as rig:
        prompt: Any = LONG if kind == "text" else [{"role": "user", "content": LONG}]
        stuck = [rig.engine.stream(prompt, max_tokens=1) for _ in range(5)]
        try:
            await until(tokenizer.entered.is_set)
            for text in ("short", "another"):
                result = await rig.engine.generate(text, seed=0, max_tokens=3, ignore_eos=True)
                assert result.token_ids == oracle([256, *text.encode()], 0, 3, VOCAB)
            assert [stream.finish_reason for stream in stuck] == [None] * 5
        finally:
            tokenizer.open.set()
        for stream in stuck:
            with pytest.raises(RequestTooLargeError):
                await read(stream)


async def test_token_prompts_do_not_wait_for_a_tokenizer() -> None:
    tokenizer = roomy()
    async with Rig(limits(vocab_size=VOCAB), tokenizer=tokenizer) as rig:
        stuck = rig.engine.stream("slow", seed=0, max_tokens=2, ignore_eos=True)
        try:
            await until(tokenizer.entered.is_set)
            result = await rig.engine.generate([1, 2], seed=0, max_tokens=3, ignore_eos=True)
            assert result.token_ids == oracle([1, 2], 0, 3, VOCAB)
        finally:
            tokenizer.open.set()
        assert tokens_of(await read(stuck)) == oracle([256, *b"slow"], 0, 2, VOCAB)


async def test_running_streams_go_on_while_a_text_is_tokenised() -> None:
    tokenizer = roomy()
    async with Rig(limits(vocab_size=VOCAB), tokenizer=tokenizer, hold=True) as rig:
        stream = rig.engine.stream([1, 2], seed=0, max_tokens=20, ignore_eos=True)
        await rig.step(2)
        stuck = rig.engine.stream("slow", seed=0, max_tokens=2, ignore_eos=True)
        try:
            await until(tokenizer.entered.is_set)
            rig.executor.unhold()
            assert tokens_of(await read(stream)) == oracle([1, 2], 0, 20, VOCAB)
        finally:
            tokenizer.open.set()
        assert len(tokens_of(await read(stuck))) == 2


async def test_short_texts_are_tokenised_together() -> None:
    calls: list[int] = []

    class Counting(ByteTokenizer):
        def encode(self, texts: Sequence[str], *, add_special_tokens: bool, limit: int) -> list[list[int] | int]:
            calls.append(len(texts))
            return super().encode(texts, add_special_tokens=add_special_tokens, limit=limit)

    async with Rig(limits(vocab_size=VOCAB), tokenizer=Counting()) as rig:
        results = await rig.engine.generate([f"text {i}" for i in range(60)], seed=0, max_tokens=1)
        assert [result.prompt_token_ids for result in results] == [(256, *f"text {i}".encode()) for i in range(60)]
    assert sum(calls) == 60
    assert len(calls) < 10


async def test_the_applications_worker_threads_are_left_to_it() -> None:
    """Tokenising does not use up anyio's default limiter, nor wait for it."""
    tokenizer = BlockedTokenizer()
    limiter = anyio.to_thread.current_default_thread_limiter()
    busy, leave = threading.Semaphore(0), threading.Event()

    def occupy() -> None:
        busy.release()
        assert leave.wait(GUARD)

    async with Rig(limits(vocab_size=VOCAB), tokenizer=tokenizer) as rig, anyio.create_task_group() as tasks:
        stuck = rig.engine.stream("text", max_tokens=1)
        await until(tokenizer.entered.is_set)
        assert limiter.borrowed_tokens == 0
        tokenizer.open.set()
        await read(stuck)
        before = limiter.total_tokens
        limiter.total_tokens = 1
        try:
            tasks.start_soon(anyio.to_thread.run_sync, occupy)
            await until(lambda: limiter.available_tokens == 0)
            result = await rig.engine.generate("other", seed=0, max_tokens=1, ignore_eos=True)
            assert len(result.token_ids) == 1
        finally:
            leave.set()
            limiter.total_tokens = before


async def test_all_streams_progress_together() -> None:
    """Sixty-four readers on sixty-four rows: none is ever more than the steps in flight behind another."""
    async with Rig(limits(max_rows=64, pages=64 * 8), depth=2) as rig:
        counts = [0] * 64
        widest = 0

        async def reader(i: int) -> None:
            nonlocal widest
            async for chunk in rig.engine.stream([i], seed=i, max_tokens=24):
                counts[i] += len(chunk.token_ids)
                widest = max(widest, max(counts) - min(counts))

        async with anyio.create_task_group() as tasks:
            for i in range(64):
                tasks.start_soon(reader, i)
        assert counts == [24] * 64
        assert widest <= 4


async def test_a_thousand_results_do_not_starve_the_others(rig: Rig) -> None:
    """Other tasks get turns while the engine works at full speed."""
    ticks = 0

    async def ticker() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ticker)
        for i in range(5):
            await rig.engine.generate([i], max_tokens=100)
        tasks.cancel_scope.cancel()
    assert ticks >= rig.statistics.steps


async def test_nothing_is_planned_when_there_is_nothing_to_do() -> None:
    async with Rig() as rig:
        await rig.engine.generate([[i] for i in range(10)], max_tokens=5)
        rig.engine.stream([1], max_tokens=50).close()
        await rig.settle()
        plans = len(rig.plans)
        await turns(500)
        assert len(rig.plans) == plans
        assert rig.statistics.steps_in_flight == 0


async def test_no_step_computes_nothing(rig: Rig) -> None:
    await rig.engine.generate([[i, *range(40)] for i in range(20)], max_tokens=7, n=2)
    assert all(plan.prefill or plan.decode for plan in rig.plans)
