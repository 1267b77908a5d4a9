"""Streams: what a reader sees of the text, when, and why it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import pytest
import trio
from trio.testing import MockClock

from asyncsched import Chunk, Completion, SamplingParams, StepFailedError
from asyncsched.testing import ByteTokenizer

from .engine_helpers import LETTERS, Pieces, Rig, limits, oracle, read, text_of, tokens_of, until

BYTES = ByteTokenizer()
BYTES_LIMITS = limits(vocab_size=BYTES.vocab_size)
LETTERS_LIMITS = limits(vocab_size=26)
PROMPT = [1, 2, 3, 4, 5]

# Characters of one to four bytes, cut at every place, and nothing that could not become a character.
CUTS = Pieces([b"a", b"\xc3", b"\xa9", b"\xe4\xb8", b"\x96", b"\xe4", b"\xb8\x96", b"\xf0\x9f", b"\x98\x80", "世界", b"\x80 b"])


def letters(seed: int, count: int, prompt: Sequence[int] = tuple(PROMPT)) -> str:
    """The text that ``LETTERS`` makes of the oracle's tokens."""
    return LETTERS.decode(oracle(prompt, seed, count, 26))


# Text and tokens


@pytest.mark.parametrize("skip", [True, False], ids=["skip_special", "keep_special"])
async def test_the_chunks_joined_are_the_decoded_tokens(skip: bool) -> None:
    async with Rig(BYTES_LIMITS, tokenizer=BYTES) as rig:
        for seed in range(4):
            params = SamplingParams(seed=seed, max_tokens=60, ignore_eos=True, skip_special_tokens=skip)
            chunks = await read(rig.engine.stream(PROMPT, params))
            tokens = oracle(PROMPT, seed, 60, BYTES.vocab_size)
            assert tokens_of(chunks) == tokens
            assert text_of(chunks) == BYTES.decode(tokens, skip_special_tokens=skip)
            result = await rig.engine.generate(PROMPT, params)
            assert result.text == text_of(chunks)


async def test_a_leading_space_is_stripped_once() -> None:
    tokenizer = ByteTokenizer([" x", " "] * 500, strips_leading_space=True)
    async with Rig(limits(vocab_size=1200), tokenizer=tokenizer) as rig:
        for seed in range(6):
            chunks = await read(rig.engine.stream(PROMPT, seed=seed, max_tokens=12, ignore_eos=True))
            assert text_of(chunks) == tokenizer.decode(oracle(PROMPT, seed, 12, 1200))


async def test_no_character_is_ever_split() -> None:
    silent = 0
    async with Rig(limits(vocab_size=CUTS.vocab_size), tokenizer=CUTS, hold=True) as rig:
        for seed in range(6):
            async with rig.engine.stream(PROMPT, seed=seed, max_tokens=40) as stream:
                chunks: list[Chunk] = []
                while not chunks or chunks[-1].finish_reason is None:
                    rig.executor.step()  # token by token, so that every cut is seen
                    chunks.append(await anext(stream))
                silent += sum(not chunk.text for chunk in chunks)
            assert len(chunks) == 40
            assert text_of(chunks) == CUTS.decode(oracle(PROMPT, seed, 40, CUTS.vocab_size))
    assert silent > 20  # half characters were held back


async def test_half_a_character_at_the_end_is_replaced() -> None:
    tokenizer = Pieces([b"\xe4\xb8"])
    async with Rig(limits(vocab_size=1), tokenizer=tokenizer) as rig:
        chunks = await read(rig.engine.stream([0], max_tokens=3))
        assert text_of(chunks) == "\ufffd\ufffd\ufffd"
        assert (await rig.engine.generate([0], max_tokens=3)).text == "\ufffd\ufffd\ufffd"


# Pace


async def test_the_first_token_is_delivered_at_once(held: Rig) -> None:
    stream = held.engine.stream(PROMPT, seed=0, max_tokens=100)
    held.executor.step()
    assert (await anext(stream)).token_ids == oracle(PROMPT, 0, 1)
    held.executor.step()
    assert (await anext(stream)).token_ids == oracle(PROMPT, 0, 2)[1:]
    stream.close()


