"""Who gets in: bounds on what waits, in both modes, and what an admission policy decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncsched import AdmissionRejectedError, QueueFullError, RejectedError, RequestView, TokenStream
from asyncsched.testing import ByteTokenizer, check_invariants

from .engine_helpers import BlockedTokenizer, Recorder, Rig, limits, oracle, read, tokens_of, turns, until

VOCAB = ByteTokenizer().vocab_size
ONE_ROW = limits(max_rows=1)


async def occupied(rig: Rig) -> TokenStream:
    """A stream that holds the only row."""
    stream = rig.engine.stream([200, 201], seed=0, max_tokens=30, ignore_eos=True)
    await turns()
    assert (rig.statistics.running, rig.statistics.waiting) == (1, 0)
    rig.kept.append(stream)
    return stream


async def assert_right(streams: list[TokenStream], prompts: list[list[int]]) -> None:
    for stream, prompt in zip(streams, prompts, strict=True):
        assert tokens_of(await read(stream)) == oracle(prompt, 0, 3)


# Refuse


async def test_too_many_requests_are_refused_at_once() -> None:
    async with Rig(ONE_ROW, hold=True, max_queued_requests=3) as rig:
        await occupied(rig)
        streams = [rig.engine.stream([i], seed=0, max_tokens=3) for i in range(3)]
        for _ in range(2):
            with pytest.raises(QueueFullError, match=r"3 requests are waiting.*max_queued_requests"):
                rig.engine.stream([9])
            with pytest.raises(RejectedError):
                await rig.engine.generate([9])
            await turns()
        assert rig.statistics.rejected == 4
        assert rig.statistics.submitted == 4
        streams[1].close()  # room for one
        streams[1] = rig.engine.stream([1], seed=0, max_tokens=3)
        with pytest.raises(QueueFullError):
            rig.engine.stream([9])
        rig.executor.unhold()
        await assert_right(streams, [[0], [1], [2]])
        assert (await rig.engine.generate([9], seed=0, max_tokens=3)).token_ids == oracle([9], 0, 3)


async def test_every_completion_counts() -> None:
    async with Rig(ONE_ROW, hold=True, max_queued_requests=5) as rig:
        await occupied(rig)
        stream = rig.engine.stream([1], seed=0, max_tokens=3, n=3)
        with pytest.raises(QueueFullError):
            rig.engine.stream([2], n=3)
        other = rig.engine.stream([2], seed=0, max_tokens=3, n=2)
        rig.executor.unhold()
        await assert_right([stream, other], [[1], [2]])


async def test_too_many_tokens_are_refused_at_once() -> None:
    async with Rig(ONE_ROW, hold=True, max_queued_tokens=20) as rig:
        await occupied(rig)
        prompts = [list(range(i, i + 8)) for i in range(2)]
        streams = [rig.engine.stream(prompt, seed=0, max_tokens=3) for prompt in prompts]
        with pytest.raises(QueueFullError):
            rig.engine.stream(list(range(5)))
        small = rig.engine.stream(list(range(4)), seed=0, max_tokens=3)
        with pytest.raises(QueueFullError):
            rig.engine.stream([1])
        rig.executor.unhold()
        await assert_right([*streams, small], [*prompts, list(range(4))])


async def test_one_request_over_the_bound_gets_in_alone() -> None:
    async with Rig(ONE_ROW, max_queued_tokens=4, max_queued_requests=2) as rig:
        prompt = list(range(30))
        assert (await rig.engine.generate(prompt, seed=0, max_tokens=3)).token_ids == oracle(prompt, 0, 3)
        result = await rig.engine.generate([1], seed=0, max_tokens=3, n=5)
        assert [c.token_ids for c in result.completions] == [oracle([1], i, 3) for i in range(5)]


async def test_a_batch_that_is_refused_in_the_middle_leaves_nothing() -> None:
    async with Rig(ONE_ROW, hold=True, max_queued_requests=3) as rig:
        await occupied(rig)
        with pytest.raises(QueueFullError):
            await rig.engine.generate([[i] for i in range(9)])
        await turns()
        assert rig.statistics.waiting == 0


async def test_texts_that_are_being_tokenised_wait_too() -> None:
    """They count while they are with the tokenizer, however slow it is."""
    tokenizer = BlockedTokenizer()
    async with Rig(limits(max_rows=1, vocab_size=VOCAB), tokenizer=tokenizer, max_queued_requests=3) as rig:
        streams = []
        try:
            for i in range(3):
                streams.append(rig.engine.stream(f"text {i}", max_tokens=2, ignore_eos=True))
                await turns()
            await until(tokenizer.entered.is_set)
            assert rig.statistics.waiting == 3
            with pytest.raises(QueueFullError):
                rig.engine.stream("one more")
            with pytest.raises(QueueFullError):
                rig.engine.stream([1])
        finally:
            tokenizer.open.set()
        for stream in streams:
            assert len(tokens_of(await read(stream))) == 2


async def test_requests_that_are_being_annotated_wait_too() -> None:
    gate = anyio.Event()

    class Slow:
        async def annotate(self, request: RequestView) -> Mapping[str, Any]:
            await gate.wait()
            return {}

        def admit(self, request: RequestView, view: Any) -> str | None:
            return None

    async with Rig(admission_policy=Slow(), max_queued_requests=2) as rig:
        streams = []
        for i in range(2):
            streams.append(rig.engine.stream([i], seed=0, max_tokens=3))
            await turns()
        assert rig.statistics.waiting == 2
        with pytest.raises(QueueFullError):
            rig.engine.stream([9])
        gate.set()
        await assert_right(streams, [[0], [1]])


async def test_a_text_is_measured_in_tokens_once_they_are_known() -> None:
    async with Rig(limits(max_rows=1, vocab_size=VOCAB), tokenizer=ByteTokenizer(), hold=True, max_queued_tokens=20) as rig:
        await occupied(rig)
        first = rig.engine.stream("x" * 14, max_tokens=1)  # 15 tokens
        await until(lambda: first.usage.prompt_tokens)
        second = rig.engine.stream("y" * 14, max_tokens=1)
        with pytest.raises(QueueFullError, match="20 tokens"):
            await read(second)
        assert rig.statistics.rejected == 1
        rig.executor.unhold()
        assert len(tokens_of(await read(first))) == 1


# Wait


@pytest.mark.parametrize("bound", [1, 2, 5])
async def test_waiting_mode_holds_requests_outside(bound: int) -> None:
    policy = Recorder()
    async with Rig(ONE_ROW, policy=policy, max_queued_requests=bound, when_full="wait") as rig:
        streams = [rig.engine.stream([i], seed=0, max_tokens=3) for i in range(20)]
        assert rig.statistics.waiting == 20
        await assert_right(streams, [[i] for i in range(20)])
        assert max(policy.waiting) == bound
        joined = [int(chunk.tokens[0]) for plan in rig.plans for chunk in plan.prefill]
        assert joined == list(range(20))  # arrival order


@pytest.mark.parametrize("bound", [1, 2, 5])
async def test_waiting_mode_holds_texts_outside(bound: int) -> None:
    policy = Recorder()
    tokenizer = ByteTokenizer()
    device = limits(max_rows=1, vocab_size=VOCAB)
    async with Rig(device, tokenizer=tokenizer, policy=policy, max_queued_requests=bound, when_full="wait") as rig:
        streams = [rig.engine.stream(f"text {i}", seed=0, max_tokens=3, ignore_eos=True) for i in range(20)]
        for i, stream in enumerate(streams):
            assert tokens_of(await read(stream)) == oracle([256, *f"text {i}".encode()], 0, 3, VOCAB)
        assert max(policy.waiting) <= bound


async def test_waiting_mode_counts_the_tokens_inside_only() -> None:
    """Two prompts of ten tokens may wait together under a bound of twenty-five, whatever waits outside."""
    policy = Recorder()
    async with Rig(ONE_ROW, policy=policy, max_queued_tokens=25, when_full="wait") as rig:
        prompts = [list(range(i, i + 10)) for i in range(12)]
        streams = [rig.engine.stream(prompt, seed=0, max_tokens=3) for prompt in prompts]
        await assert_right(streams, prompts)
        assert max(policy.waiting) == 2


async def test_waiting_mode_lets_a_large_one_in_alone() -> None:
    async with Rig(ONE_ROW, max_queued_tokens=4, max_queued_requests=1, when_full="wait") as rig:
        prompts = [list(range(i, i + 9)) for i in range(5)]
        streams = [rig.engine.stream(prompt, seed=0, max_tokens=3, n=2) for prompt in prompts]
        await assert_right(streams, prompts)


async def test_giving_up_outside() -> None:
    async with Rig(ONE_ROW, hold=True, max_queued_requests=1, when_full="wait") as rig:
        first = await occupied(rig)
        streams = [rig.engine.stream([i], seed=0, max_tokens=3, request_id=f"r{i}") for i in range(6)]
        await turns()
        streams[2].close()
        assert rig.engine.abort("r3")
        await turns()
        check_invariants(rig.engine)
        again = rig.engine.stream([2], seed=0, max_tokens=3, request_id="r2")
        first.close()
        rig.executor.unhold()
        await assert_right([streams[0], streams[1], streams[4], streams[5], again], [[0], [1], [4], [5], [2]])


async def test_cancelled_outside() -> None:
    async with Rig(ONE_ROW, hold=True, max_queued_requests=1, when_full="wait") as rig:
        await occupied(rig)

        async def ask(i: int) -> None:
            await rig.engine.generate([i], max_tokens=3)

        async with anyio.create_task_group() as tasks:
            for i in range(10):
                tasks.start_soon(ask, i)
            await turns()
            tasks.cancel_scope.cancel()
        await turns()
        assert rig.statistics.waiting == 0


# Admission policies


class Picky:
    """Refuses prompts that begin with 13."""

    def __init__(self) -> None:
        self.views: list[Any] = []

    def admit(self, request: RequestView, view: Any) -> str | None:
        self.views.append((request.request_id, request.prompt_tokens, view.waiting_count, view.free_rows))
        return "unlucky" if request.request_id.startswith("bad") else None


async def test_an_admission_policy_refuses_with_a_reason() -> None:
    policy = Picky()
    async with Rig(admission_policy=policy) as rig:
        good = rig.engine.stream([1], seed=0, max_tokens=3, request_id="good")
        bad = rig.engine.stream([2, 3], max_tokens=3, n=3, request_id="bad")
        with pytest.raises(AdmissionRejectedError, match="refused by the admission policy: unlucky"):
            await read(bad)
        assert bad.finish_reason == "error"
        await assert_right([good], [[1]])
        with pytest.raises(AdmissionRejectedError):
            await rig.engine.generate([1], request_id="bad")
        await assert_right([rig.engine.stream([1], seed=0, max_tokens=3, request_id="bad2".removeprefix("bad"))], [[1]])
        assert rig.statistics.rejected == 2
        assert [view[:2] for view in policy.views] == [("good", 1), ("bad", 2), ("bad", 1), ("2", 1)]  # once per submission


async def test_an_admission_policy_that_fails_lets_everyone_in() -> None:
    class Broken:
        def admit(self, request: RequestView, view: Any) -> Any:
            return 7

    async with Rig(admission_policy=Broken()) as rig:
        await assert_right([rig.engine.stream([1], seed=0, max_tokens=3)], [[1]])
        assert rig.statistics.policy_faults == {"admit": 1}


async def test_annotations_reach_the_scheduling_policy() -> None:
    class Annotator:
        async def annotate(self, request: RequestView) -> Mapping[str, Any]:
            await anyio.lowlevel.checkpoint()
            return {"length": request.hints["guess"] * 2}

        def admit(self, request: RequestView, view: Any) -> str | None:
            return None if request.hints["length"] < 50 else f"{request.hints['length']} is too long"

    class Shortest(Recorder):
        def order(self, waiting: Any, view: Any) -> Any:
            return sorted(waiting, key=lambda request: request.hints["length"])

    async with Rig(ONE_ROW, admission_policy=Annotator(), policy=Shortest(), hold=True) as rig:
        streams = [rig.engine.stream([guess], seed=0, max_tokens=3, hints={"guess": guess}) for guess in (9, 5, 7, 1)]
        with pytest.raises(AdmissionRejectedError, match="60 is too long"):
            await rig.engine.generate([1], hints={"guess": 30})
        await turns()
        rig.executor.unhold()
        await assert_right(streams, [[9], [5], [7], [1]])
        order = [int(chunk.tokens[0]) for plan in rig.plans for chunk in plan.prefill]
        assert order[1:] == sorted(order[1:])


async def test_annotations_that_fail_or_hang_hold_up_nobody() -> None:
    class Hanging:
        async def annotate(self, request: RequestView) -> Mapping[str, Any]:
            if request.hints.get("hang"):
                await anyio.sleep_forever()
            raise RuntimeError("no idea")

        def admit(self, request: RequestView, view: Any) -> str | None:
            return None

    async with Rig(admission_policy=Hanging()) as rig:
        stuck = [rig.engine.stream([7], max_tokens=3, n=2, hints={"hang": True}) for _ in range(3)]
        await assert_right([rig.engine.stream([1], seed=0, max_tokens=3)], [[1]])
        assert rig.statistics.policy_faults == {"annotate": 1}
        stuck[0].close()
        assert rig.engine.abort(stuck[1].request_id)
        assert (await stuck[1].result()).finish_reason == "abort"
        stuck[2].close()
        await turns()
        assert rig.statistics.waiting == 0


async def test_closing_while_a_policy_thinks() -> None:
    class Hanging:
        async def annotate(self, request: RequestView) -> Mapping[str, Any]:
            await anyio.sleep_forever()
            raise AssertionError  # pragma: no cover

        def admit(self, request: RequestView, view: Any) -> str | None:
            return None

    rig = Rig(admission_policy=Hanging())
    async with rig.engine:
        rig.engine.stream([1])
        await turns()
    assert rig.executor.closed


# Order


async def test_arrival_order_is_kept_between_texts() -> None:
    tokenizer = ByteTokenizer()
    async with Rig(limits(max_rows=1, vocab_size=VOCAB), tokenizer=tokenizer, max_queued_requests=100) as rig:
        texts = [f"{i:03d}" for i in range(70)]  # more than one batch of the tokenizer
        await rig.engine.generate(texts, max_tokens=1)
        order = [bytes(chunk.tokens[1:4].tolist()).decode() for plan in rig.plans for chunk in plan.prefill]
        assert order == texts


async def test_arrival_order_is_kept_between_texts_and_tokens() -> None:
    """A prompt of tokens that came later does not overtake a text for good: both wait, the text first."""
    tokenizer = BlockedTokenizer()
    async with Rig(limits(max_rows=1, vocab_size=VOCAB), tokenizer=tokenizer, hold=True) as rig:
        first = rig.engine.stream([1], max_tokens=3, ignore_eos=True)
        await turns()
        text = rig.engine.stream("text", max_tokens=3, ignore_eos=True)
        tokens = rig.engine.stream([2], max_tokens=3, ignore_eos=True)
        await until(tokenizer.entered.is_set)
        tokenizer.open.set()
        await until(lambda: text.usage.prompt_tokens)
        await turns()
        rig.executor.unhold()
        for stream in (first, text, tokens):
            assert len(tokens_of(await read(stream))) == 3
        order = [chunk.tokens.tolist() for plan in rig.plans for chunk in plan.prefill]
        assert order == [[1], [256, *b"text"], [2]]
