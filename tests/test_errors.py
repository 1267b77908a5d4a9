"""Bad input: the right error with a text that helps, nothing lost, and an engine that serves on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import numpy as np
import pytest

import asyncsched
from asyncsched import (
    AsyncschedError,
    ChatTemplateError,
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineError,
    InvalidParamsError,
    InvalidRequestError,
    InvalidTokenError,
    PolicyLoadError,
    PolicyNotFoundError,
    PromptTooLongError,
    RequestTooLargeError,
    SamplingParams,
    TokenizeError,
    WrongLoopError,
)
from asyncsched.testing import ByteTokenizer
from asyncsched.tokenizer import Message

from .engine_helpers import ASYNCIO, FailingTokenizer, Rig, limits, oracle, read, tokens_of, until

BYTES = ByteTokenizer()
BYTES_LIMITS = limits(vocab_size=BYTES.vocab_size)


async def assert_refused(rig: Rig, error: type[Exception], match: str, prompt: Any, **options: Any) -> None:
    """Both ways of asking raise the error; nothing is kept of the request."""
    with pytest.raises(error, match=match):
        await rig.engine.generate(prompt, **options)
    with pytest.raises(error, match=match):
        await read(rig.engine.stream(prompt, **options))
    await rig.settle()
    assert not rig.plans


# Prompts


class NoBeginTokenizer(ByteTokenizer):
    """Adds no special tokens."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, limit: int) -> list[list[int] | int]:
        return super().encode(texts, add_special_tokens=False, limit=limit)


async def test_a_text_of_no_tokens() -> None:
    tokenizer = NoBeginTokenizer()
    async with Rig(BYTES_LIMITS, tokenizer=tokenizer) as rig:
        await assert_refused(rig, EmptyPromptError, "no tokens", "")
        await rig.serves()


async def test_an_empty_text_is_a_prompt_if_the_tokenizer_begins_it() -> None:
    async with Rig(BYTES_LIMITS, tokenizer=BYTES) as rig:
        result = await rig.engine.generate("", seed=0, max_tokens=2, ignore_eos=True)
        assert result.token_ids == oracle([256], 0, 2, BYTES.vocab_size)


BAD_TOKENS: list[tuple[Any, type[Exception], str]] = [
    ([], EmptyPromptError, "no tokens"),
    (np.empty(0, np.int32), EmptyPromptError, "no tokens"),
    (list(range(128)), PromptTooLongError, r"128 tokens.* room for 127"),
    ([1] * 100_000, PromptTooLongError, "100000 tokens"),
    ([5, 1000], InvalidTokenError, r"token id 1000 at position 1 .*0 … 999"),
    ([5, -1], InvalidTokenError, "token id -1 at position 1"),
    ([2**40], InvalidTokenError, str(2**40)),
    ([2**70], InvalidTokenError, "whole numbers"),
    ([1.5], InvalidTokenError, "whole numbers"),
    ([True, False], InvalidTokenError, "whole numbers"),
    ([None], InvalidTokenError, "whole numbers"),
    (b"bytes", InvalidTokenError, "whole numbers"),
    (np.zeros((2, 3), np.int64), InvalidTokenError, "2 dimensions"),
    (np.zeros(3), InvalidTokenError, "float64"),
]


@pytest.mark.parametrize(("prompt", "error", "match"), BAD_TOKENS)
async def test_bad_token_ids(rig: Rig, prompt: Any, error: type[Exception], match: str) -> None:
    await assert_refused(rig, error, match, prompt)
    await rig.serves()


async def test_bad_token_ids_are_refused_on_submission(rig: Rig) -> None:
    for prompt, error, match in BAD_TOKENS:
        with pytest.raises(error, match=match):
            rig.engine.stream(prompt)
    assert rig.statistics.submitted == 0


async def test_a_list_of_bad_rows(rig: Rig) -> None:
    mixed: Any = [[1, 2], [3, "x"]]
    ragged: Any = [[1, 2], [3]]
    with pytest.raises(InvalidTokenError):
        await rig.engine.generate(mixed)
    with pytest.raises(InvalidTokenError):
        rig.engine.stream(ragged)
    await rig.serves()