async def test_a_reader_that_keeps_pace_gets_every_token_alone(held: Rig) -> None:
    stream = held.engine.stream(PROMPT, seed=0, max_tokens=70)
    for token in oracle(PROMPT, 0, 70):
        held.executor.step()
        assert (await anext(stream)).token_ids == (token,)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_unread_tokens_merge_into_one_chunk() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS) as rig:
        stream = rig.engine.stream(PROMPT, seed=0, max_tokens=100)
        await rig.settle()
        (chunk,) = await read(stream)
        assert chunk.token_ids == oracle(PROMPT, 0, 100, 26)
        assert chunk.text == letters(0, 100)
        assert chunk.finish_reason == "length"


async def test_unread_tokens_merge_while_the_request_runs() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS, hold=True) as rig:
        stream = rig.engine.stream(PROMPT, seed=0, max_tokens=100)
        read_so_far = 0
        for burst in (1, 3, 70, 1, 25):
            await rig.step(burst)
            chunk = await anext(stream)
            assert chunk.token_ids == oracle(PROMPT, 0, 100, 26)[read_so_far : read_so_far + burst]
            assert chunk.text == letters(0, 100)[read_so_far : read_so_far + burst]
            read_so_far += burst
        assert chunk.finish_reason == "length"


async def test_a_slow_reader_holds_up_nobody(rig: Rig) -> None:
    slow = rig.engine.stream(PROMPT, seed=0, max_tokens=60)
    first = await anext(slow)
    others = await rig.engine.generate([[i] for i in range(20)], seed=1, max_tokens=50)
    assert [result.token_ids for result in others] == [oracle([i], 1, 50) for i in range(20)]
    await rig.settle()
    rest = await read(slow)
    assert tokens_of([first, *rest]) == oracle(PROMPT, 0, 60)
    assert len(rest) == 1


async def test_the_rest_of_a_stream_can_be_had_as_a_result() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS) as rig:
        async with rig.engine.stream(PROMPT, seed=0, max_tokens=30, n=2) as stream:
            first = await anext(stream)
            result = await stream.result()
        assert result.text.startswith(first.text)
        assert result.text == stream.text == letters(0, 30)
        assert result.completions[1].text == letters(1, 30)
        assert await read(stream) == []


async def test_a_result_can_be_asked_for_after_the_end() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS) as rig:
        stream = rig.engine.stream(PROMPT, seed=0, max_tokens=5)
        await read(stream)
        assert (await stream.result()).text == letters(0, 5)
        assert (await stream.result()).token_ids == oracle(PROMPT, 0, 5, 26)
        unread = rig.engine.stream(PROMPT, seed=0, max_tokens=5)
        assert [(await unread.result()).text for _ in range(2)] == [letters(0, 5)] * 2


# Waiting without reading


async def test_waiting_reads_nothing(rig: Rig) -> None:
    """Everything can be read afterwards, once; waiting again returns at once."""
    stream = rig.engine.stream(PROMPT, seed=2, max_tokens=9)
    await stream.wait()
    assert (stream.finish_reason, stream.usage.completion_tokens) == ("length", 9)
    assert stream.times.finished is not None
    assert rig.engine.statistics().running == 0
    await stream.wait()
    chunks = await read(stream)
    assert tokens_of(chunks) == oracle(PROMPT, 2, 9)
    await stream.wait()
    assert await read(stream) == []


async def test_waiting_after_reading_some_and_before_the_result() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS) as rig:
        stream = rig.engine.stream(PROMPT, seed=1, max_tokens=30)
        first = await anext(stream)
        await stream.wait()
        assert stream.text == first.text, "what was not read is not text yet"
        assert (await stream.result()).text == letters(1, 30)


async def test_waiting_for_several_completions(rig: Rig) -> None:
    stream = rig.engine.stream(PROMPT, seed=0, max_tokens=6, n=3)
    await stream.wait()
    assert stream.usage.completion_tokens == 18


async def test_waiting_for_one_that_is_aborted(held: Rig) -> None:
    """No error; who waits is woken."""
    stream = held.engine.stream(PROMPT, max_tokens=9, request_id="it")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.wait)
        await until(lambda: held.executor.plans)
        assert held.engine.abort("it")
    assert stream.finish_reason == "abort"


