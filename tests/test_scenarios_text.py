"""Text, stops and lengths: no character split, no prompt leaked, nothing lost, and the right reason.

Cases from reports of other engines; each test names the report it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Any

import anyio
import numpy as np
import pytest

from asyncsched.errors import InvalidParamsError, InvalidTokenError
from asyncsched.testing import ByteTokenizer, ScriptedRun, check_invariants, expected_tokens
from asyncsched.text import TextAssembler

from .engine_helpers import ASYNCIO, LETTERS, Pieces, Rig, limits, oracle, read, text_of, tokens_of, turns

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
EMOJI = "🦊".encode()  # four bytes


def seed_for(prompt: Sequence[int], begins: Sequence[int], vocab_size: int) -> int:
    """The first seed whose output begins with the given tokens."""
    return next(seed for seed in count() if expected_tokens(prompt, seed, len(begins), vocab_size) == list(begins))


@ASYNCIO
@pytest.mark.parametrize("split", [1, 2, 3])
async def test_a_prompt_that_ends_in_half_a_character(split: int) -> None:
    """vllm-project/vllm 48853, 48854: the first delta held text of the prompt."""
    pieces = Pieces(["a", EMOJI[:split], EMOJI[split:], "b"])
    prompt = [0, 0, 1]  # "aa" and the first bytes of a character
    async with Rig(limits(vocab_size=4), tokenizer=pieces) as rig:
        chunks = await read(rig.engine.stream(prompt, max_tokens=3, seed=seed_for(prompt, [2, 3, 0], 4)))
        text = text_of(chunks)
        assert tokens_of(chunks) == (2, 3, 0)
        assert text.endswith("ba")
        assert "aa" not in text
        assert "🦊" not in text
        assert text == (EMOJI[split:] + b"ba").decode("utf-8", "replace")


@pytest.mark.parametrize(
    "pieces",
    [
        # The recorded kind of case: decoding a longer run of tokens gives a shorter text, or another one.
        [b"\xe2", b"\x96", b"\xe2\x96\x81", b"\xc3", b"\x28", b"\xa0\xa1"],
        [b"\xf0", b"\x9f", b"\xf0\x9f", b"\xa6\x8a", b"\xff", b"\xfe\x80"],
        [b"\xed\xa0\x80", b"\xed\xb0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\x80", b"\xe4\xb8"],
        ["世".encode()[:1], "世".encode()[1:], "世".encode()[:2], "世".encode()[2:], b"\xe4", b"x"],
    ],
)
@pytest.mark.parametrize("stop", [(), ("xyz",)])
def test_invalid_bytes_in_any_order_add_up(pieces: list[str | bytes], stop: tuple[str, ...]) -> None:
    """vllm-project/vllm 17448; sgl-project/sglang 31598, 31564, 22510, 22549: text that shrank broke the stream."""
    tokenizer = Pieces(pieces)
    random = Random(0)
    for _ in range(300):
        tokens = [random.randrange(len(pieces)) for _ in range(random.randint(1, 30))]
        assembler = TextAssembler(tokenizer, stop=stop)
        parts, position = [], 0
        while position < len(tokens):
            size = random.randint(1, 3)
            parts.append(assembler.feed(tokens[position : position + size]).text)
            position += size
        parts.append(assembler.finish())
        assert "".join(parts) == tokenizer.decode(tokens)


@ASYNCIO
async def test_thousands_of_texts_at_once() -> None:
    """sgl-project/sglang 2812: with more requests than the detokeniser's cache held, a KeyError killed it."""
    tokenizer = ByteTokenizer()
    async with Rig(limits(vocab_size=tokenizer.vocab_size, max_rows=64, pages=512), tokenizer=tokenizer) as rig:
        streams = [
            rig.engine.stream([index % 256, 65], seed=index % 100, max_tokens=6, ignore_eos=True) for index in range(3000)
        ]
        texts: dict[int, str] = {}

        async def reader(index: int) -> None:
            texts[index] = text_of(await read(streams[index]))

        async with anyio.create_task_group() as tasks:
            for index in range(3000):
                tasks.start_soon(reader, index)
        for index, text in texts.items():
            assert text == tokenizer.decode(oracle([index % 256, 65], index % 100, 6, tokenizer.vocab_size))