@ASYNCIO
@pytest.mark.parametrize(
    "prompt",
    [None, 7, 1.5, object(), {"role": "user"}, {1, 2}, iter([1, 2])],
    ids=["none", "int", "float", "object", "message", "set", "iterator"],
)
@pytest.mark.parametrize("tokenizer", [BYTES, None], ids=["text", "no_text"])
async def test_a_prompt_of_no_known_kind(prompt: Any, tokenizer: ByteTokenizer | None) -> None:
    """It must not reach the tasks that serve everyone."""
    async with Rig(BYTES_LIMITS, tokenizer=tokenizer) as rig:
        with pytest.raises(InvalidRequestError):
            await rig.engine.generate(prompt)
        await rig.serves()


@pytest.mark.parametrize("tokens", [130, 10_000, 1_000_000])
async def test_a_text_that_is_too_long(tokens: int) -> None:
    async with Rig(BYTES_LIMITS, tokenizer=BYTES) as rig:
        await assert_refused(rig, PromptTooLongError, r"tokens; the model's length of 128 leaves room for 127", "x" * tokens)
        await rig.serves()


async def test_a_hopeless_text_is_not_tokenised_at_all() -> None:
    tokenizer = FailingTokenizer()  # would raise
    async with Rig(BYTES_LIMITS, tokenizer=tokenizer) as rig:
        await assert_refused(rig, PromptTooLongError, "at least", "poison" * 10_000)


async def test_a_request_that_can_never_fit_the_pool() -> None:
    async with Rig(limits(pages=10)) as rig:
        match = r"20 tokens\) \+ max_tokens \(30\) need 13 pages"
        await assert_refused(rig, RequestTooLargeError, match, list(range(20)), max_tokens=30)
        result = await rig.engine.generate(list(range(20)), max_tokens=21, seed=0)  # the last token needs no page
        assert result.token_ids == oracle(range(20), 0, 21)


async def test_text_without_a_tokenizer(rig: Rig) -> None:
    await assert_refused(rig, InvalidParamsError, "no tokenizer.*token ids", "text")
    await assert_refused(rig, InvalidParamsError, "no tokenizer", [{"role": "user", "content": "hi"}])
    await assert_refused(rig, InvalidParamsError, "stop strings need a tokenizer.*stop_token_ids", [1], stop="x")
    await rig.serves()


async def test_chats_that_the_template_refuses() -> None:
    async with Rig(BYTES_LIMITS, tokenizer=BYTES) as rig:
        await assert_refused(rig, ChatTemplateError, "wizard.*unknown", [{"role": "wizard", "content": "x"}])
        await assert_refused(rig, ChatTemplateError, "must be a string", [{"role": "user", "content": 7}])
        await assert_refused(rig, ChatTemplateError, "None.*unknown", [{}])
        await rig.serves()


@pytest.mark.parametrize("second", [7, "text", None, ["list"]], ids=["int", "text", "none", "list"])
async def test_a_chat_with_something_else_in_it(second: Any) -> None:
    async with Rig(BYTES_LIMITS, tokenizer=BYTES) as rig:
        with pytest.raises(InvalidRequestError):
            await rig.engine.chat([{"role": "user", "content": "hi"}, second])
        await rig.serves()


async def test_a_chat_without_a_template() -> None:
    class NoTemplate(ByteTokenizer):
        def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool, **options: Any) -> str:
            raise ChatTemplateError("this model has no chat template")

    async with Rig(BYTES_LIMITS, tokenizer=NoTemplate()) as rig:
        await assert_refused(rig, ChatTemplateError, "no chat template", [{"role": "user", "content": "x"}])
        await rig.serves()


async def test_a_tokenizer_that_raises_fails_that_request_only() -> None:
    async with Rig(BYTES_LIMITS, tokenizer=FailingTokenizer()) as rig:
        texts = [f"text {i}" if i % 5 else f"poison {i}" for i in range(20)]
        streams = [rig.engine.stream(text, seed=0, max_tokens=2, ignore_eos=True) for text in texts]
        for text, stream in zip(texts, streams, strict=True):
            if "poison" in text:
                with pytest.raises(TokenizeError, match="cannot read this") as caught:
                    await stream.result()
                assert isinstance(caught.value.__cause__, RuntimeError)
                assert stream.finish_reason == "error"
            else:
                prompt = [256, *text.encode()]
                assert (await stream.result()).token_ids == oracle(prompt, 0, 2, BYTES.vocab_size)