async def test_a_cancelled_wait_releases_the_request(held: Rig) -> None:
    stream = held.engine.stream(PROMPT, max_tokens=9)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.wait)
        await until(lambda: held.executor.plans)
        tasks.cancel_scope.cancel()
    assert stream.finish_reason == "abort"
    assert held.engine.statistics().running == 0


async def test_waiting_for_one_that_fails() -> None:
    """As the result would: with an error of its own each time, and nothing to read."""
    async with Rig(faults={1: RuntimeError("broken")}) as rig:
        stream = rig.engine.stream(PROMPT, max_tokens=9)
        for _ in range(2):
            with pytest.raises(StepFailedError, match="broken"):
                await stream.wait()
        assert stream.finish_reason == "error"
        assert await read(stream) == []


# Endings


def completed_by(seed: int, count: int, stop: str) -> int:
    """Tokens after which ``stop`` is complete in the letters of ``seed``."""
    text = letters(seed, count)
    assert stop in text
    return text.index(stop) + len(stop)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("include", [False, True], ids=["without", "with"])
async def test_stop_strings_across_tokens(include: bool, depth: int) -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS, depth=depth) as rig:
        for seed in range(5):
            stop = letters(seed, 40)[14:18]
            end = completed_by(seed, 40, stop)
            chunks = await read(rig.engine.stream(PROMPT, seed=seed, max_tokens=40, stop=["never", stop], include_stop=include))
            assert text_of(chunks) == letters(seed, 40)[: end if include else end - 4]
            assert tokens_of(chunks) == oracle(PROMPT, seed, 40, 26)[:end]
            assert chunks[-1].finish_reason == "stop"
            result = await rig.engine.generate(PROMPT, seed=seed, max_tokens=40, stop=stop, include_stop=include)
            assert result.text == text_of(chunks)
            assert result.completions[0].stop_reason == stop
        await rig.settle()
        assert rig.statistics.generated_tokens == 2 * sum(completed_by(s, 40, letters(s, 40)[14:18]) for s in range(5))


async def test_text_after_a_stop_string_in_the_same_token_is_dropped() -> None:
    tokenizer = Pieces(["one;two", "x"])
    async with Rig(limits(vocab_size=2), tokenizer=tokenizer) as rig:
        tokens = oracle([1, 0, 1], 1, 20, 2)
        end = tokens.index(0) + 1
        assert end > 1
        chunks = await read(rig.engine.stream([1, 0, 1], seed=1, max_tokens=20, stop=";"))
        assert tokens_of(chunks) == tokens[:end]
        assert text_of(chunks) == "x" * (end - 1) + "one"


async def test_the_first_stop_string_to_be_complete_ends_the_text() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS) as rig:
        text = letters(0, 40)
        result = await rig.engine.generate(PROMPT, seed=0, max_tokens=40, stop=[text[10:20], text[12:15]])
        assert result.completions[0].stop_reason == text[12:15]
        assert result.text == text[:12]


async def test_what_might_become_a_stop_string_is_held_back_and_flushed_at_the_end() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS, hold=True) as rig:
        text = letters(0, 20)
        stream = rig.engine.stream(PROMPT, seed=0, max_tokens=20, stop=text[16:] + "!")
        seen = ""
        for count in range(1, 21):
            rig.executor.step()
            chunk = await anext(stream)
            seen += chunk.text
            assert seen == (text if count == 20 else text[: min(count, 16)])
        assert chunk.finish_reason == "length"
        assert chunk.text == text[16:]


async def test_what_was_held_back_is_flushed_when_a_request_is_aborted() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS, hold=True) as rig:
        text = letters(0, 20)
        stream = rig.engine.stream(PROMPT, seed=0, max_tokens=20, stop=text[3:6] + "!", request_id="a")
        await rig.step(6)
        assert (await anext(stream)).text == text[:3]
        assert rig.engine.abort("a")
        (chunk,) = await read(stream)
        assert (chunk.text, chunk.finish_reason) == (text[3:6], "abort")


async def test_min_tokens_lets_early_stop_strings_pass() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS) as rig:
        text = letters(0, 40)
        early, late = text[3:5], text[20:23]
        assert text.count(early) == 1
        result = await rig.engine.generate(PROMPT, seed=0, max_tokens=40, stop=[early, late], min_tokens=10)
        assert result.completions[0].stop_reason == late
        assert result.text == text[:20]


