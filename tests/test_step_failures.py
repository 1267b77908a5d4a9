"""A step that raises, and a device that is lost."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import structlog

from asyncsched import Chunk, EngineDeadError, SamplingParams, StepFailedError, StepPlan, StepResult, TokenStream
from asyncsched.testing import SimulationError, check_invariants

from .engine_helpers import ASYNCIO, LETTERS, BlockedTokenizer, Rig, limits, oracle, read, tokens_of, turns, until

PROMPT = list(range(50, 67))


class StepError(Exception):
    """What the device raises."""


async def assert_step_failed(stream: TokenStream, step: int, error: BaseException) -> None:
    with pytest.raises(StepFailedError, match=f"step {step}.*which computed this request.*out of luck") as caught:
        await stream.result()
    assert caught.value.__cause__ is error
    assert stream.finish_reason == "error"


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
async def test_a_step_that_raises_ends_its_requests(step: int, depth: int) -> None:
    error = StepError("out of luck")
    async with Rig(faults={step: error}, depth=depth, chunk_cap=8) as rig:
        stream = rig.engine.stream(PROMPT, seed=0, max_tokens=20)
        await assert_step_failed(stream, step, error)
        await rig.settle()
        assert rig.statistics.failed_steps == 1
        assert rig.statistics.finished["error"] == 1
        assert rig.released
        result = await rig.engine.generate(PROMPT, seed=0, max_tokens=20)
        assert result.token_ids == oracle(PROMPT, 0, 20)


async def test_a_log_that_cannot_be_written_changes_nothing() -> None:
    def broken(logger: Any, method: str, event: Any) -> Any:
        raise BrokenPipeError("nobody reads this program's output")

    before = structlog.get_config()
    structlog.configure(processors=[broken], cache_logger_on_first_use=False)
    try:
        error = StepError("out of luck")
        async with Rig(faults={2: error}) as rig:
            await assert_step_failed(rig.engine.stream(PROMPT, seed=0, max_tokens=20), 2, error)
            result = await rig.engine.generate(PROMPT, seed=0, max_tokens=20)
            assert result.token_ids == oracle(PROMPT, 0, 20)
    finally:
        structlog.configure(**before)


async def test_what_arrived_before_the_failure_can_be_read() -> None:
    error = StepError("out of luck")
    async with Rig(faults={6: error}) as rig:
        stream = rig.engine.stream(PROMPT, seed=0, max_tokens=20)
        chunks: list[Chunk] = []

        async def reader() -> None:
            async for chunk in stream:
                chunks.append(chunk)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(StepFailedError) as caught:
            await reader()
        assert tokens_of(chunks) == oracle(PROMPT, 0, 5)
        assert all(chunk.finish_reason is None for chunk in chunks)
        assert caught.value.__cause__ is error
        assert stream.usage.completion_tokens == 5


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_requests_outside_the_step_go_on(depth: int) -> None:
    """The failing step computes one prompt's chunk only; a prompt that waits for a later step is not in it."""
    error = StepError("out of luck")
    async with Rig(faults={1: error}, depth=depth, token_budget=16) as rig:
        first = rig.engine.stream(PROMPT[:16], seed=0, max_tokens=6)
        second = rig.engine.stream([7, 8, 9], seed=1, max_tokens=6)
        await assert_step_failed(first, 1, error)
        assert tokens_of(await read(second)) == oracle([7, 8, 9], 1, 6)
        await rig.settle()
        assert rig.statistics.finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("sharers", [1, 5])
async def test_requests_that_shared_the_failed_steps_pages_start_over(depth: int, sharers: int) -> None:
    """Step 1 computes the prompt; the others reuse its pages in later steps, which are already in flight when it fails."""
    error = StepError("out of luck")
    async with Rig(faults={1: error}, depth=depth, token_budget=17, hold=True) as rig:
        owner = rig.engine.stream(PROMPT, seed=0, max_tokens=6)
        others = [rig.engine.stream([*PROMPT[:16], 900 + i], seed=i, max_tokens=6) for i in range(sharers)]
        await turns()
        check_invariants(rig.engine)
        rig.executor.unhold()
        await assert_step_failed(owner, 1, error)
        for i, other in enumerate(others):
            assert tokens_of(await read(other)) == oracle([*PROMPT[:16], 900 + i], i, 6)
        await rig.settle()
        assert rig.statistics.restarts >= min(sharers, depth - 1)
        assert rig.statistics.finished == {"stop": 0, "length": sharers, "abort": 0, "error": 1}


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_a_page_that_a_later_step_completed_is_not_cached(depth: int) -> None:
    """The failed step filled half a page; the step behind it, already in flight, filled the rest and shared the page."""
    async with Rig(faults={3: StepError("out of luck")}, depth=depth, chunk_cap=2) as rig:
        await rig.engine.generate(PROMPT[:4], max_tokens=0)
        first = rig.engine.stream(PROMPT, seed=0, max_tokens=3)
        with pytest.raises(StepFailedError):
            await first.result()
        again = await rig.engine.generate(PROMPT, seed=0, max_tokens=3)
        assert again.token_ids == oracle(PROMPT, 0, 3)