async def test_a_text_that_cannot_be_encoded() -> None:
    async with Rig(BYTES_LIMITS, tokenizer=BYTES) as rig:
        await assert_refused(rig, TokenizeError, "UnicodeEncodeError", "a lone surrogate \ud800")
        await rig.serves()


async def test_a_failed_request_of_a_batch_ends_the_others() -> None:
    async with Rig(BYTES_LIMITS, tokenizer=FailingTokenizer()) as rig:
        with pytest.raises(TokenizeError):
            await rig.engine.generate(["fine", "poison", "fine"], max_tokens=100)
        await rig.settle()
        with pytest.raises(InvalidTokenError):
            await rig.engine.generate([[1], [2], [-3]], max_tokens=100)
        await rig.settle()
        await rig.serves()


# Parameters


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens=-1 must be at least 0"),
    ({"max_tokens": 1.5}, "max_tokens=1.5 must be a whole number"),
    ({"max_tokens": True}, "max_tokens=True must be a whole number"),
    ({"max_tokens": "8"}, "max_tokens='8'"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is over max_tokens=8"),
    ({"temperature": -0.1}, "temperature=-0.1 must be at least 0"),
    ({"temperature": math.nan}, "temperature=nan must be a finite number"),
    ({"temperature": math.inf}, "temperature=inf must be a finite number"),
    ({"temperature": None}, "temperature=None"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"top_k": -1}, "top_k=-1 must be at least 0"),
    ({"top_k": 0.5}, "top_k=0.5"),
    ({"top_p": 0.0}, r"top_p=0.0 is not in \(0, 1\]; use 1"),
    ({"top_p": 1.01}, "top_p=1.01"),
    ({"top_p": math.nan}, "top_p=nan"),
    ({"min_p": -0.1}, "min_p=-0.1 is not in"),
    ({"min_p": 1.1}, "min_p=1.1"),
    ({"min_p": math.inf}, "min_p=inf"),
    ({"seed": -1}, r"seed=-1 is not in \[0, 2\*\*63\)"),
    ({"seed": 2**63}, "seed=9223372036854775808"),
    ({"seed": 1.0}, "seed=1.0"),
    ({"n": 0}, "n=0 is not in 1"),
    ({"n": 129}, "n=129"),
    ({"n": math.inf}, "n=inf"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1 is not in"),
    ({"presence_penalty": math.nan}, "presence_penalty=nan"),
    ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1"),
    ({"frequency_penalty": -math.inf}, "frequency_penalty=-inf"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 is not in"),
    ({"repetition_penalty": 10.1}, "repetition_penalty=10.1"),
    ({"repetition_penalty": math.nan}, "repetition_penalty=nan"),
    ({"logprobs": 21}, "logprobs=21 is not in 0 … 20"),
    ({"logprobs": -1}, "logprobs=-1"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs=1.5"),
    ({"logit_bias": {1: math.nan}}, "logit_bias=nan must be a finite number"),
    ({"logit_bias": {1: math.inf}}, "logit_bias=inf"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias key='a'"),
    ({"logit_bias": [1, 2]}, "logit_bias must map"),
    ({"stop": ""}, "empty string"),
    ({"stop": ["a", ""]}, "empty string"),
    ({"stop": 7}, "stop must be a sequence of str"),
    ({"stop": [7]}, "stop must hold str only"),
    ({"stop": ["a"], "detokenize": False}, "stop strings need text"),
    ({"stop_token_ids": 7}, "stop_token_ids must be a sequence of int"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids=1.5"),
    ({"stop_token_ids": "12"}, "stop_token_ids must be a sequence"),
    ({"bad_token_ids": [None]}, "bad_token_ids=None"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": [1, 2], "bad_token_ids": [2, 1, 0]}, "nothing could be sampled"),
    ({"temprature": 1.0}, "unknown option 'temprature'; did you mean 'temperature'"),
    ({"maxtokens": 1}, "unknown option 'maxtokens'; did you mean 'max_tokens'"),
    ({"tennant": "a"}, "did you mean 'tenant'"),
    ({"xyzzy": 1}, "unknown option 'xyzzy'$"),
]  # fmt: skip


@ASYNCIO
@pytest.mark.parametrize(("options", "match"), BAD_PARAMS, ids=[str(options) for options, _ in BAD_PARAMS])
async def test_bad_parameters(options: dict[str, Any], match: str) -> None:
    async with Rig(BYTES_LIMITS, tokenizer=BYTES) as rig:
        with pytest.raises(InvalidParamsError, match=match):
            rig.engine.stream([1], **options)
        with pytest.raises(InvalidParamsError, match=match):
            await rig.engine.generate("text", SamplingParams(max_tokens=8), **options)
        assert rig.statistics.submitted == 0


@pytest.mark.parametrize("field", ["stop_token_ids", "bad_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("token", [-1, 1000, 2**40])
async def test_token_ids_of_parameters_must_exist(rig: Rig, field: str, token: int) -> None:
    value: Any = {7: 1.0, token: 1.0} if field == "logit_bias" else [7, token]
    await assert_refused(rig, InvalidTokenError, f"{field}: token id {token} is outside the vocabulary", [1], **{field: value})
    await rig.serves()


BAD_OPTIONS: list[dict[str, Any]] = [
    {"hints": 7}, {"hints": None}, {"hints": ["a"]}, {"cache_salt": ["unhashable"]}, {"cache_salt": None},
    {"priority": "high"}, {"priority": None}, {"tenant": []}, {"tenant": None}, {"program_id": {}}, {"deadline": "soon"},
    {"deadline": math.nan}, {"deadline": -1.0}, {"timeout": "1"}, {"queue_timeout": math.inf},
]  # fmt: skip


@ASYNCIO
@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5, 6], "text"], ids=["tokens", "text"])
async def test_bad_request_options(prompt: Any, options: dict[str, Any]) -> None:
    """They are refused as well, rather than break a task or a policy later."""
    async with Rig(BYTES_LIMITS, tokenizer=BYTES) as rig:
        with pytest.raises(InvalidParamsError, match=next(iter(options))):
            await rig.engine.generate(prompt, **options)
        await rig.serves()
        assert not rig.statistics.policy_faults


@ASYNCIO
@pytest.mark.parametrize("params", [{"max_tokens": 3}, 3, "greedy"], ids=repr)
async def test_params_of_another_type(rig: Rig, params: Any) -> None:
    with pytest.raises(InvalidParamsError, match="SamplingParams"):
        await rig.engine.generate([1], params)
    await rig.serves()


async def test_an_id_that_cannot_be_one(rig: Rig) -> None:
    unhashable: Any = ["a"]
    with pytest.raises(InvalidParamsError, match="request_id"):
        rig.engine.stream([1], request_id=unhashable)
    await rig.serves()


async def test_an_id_in_use(held: Rig) -> None:
    stream = held.engine.stream([1], seed=0, max_tokens=5, request_id="a")
    for _ in range(2):
        with pytest.raises(DuplicateRequestError, match=r"'a' belongs to a live request"):
            held.engine.stream([2], request_id="a")
        await held.step()
    held.executor.unhold()
    assert tokens_of(await read(stream)) == oracle([1], 0, 5)
    assert (await held.engine.generate([2], seed=0, max_tokens=1, request_id="a")).request_id == "a"
    with pytest.raises(InvalidParamsError, match="request_id"):
        await held.engine.generate([[1], [2]], request_id="b")


async def test_an_id_of_the_engines_own_may_be_taken(rig: Rig) -> None:
    """A caller's id may look like one the engine would make up."""
    stream = rig.engine.stream([1], seed=0, max_tokens=5, request_id="request-2")
    results = await rig.engine.generate([[1]] * 4, seed=0, max_tokens=5)
    assert {result.token_ids for result in results} == {oracle([1], 0, 5)}
    assert tokens_of(await read(stream)) == oracle([1], 0, 5)


# The engine as a whole


async def outcome_of(call: Any) -> None:
    outcome = call()
    if inspect.iscoroutine(outcome):
        await outcome


async def test_every_call_before_the_start_and_after_the_end() -> None:
    rig = Rig()
    calls: list[Any] = [
        lambda: rig.engine.stream([1]),
        lambda: rig.engine.generate([1]),
        lambda: rig.engine.generate([[1], [2]]),
        lambda: rig.engine.chat([{"role": "user", "content": "x"}]),
        lambda: rig.engine.abort("a"),
        rig.engine.statistics,
        rig.engine.events,
        lambda: rig.engine.limits,
        lambda: rig.engine.tokenizer,
        lambda: rig.engine.model_name,
    ]
    for again in (False, True):
        for call in calls:
            with pytest.raises(EngineClosedError, match="not running; use `async with"):
                await outcome_of(call)
        if not again:
            async with rig:
                await rig.serves()
    await rig.engine.aclose()


async def test_starting_twice(rig: Rig) -> None:
    with pytest.raises(EngineError, match="started already"):
        await rig.engine.start()
    with pytest.raises(EngineError, match="started already"):
        async with rig.engine:
            pass  # pragma: no cover
    await rig.serves()


async def test_a_backend_serves_one_life() -> None:
    rig = Rig()
    async with rig:
        await rig.serves()
    with pytest.raises(EngineError, match="make a new Engine"):
        await rig.engine.start()


async def test_calls_from_another_thread(rig: Rig) -> None:
    stream = rig.engine.stream([1], seed=0, max_tokens=5, request_id="a")

    def elsewhere() -> list[BaseException]:
        errors: list[BaseException] = []
        for call in (
            lambda: rig.engine.stream([1]),
            lambda: rig.engine.abort("a"),
            rig.engine.statistics,
            rig.engine.events,
            lambda: rig.engine.limits,
            lambda: rig.engine.generate([1]).send(None),
            lambda: rig.engine.aclose().send(None),
        ):
            try:
                call()
            except BaseException as exc:
                errors.append(exc)
        return errors

    errors = await anyio.to_thread.run_sync(elsewhere)
    assert [type(error) for error in errors] == [WrongLoopError] * 7
    assert all("BlockingEngine" in str(error) for error in errors)
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert tokens_of(await read(stream)) == oracle([1], 0, 5)
    await rig.serves()


@ASYNCIO
async def test_calls_from_another_loop_in_another_thread(rig: Rig) -> None:
    async def elsewhere() -> None:
        with pytest.raises(WrongLoopError):
            await rig.engine.generate([1])
        with pytest.raises(WrongLoopError):
            await rig.engine.aclose()

    def run() -> None:
        anyio.run(elsewhere)
        anyio.run(elsewhere, backend="trio")

    await anyio.to_thread.run_sync(run)
    await rig.serves()


# Configuration

BAD_CONFIG: list[tuple[dict[str, Any], str]] = [
    ({"dept": 1}, "unknown engine option 'dept'; did you mean 'depth'"),
    ({"zzz": 1}, "unknown engine option 'zzz'$"),
    ({"depth": -1}, "depth=-1 must be a whole number of at least 0"),
    ({"depth": 1.5}, "depth=1.5"),
    ({"depth": True}, "depth=True"),
    ({"page_size": 3}, "page_size=3 is not a power of two"),
    ({"page_size": 0}, "page_size=0"),
    ({"max_rows": 0}, "max_rows=0"),
    ({"token_budget": 0}, "token_budget=0"),
    ({"chunk_cap": 0}, "chunk_cap=0"),
    ({"pages": 0}, "pages=0"),
    ({"max_model_len": -4}, "max_model_len=-4"),
    ({"max_queued_requests": 0}, "max_queued_requests=0"),
    ({"max_queued_tokens": "many"}, "max_queued_tokens='many'"),
    ({"pages": 10, "pool_bytes": 1000}, "pool's size once"),
    ({"pool_bytes": 1000, "pool_fraction": 0.5}, "pool's size once"),
    ({"pool_fraction": 0.0}, "pool_fraction=0.0"),
    ({"pool_fraction": 1.5}, "pool_fraction=1.5"),
    ({"pool_fraction": math.nan}, "pool_fraction=nan"),
    ({"pool_fraction": "half"}, "pool_fraction='half'"),
    ({"low_watermark": 0.5, "high_watermark": 0.1}, "0 <= low <= high < 1"),
    ({"low_watermark": -0.1}, "watermarks"),
    ({"high_watermark": 1.0}, "watermarks"),
    ({"high_watermark": math.nan}, "watermarks"),
    ({"high_watermark": "much"}, "watermark"),
    ({"when_full": "explode"}, "when_full='explode': use refuse or wait"),
    ({"dtype": "int3"}, "dtype='int3'"),
    ({"load_format": "zip"}, "load_format='zip'"),
    ({"slow_step_seconds": 0}, "slow_step_seconds"),
    ({"slow_step_seconds": math.nan}, "slow_step_seconds"),
    ({"close_timeout": -1.0}, "close_timeout"),
    ({"close_timeout": "long"}, "close_timeout"),
    ({"model": ""}, "model is empty"),
]


@pytest.mark.parametrize(("options", "match"), BAD_CONFIG, ids=[str(options) for options, _ in BAD_CONFIG])
def test_bad_configuration(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Engine(**options)
    with pytest.raises(ConfigError, match=match):
        Engine(config=EngineConfig(), **options)


async def test_an_unknown_policy_is_named_before_anything_starts() -> None:
    options: list[dict[str, Any]] = [{"policy": "fcsf"}, {"eviction_policy": "fcsf"}, {"admission_policy": "fcsf"}]
    for option in options:
        rig = Rig(**option)
        with pytest.raises(PolicyNotFoundError, match=r"no policy named 'fcsf'.*installed: .*fcfs.*lru"):
            await rig.engine.start()
        assert rig.executor._deliver is None
    with pytest.raises(PolicyNotFoundError, match="did you mean 'fcfs'"):
        await Rig(policy="fcsf").engine.start()
    with pytest.raises(PolicyLoadError, match=r"no method order\(\)"):
        await Rig(policy="lru").engine.start()
    with pytest.raises(PolicyLoadError, match="could not be made"):
        await Rig(policy={"name": "fcfs", "quantum": 3}).engine.start()


async def test_a_start_that_failed_can_be_tried_again() -> None:
    rig = Rig(policy="nope")
    with pytest.raises(PolicyNotFoundError):
        await rig.engine.start()
    with pytest.raises(PolicyNotFoundError):
        await rig.engine.start()
    await rig.engine.aclose()


# The errors themselves


def test_the_tree_of_errors_is_as_documented() -> None:
    document = (asyncsched.errors.__doc__ or "").splitlines()
    lines = [line for line in document if "Error" in line and ("──" in line or line.startswith("    A"))]
    stack: list[type[BaseException]] = []
    seen = set()
    for line in lines:
        level = (len(line) - len(line.lstrip(" │├└─")) - 4) // 4
        name, _, rest = line.lstrip(" │├└─").partition(" ")
        error = getattr(asyncsched.errors, name)
        seen.add(error)
        stack[level:] = [error]
        if level:
            assert error.__base__ is stack[level - 1] or stack[level - 1] in error.__bases__
        for builtin in (ValueError, TimeoutError, RuntimeError):
            assert issubclass(error, builtin) or f"({builtin.__name__})" not in rest
    types = [value for value in vars(asyncsched.errors).values() if isinstance(value, type)]
    defined = {kind for kind in types if issubclass(kind, AsyncschedError)}
    assert seen == defined
    assert all(error.__doc__ for error in defined)
    assert all(getattr(asyncsched, error.__name__) is error for error in defined)


async def test_each_reader_gets_an_error_of_its_own() -> None:
    async with Rig(BYTES_LIMITS, tokenizer=FailingTokenizer()) as rig:
        stream = rig.engine.stream("poison")
        errors = []
        for call in (stream.result, stream.result):
            with pytest.raises(TokenizeError) as caught:
                await call()
            errors.append(caught.value)
        assert errors[0] is not errors[1]
        assert str(errors[0]) == str(errors[1])


async def test_a_failed_stream_raises_once_and_then_ends() -> None:
    async with Rig(BYTES_LIMITS, tokenizer=FailingTokenizer()) as rig:
        stream = rig.engine.stream("poison")
        with pytest.raises(TokenizeError):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_request_that_fails_unread_is_forgotten() -> None:
    async with Rig(BYTES_LIMITS, tokenizer=FailingTokenizer()) as rig:
        stream = rig.engine.stream("poison", request_id="p")
        await until(lambda: stream.finish_reason is not None)
        assert stream.finish_reason == "error"
        assert not rig.engine.abort("p")
        assert (await rig.engine.generate("fine", max_tokens=0, request_id="p")).finish_reason == "length"