def ending(case: str) -> tuple[SamplingParams, Pieces, int, str, str | int | None, str]:
    """Parameters; tokenizer; output tokens; finish reason; stop reason; text.  The end comes with the tenth token."""
    tokens = oracle(PROMPT, 3, 40, 26)
    text = letters(3, 40)
    assert tokens[9] not in tokens[:9]
    eos = Pieces([chr(ord("a") + i) for i in range(26)], eos=tokens[9])
    base = SamplingParams(seed=3, max_tokens=30)
    id_, string = (tokens[9],), (text[7:10],)
    return {
        "eos": (base, eos, 10, "stop", None, text[:9]),
        "eos kept": (SamplingParams(seed=3, max_tokens=30, include_stop=True), eos, 10, "stop", None, text[:9]),
        "stop id": (SamplingParams(seed=3, max_tokens=30, stop_token_ids=id_), LETTERS, 10, "stop", tokens[9], text[:9]),
        "stop id kept": (
            SamplingParams(seed=3, max_tokens=30, stop_token_ids=id_, include_stop=True),
            LETTERS, 10, "stop", tokens[9], text[:10],
        ),
        "stop id that is eos": (
            SamplingParams(seed=3, max_tokens=30, stop_token_ids=id_), eos, 10, "stop", tokens[9], text[:9],
        ),
        "stop id beside a stop string": (
            SamplingParams(seed=3, max_tokens=30, stop_token_ids=id_, stop=("!",)),
            LETTERS, 10, "stop", tokens[9], text[:9],
        ),
        "stop string": (SamplingParams(seed=3, max_tokens=30, stop=string), LETTERS, 10, "stop", string[0], text[:7]),
        "stop string kept": (
            SamplingParams(seed=3, max_tokens=30, stop=string, include_stop=True),
            LETTERS, 10, "stop", string[0], text[:10],
        ),
        "length": (SamplingParams(seed=3, max_tokens=10), LETTERS, 10, "length", None, text[:10]),
        "eos on the last token": (SamplingParams(seed=3, max_tokens=10), eos, 10, "stop", None, text[:9]),
        "stop id on the last token": (
            SamplingParams(seed=3, max_tokens=10, stop_token_ids=id_), LETTERS, 10, "stop", tokens[9], text[:9],
        ),
        "stop string on the last token": (
            SamplingParams(seed=3, max_tokens=10, stop=string), LETTERS, 10, "stop", string[0], text[:7],
        ),
        "stop string without a stop id's token": (
            SamplingParams(seed=3, max_tokens=30, stop=string, stop_token_ids=(tokens[9],)),
            LETTERS, 10, "stop", tokens[9], text[:9],
        ),
    }[case]  # fmt: skip


CASES = [
    "eos", "eos kept", "stop id", "stop id kept", "stop id that is eos", "stop id beside a stop string", "stop string",
    "stop string kept", "length", "eos on the last token", "stop id on the last token", "stop string on the last token",
    "stop string without a stop id's token",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_how_a_request_ends(case: str) -> None:
    params, tokenizer, count, finish_reason, stop_reason, text = ending(case)
    async with Rig(LETTERS_LIMITS, tokenizer=tokenizer) as rig:
        (completion,) = (await rig.engine.generate(PROMPT, params)).completions
        expected = Completion(0, text, oracle(PROMPT, 3, count, 26), finish_reason, stop_reason)  # type: ignore[arg-type]
        assert completion == expected
        stream = rig.engine.stream(PROMPT, params)
        assert stream.finish_reason is None
        chunks = await read(stream)
        assert (text_of(chunks), tokens_of(chunks)) == (text, completion.token_ids)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == stream.finish_reason == finish_reason
        assert stream.text == text


async def test_an_aborted_request_keeps_what_it_has() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS, hold=True) as rig:
        stream = rig.engine.stream(PROMPT, seed=3, max_tokens=30, request_id="x")
        await rig.step(7)
        rig.engine.abort("x")
        (completion,) = (await stream.result()).completions
        assert completion == Completion(0, letters(3, 7), oracle(PROMPT, 3, 7, 26), "abort")


# Several completions