@ASYNCIO
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("step", range(1, 14))
async def test_whatever_step_fails_the_others_are_right(step: int, depth: int) -> None:
    prompts = [[*PROMPT[: 4 * (i % 4)], 700 + i, *PROMPT[:5]] for i in range(12)]
    params = SamplingParams(max_tokens=7)
    async with Rig(
        limits(max_rows=5, pages=30), faults={step: StepError("out of luck"), step + 2: StepError("again")},
        depth=depth, chunk_cap=4, token_budget=12,
    ) as rig:  # fmt: skip
        streams = [rig.engine.stream(prompt, params, seed=i) for i, prompt in enumerate(prompts)]
        failed = 0
        for i, stream in enumerate(streams):
            try:
                assert (await stream.result()).token_ids == oracle(prompts[i], i, 7)
            except StepFailedError:
                failed += 1
            check_invariants(rig.engine)
        assert 1 <= failed <= 10
        await rig.settle()
        await rig.serves()


async def test_a_restarted_request_repeats_nothing() -> None:
    """It had delivered tokens before it had to start over; the reader sees each once, text included."""
    error = StepError("out of luck")
    device = limits(vocab_size=26)
    async with Rig(device, tokenizer=LETTERS, faults={4: error}, token_budget=8, hold=True, depth=3) as rig:
        prompt = [i % 26 for i in range(7)]
        survivor = rig.engine.stream(prompt, seed=0, max_tokens=12, stop="never seen")
        await rig.step(2)
        first = await anext(survivor)
        rig.executor.unhold()
        try:
            chunks = [first, *await read(survivor)]
        except StepFailedError:
            chunks = []  # it was in the step itself
        if chunks:
            assert tokens_of(chunks) == oracle(prompt, 0, 12, 26)
            assert "".join(chunk.text for chunk in chunks) == LETTERS.decode(oracle(prompt, 0, 12, 26))
        assert (await rig.engine.generate(prompt, seed=0, max_tokens=12)).text == LETTERS.decode(oracle(prompt, 0, 12, 26))


async def test_several_completions_fail_together() -> None:
    error = StepError("out of luck")
    async with Rig(faults={3: error}) as rig:
        stream = rig.engine.stream(PROMPT, n=3, max_tokens=9)
        with pytest.raises(StepFailedError):
            await read(stream)
        await rig.settle()
        assert rig.statistics.finished["error"] + rig.statistics.finished["abort"] == 3
        await rig.serves()


async def test_one_error_of_a_batch_ends_the_others() -> None:
    async with Rig(faults={3: StepError("out of luck")}) as rig:
        with pytest.raises(StepFailedError):
            await rig.engine.generate([[i] for i in range(20)], max_tokens=9)
        await rig.settle()
        await rig.serves()


async def test_many_failing_steps_in_a_row() -> None:
    async with Rig(faults={step: StepError("out of luck") for step in range(1, 40)}, depth=3) as rig:
        failures = 0
        for i in range(60):
            try:
                await rig.engine.generate([i, *PROMPT], seed=i, max_tokens=2)
            except StepFailedError:
                failures += 1
        assert failures >= 13
        await rig.serves()


# One row alone


class BadRowExecutorRig(Rig):
    """The device has no usable token for one row of one step."""

    def spoil(self, step: int, row: int) -> None:
        run = self.executor.run

        def spoiled(plan: StepPlan, launched: float, completed: float) -> StepResult:
            result = run(plan, launched, completed)
            if plan.step != step:
                return result
            return StepResult(result.step, result.rows, result.tokens, failed={row: "not a number"})

        self.executor.run = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