@ASYNCIO
@DEPTHS
async def test_a_stop_string_with_the_last_allowed_token(depth: int) -> None:
    """sgl-project/sglang 30291: the reason was "length" although the stop string was hit."""
    tokens = oracle([1, 2, 3], 7, 10, 26)
    text = LETTERS.decode(tokens)
    async with ScriptedRun(limits(vocab_size=26), tokenizer=LETTERS, depth=depth) as run:
        run.executor.unhold()
        for stop, inclusive in [(text[-2:], True), (text[-1], False)]:
            where = text.index(stop) + len(stop)
            result = await run.engine.generate([1, 2, 3], seed=7, max_tokens=where, stop=stop, include_stop=inclusive)
            assert (result.finish_reason, result.completions[0].stop_reason) == ("stop", stop)
            assert result.text == (text[:where] if inclusive else text[: where - len(stop)])
            result = await run.engine.generate([1, 2, 3], seed=7, max_tokens=where, stop_token_ids=(tokens[where - 1],))
            assert result.finish_reason == "stop"


@ASYNCIO
@DEPTHS
async def test_a_stop_string_before_the_end_token_of_the_same_moment(depth: int) -> None:
    """vllm-project/vllm, stop strings: the earliest end wins, and what follows is dropped."""
    pieces = Pieces(["a", "b", "STOP", "c"], eos=3)
    prompt = [0, 1]
    seed = seed_for(prompt, [0, 2, 3], 4)
    async with ScriptedRun(limits(vocab_size=4), tokenizer=pieces, depth=depth) as run:
        run.executor.unhold()
        result = await run.engine.generate(prompt, seed=seed, max_tokens=9, stop="STOP")
        assert (result.text, result.finish_reason, result.completions[0].stop_reason) == ("a", "stop", "STOP")
        assert result.token_ids == (0, 2)
        plain = await run.engine.generate(prompt, seed=seed, max_tokens=9)
        assert (plain.text, plain.finish_reason, plain.completions[0].stop_reason) == ("aSTOP", "stop", None)
        assert plain.token_ids == (0, 2, 3), "the end token is recorded"


@ASYNCIO
@DEPTHS
async def test_tokens_after_a_stop_are_dropped(depth: int) -> None:
    """vllm-project/vllm, stopping: what was computed ahead of a stop never shows, in text, tokens or log-probabilities."""
    tokens = oracle([5, 6], 3, 20, 26)
    text = LETTERS.decode(tokens)
    async with ScriptedRun(limits(vocab_size=26), tokenizer=LETTERS, depth=depth) as run:
        stop = text[6:8]
        stream = await run.submit([5, 6], seed=3, max_tokens=20, stop=stop)
        await run.steps(25)
        chunks = await read(stream)
        where = text.index(stop) + 2
        assert tokens_of(chunks) == tokens[:where]
        assert text_of(chunks) == text[: where - 2]
        assert len(run.plans) <= where + max(1, depth)
        check_invariants(run.engine, idle=True)


@ASYNCIO
@DEPTHS
async def test_min_tokens_beyond_the_room(depth: int) -> None:
    """vllm-project/vllm 51299: with min_tokens beyond the context a request held its blocks for ever."""
    async with ScriptedRun(limits(max_model_len=24), depth=depth) as run:
        tokens = oracle(range(20), 1, 4)
        stream = await run.submit(list(range(20)), seed=1, max_tokens=60, min_tokens=50, stop_token_ids=tokens)
        await run.steps(10)
        result = await stream.result()
        assert (result.token_ids, result.finish_reason) == (tokens, "length")
        check_invariants(run.engine, idle=True)


@ASYNCIO
async def test_min_tokens_exactly_met() -> None:
    """vllm-project/vllm, stopping: below min_tokens nothing ends a request; at min_tokens a stop does."""
    tokens = oracle([9], 2, 8)
    async with ScriptedRun() as run:
        run.executor.unhold()
        for least in (0, 1, 3, 4, 5, 8):
            result = await run.engine.generate([9], seed=2, max_tokens=8, min_tokens=least, stop_token_ids=(tokens[3],))
            expected = 4 if least <= 4 else 8
            assert len(result.token_ids) == expected
            assert result.finish_reason == ("stop" if expected == 4 else "length")
            assert result.completions[0].stop_reason == (tokens[3] if expected == 4 else None)


