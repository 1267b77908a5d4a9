"""The step-by-step instrument itself, and cases that need it."""

from __future__ import annotations

import pytest

from asyncsched import ExecutorLimits
from asyncsched.testing import ScriptedRun, expected_tokens


async def test_advance_to_a_chunk_and_cancel_there() -> None:
    async with ScriptedRun(depth=2, token_budget=16, chunk_cap=8) as run:
        stream = await run.submit(list(range(40)), max_tokens=4)
        plan = await run.to_chunk(stream, 3)
        assert [chunk.start for chunk in plan.prefill] == [16]
        submitted = len(run.plans)
        stream.close()
        await run.steps(2)
        assert run.engine.statistics().running == 0
        assert run.engine.statistics().free_rows == 8
        assert len(run.plans) == submitted, "nothing is planned for a request that was cancelled"


async def test_a_chunk_that_does_not_exist() -> None:
    async with ScriptedRun(token_budget=16) as run:
        stream = await run.submit([1, 2, 3], max_tokens=1)
        with pytest.raises(LookupError, match="has 1 chunks, not 2"):
            await run.to_chunk(stream, 2)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
async def test_pages_come_back_after_exhaustion(depth: int) -> None:
    async with ScriptedRun(depth=depth) as run:
        hogs = []
        for _ in range(2):  # one request can hold half of this pool
            hogs.append(await run.exhaust_pages())
            await run.steps()
        waiting = await run.submit([7, 8, 9], seed=3, max_tokens=5)
        await run.steps()
        assert run.engine.health().blocked == "pages"
        await run.steps(3)
        assert run.engine.statistics().waiting == 1
        for hog in hogs:
            hog.close()
        await run.steps(20)
        result = await waiting.result()
        assert list(result.token_ids) == expected_tokens([7, 8, 9], 3, 5, 1000)


async def test_pause_finish_waits_for_requests_that_lose_their_row_meanwhile() -> None:
    limits = ExecutorLimits(max_rows=4, pages=10, page_size=4, max_model_len=40, vocab_size=1000)
    async with ScriptedRun(limits, depth=2, reserve="expected") as run:
        run.engine._running().control.placement.estimate.share = 0.0  # expects no growth, so that pages run out
        prompts = [list(range(start, start + 7)) for start in (10, 20, 30)]
        streams = [await run.submit(prompt, seed=1, max_tokens=25) for prompt in prompts]
        await run.steps(3)
        late = await run.submit([1, 2], seed=2, max_tokens=1)
        run.executor.unhold()
        await run.engine.pause("finish")
        assert run.engine.statistics().preemptions > 0
        assert [stream.finish_reason for stream in streams] == ["length"] * 3
        assert late.finish_reason is None, "a request that was not begun waits for resume()"
        for prompt, stream in zip(prompts, streams, strict=True):
            assert list((await stream.result()).token_ids) == expected_tokens(prompt, 1, 25, 1000)
        run.engine.resume()
        await late.result()