async def test_completions_interleave_and_each_ends_once() -> None:
    async with Rig(LETTERS_LIMITS, tokenizer=LETTERS) as rig:
        stop = oracle(PROMPT, 11, 40, 26)[5]  # ends at least one of them early
        chunks = await read(rig.engine.stream(PROMPT, seed=10, n=3, max_tokens=40, stop_token_ids=[stop]))
        ends = {}
        for index in range(3):
            tokens = oracle(PROMPT, 10 + index, 40, 26)
            ends[index] = tokens.index(stop) + 1 if stop in tokens else 40
            mine = [chunk for chunk in chunks if chunk.index == index]
            assert tokens_of(mine, index) == tokens[: ends[index]]
            stopped = stop in tokens
            assert text_of(mine, index) == LETTERS.decode(tokens[: ends[index] - stopped])
            reasons = [chunk.finish_reason for chunk in mine]
            assert reasons == [None] * (len(mine) - 1) + ["stop" if stopped else "length"]
        assert len(set(ends.values())) > 1
        first_ended = min(ends.values())
        assert any(chunk.index != 0 for chunk in chunks[: first_ended * 3])


# Numbers


async def test_usage_and_identity_of_a_stream(held: Rig) -> None:
    stream = held.engine.stream(PROMPT, seed=0, max_tokens=20, n=2, request_id="mine")
    assert stream.request_id == "mine"
    assert (stream.usage.completion_tokens, stream.times.first_token, stream.finish_reason) == (0, None, None)
    await held.step(5)
    assert stream.usage.prompt_tokens == 5
    assert stream.usage.completion_tokens == 10
    held.executor.unhold()
    await read(stream)
    assert stream.usage.completion_tokens == 40
    assert stream.usage.total_tokens == 45
    times = stream.times
    assert times.admitted is not None
    assert times.first_token is not None
    assert times.finished is not None
    assert times.arrived <= times.admitted <= times.first_token <= times.finished
    other = held.engine.stream(PROMPT, max_tokens=1)
    another = held.engine.stream(PROMPT, max_tokens=1)
    assert len({stream.request_id, other.request_id, another.request_id}) == 3
    await read(other)
    await read(another)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_times_on_a_virtual_clock(depth: int) -> None:
    """Every step takes one virtual second, so every stamp is a known number."""

    async def main() -> None:
        async with Rig(limits(max_rows=1), latency=1.0, depth=depth, guard=math.inf) as rig:
            start = anyio.current_time()
            first = rig.engine.stream(PROMPT, seed=0, max_tokens=10)
            second = rig.engine.stream(PROMPT, seed=0, max_tokens=10)
            stamps = []
            async for chunk in first:
                assert len(chunk.token_ids) == 1
                stamps.append(anyio.current_time() - start)
            assert stamps == [float(i) for i in range(1, 11)]
            assert (first.times.ttft, first.times.e2e) == (1.0, 10.0)
            await second.result()
            assert (second.times.ttft, second.times.e2e) == (11.0, 20.0)
            assert rig.statistics.device_busy == 20.0
            assert rig.statistics.device_idle == 0.0

    trio.run(main, clock=MockClock(autojump_threshold=0))


# The iterator protocol


async def test_a_stream_is_its_own_iterator_and_ends_for_good(rig: Rig) -> None:
    stream = rig.engine.stream(PROMPT, max_tokens=2)
    assert aiter(stream) is stream
    assert await read(stream)
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    await stream.aclose()


async def test_submission_needs_no_reader(rig: Rig) -> None:
    streams = [rig.engine.stream([i], seed=0, max_tokens=5) for i in range(12)]
    await until(lambda: rig.statistics.finished["length"] == 12)
    for i, stream in enumerate(streams):
        assert tokens_of(await read(stream)) == oracle([i], 0, 5)


async def test_many_readers_at_once(rig: Rig) -> None:
    outputs: dict[int, tuple[int, ...]] = {}

    async def reader(index: int) -> None:
        outputs[index] = tokens_of(await read(rig.engine.stream([index], seed=index, max_tokens=1 + index % 9)))

    async with anyio.create_task_group() as tasks:
        for index in range(64):
            tasks.start_soon(reader, index)
    assert outputs == {i: oracle([i], i, 1 + i % 9) for i in range(64)}