@ASYNCIO
@pytest.mark.parametrize(
    "ids",
    [[-1], [1000], [5, 2**31], [2**63], [2**70], [5, -(2**40)], np.array([2**33]), np.array([1000], np.uint16), [[1], [2, 3]]],
)
async def test_ids_outside_the_vocabulary(ids: Any) -> None:
    """gonka-ai/gonka 1170: an id that was not checked was used as an index."""
    async with Rig() as rig:
        with pytest.raises(InvalidTokenError):
            rig.engine.stream(ids, max_tokens=2)
        if not isinstance(ids, np.ndarray) and isinstance(ids[0], int):
            for field in ("stop_token_ids", "bad_token_ids", "allowed_token_ids"):
                options: dict[str, Any] = {field: tuple(ids)}
                with pytest.raises(InvalidTokenError, match=field):
                    rig.engine.stream([1], max_tokens=2, **options)
            with pytest.raises(InvalidTokenError, match="logit_bias"):
                rig.engine.stream([1], max_tokens=2, logit_bias=dict.fromkeys(ids, 1.0))
        await rig.serves()


@ASYNCIO
async def test_stop_strings_without_text() -> None:
    """vllm-project/vllm 57052: a stop string was ignored when only ids were asked for."""
    async with Rig(limits(vocab_size=26), tokenizer=LETTERS) as rig:
        with pytest.raises(InvalidParamsError, match="need text"):
            rig.engine.stream([1], stop="x", detokenize=False)
    async with Rig() as rig:
        with pytest.raises(InvalidParamsError, match="need a tokenizer"):
            rig.engine.stream([1], stop="x")


@ASYNCIO
@pytest.mark.parametrize("interval", [1, 5, 10])
async def test_readers_of_any_pace_get_the_same_text(interval: int) -> None:
    """vllm-project/vllm, output processing: joined text equals the decoded whole, for intervals of 1, 5 and 10."""
    tokenizer = ByteTokenizer()
    async with ScriptedRun(limits(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer) as run:
        stream = await run.submit([1, 2], seed=4, max_tokens=60, ignore_eos=True, stop="no such stop")
        chunks = []
        for _ in range(70):
            await run.steps(interval)
            if stream.finish_reason is not None:
                break
            chunks.append(await anext(aiter(stream)))
            assert len(chunks[-1].token_ids) == interval
        chunks += await read(stream)
        assert text_of(chunks) == tokenizer.decode(oracle([1, 2], 4, 60, tokenizer.vocab_size))


@ASYNCIO
async def test_unread_output_merges_and_an_error_wakes_the_reader() -> None:
    """vllm-project/vllm, output processing: two puts merge, the end is kept, an error wakes who waits."""
    async with Rig(hold=True, faults={6: ValueError("six")}) as rig:
        stream = rig.engine.stream([1, 2], seed=1, max_tokens=9)
        await turns()
        await rig.step(3)
        chunk = await anext(aiter(stream))
        assert chunk.token_ids == oracle([1, 2], 1, 3)
        failed: list[BaseException] = []

        async def reader() -> None:
            try:
                await read(stream)
            except Exception as exc:
                failed.append(exc)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader)
            await turns()
            await rig.step(3)
        assert [type(exc).__name__ for exc in failed] == ["StepFailedError"]
        whole = rig.engine.stream([1, 2], seed=1, max_tokens=4)
        rig.executor.unhold()
        await turns(100)
        assert [(len(chunk.token_ids), chunk.finish_reason) for chunk in await read(whole)] == [(4, "length")]


@ASYNCIO
@pytest.mark.parametrize("include", [False, True])
async def test_stop_ids_are_hidden_or_shown(include: bool) -> None:
    """vllm-project/vllm, output processing: a stop id is hidden or shown as asked; ignoring the end shows both."""
    pieces = Pieces(["a", "b", "<s>", "<end>"], eos=3)
    prompt = [0, 1]
    seed = seed_for(prompt, [0, 3, 2, 1], 4)
    options: dict[str, Any] = {"seed": seed, "max_tokens": 4, "skip_special_tokens": False, "include_stop": include}
    async with Rig(limits(vocab_size=4), tokenizer=pieces) as rig:
        ended = await rig.engine.generate(prompt, **options)
        assert (ended.text, ended.token_ids) == ("a<end>" if include else "a", (0, 3))
        stopped = await rig.engine.generate(prompt, ignore_eos=True, stop_token_ids=(2,), **options)
        assert (stopped.text, stopped.token_ids) == ("a<end><s>" if include else "a<end>", (0, 3, 2))
        neither = await rig.engine.generate(prompt, ignore_eos=True, **options)
        assert (neither.text, neither.finish_reason) == ("a<end><s>b", "length")