async def test_a_row_without_a_token_fails_alone(depth: int) -> None:
    async with BadRowExecutorRig(depth=depth) as rig:
        rig.spoil(4, 1)
        streams = [rig.engine.stream([i, i], seed=i, max_tokens=8) for i in range(3)]
        with pytest.raises(Exception, match=r"no token could be sampled: not a number") as caught:
            await streams[1].result()
        assert type(caught.value).__name__ == "RequestFailedError"
        for i in (0, 2):
            assert tokens_of(await read(streams[i])) == oracle([i, i], i, 8)
        await rig.settle()
        assert rig.statistics.failed_steps == 0


# The device is lost


async def lose_device(rig: Rig) -> list[Any]:
    """Readers of every kind; returns the errors that they got."""
    errors: list[Any] = []

    async def reader(i: int) -> None:
        try:
            if i % 3 == 0:
                await read(rig.engine.stream([i], seed=i, max_tokens=50))
            elif i % 3 == 1:
                await rig.engine.generate([i], seed=i, max_tokens=50, n=2)
            else:
                stream = rig.engine.stream([i], seed=i, max_tokens=50)
                await until(lambda: stream.finish_reason)
                await read(stream)
        except EngineDeadError as exc:
            errors.append(exc)

    async with anyio.create_task_group() as tasks:
        for i in range(30):
            tasks.start_soon(reader, i)
    return errors


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
async def test_a_lost_device_is_told_to_every_reader(depth: int) -> None:
    async with Rig(lost_at=4, depth=depth, check=False) as rig:
        errors = await lose_device(rig)
        assert len(errors) == 30
        assert len({id(error) for error in errors}) == 30
        for error in errors:
            assert "the device was lost in step 4" in str(error)
            assert isinstance(error.__cause__, RuntimeError)
            assert str(error.__cause__) == "device lost"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="lost in step 4") as caught:
                rig.engine.stream([1])
            assert str(caught.value.__cause__) == "device lost"
        with pytest.raises(EngineDeadError):
            await rig.engine.generate([1])
        numbers = rig.statistics
        assert (numbers.running, numbers.waiting) == (0, 0)
        check_invariants(rig.engine)
        assert rig.engine.health().status == "dead"
        plans = len(rig.plans)
        await turns(100)
        assert len(rig.plans) == plans  # nothing is planned for a dead device


async def test_texts_that_were_being_tokenised_are_told_too() -> None:
    tokenizer = BlockedTokenizer(blocks=lambda text: "slow" in text)
    async with Rig(limits(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer, lost_at=1, check=False) as rig:
        slow = rig.engine.stream("slow", max_tokens=5)
        await until(tokenizer.entered.is_set)
        with pytest.raises(EngineDeadError):
            await rig.engine.generate([1], max_tokens=5)
        with pytest.raises(EngineDeadError):
            await read(slow)
        tokenizer.open.set()
        await turns(100)
        assert rig.statistics.running == rig.statistics.waiting == 0


async def test_a_broken_contract_is_fatal() -> None:
    async with Rig(faults={2: SimulationError("step 2: broken")}, check=False) as rig:
        with pytest.raises(EngineDeadError, match="broken") as caught:
            await rig.engine.generate([1], max_tokens=5)
        assert isinstance(caught.value.__cause__, SimulationError)


async def test_a_dead_engine_closes_like_any_other() -> None:
    rig = Rig(lost_at=1, check=False)
    async with rig:
        stream = rig.engine.stream([1])
        with pytest.raises(EngineDeadError):
            await read(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        stream.close()
    assert rig.executor.closed


async def test_a_control_task_that_fails_kills_the_engine_with_the_cause() -> None:
    class Broken:
        """With ``strict_policies`` a policy's mistake is passed on."""

        def order(self, waiting: Any, view: Any) -> Any:
            raise StepError("policy is broken")

    async with Rig(policy=Broken(), strict_policies=True, check=False) as rig:
        stream = rig.engine.stream([1], max_tokens=5)
        with pytest.raises(EngineDeadError, match="policy is broken") as caught:
            await stream.result()
        assert isinstance(caught.value.__cause__, StepError)
        with pytest.raises(EngineDeadError, match="policy is broken"):
            rig.engine.stream([1])


async def test_a_policy_that_fails_costs_nothing_but_its_advice() -> None:
    class Broken:
        def order(self, waiting: Any, view: Any) -> Any:
            raise StepError("policy is broken")

    async with Rig(policy=Broken()) as rig:
        results = await rig.engine.generate([[i] for i in range(20)], seed=0, max_tokens=4)
        assert [result.token_ids for result in results] == [oracle([i], 0, 4) for i in range(20)]
        assert rig.statistics.policy_faults["order"] > 0
