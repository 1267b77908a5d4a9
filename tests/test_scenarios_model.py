"""Reports of other engines that need logits: a tiny random model on the CPU executor, in float32.

The outputs of the engine must depend on the request alone: not on the depth, the cache, chunks, or who else
is in the batch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest
import torch

from asyncsched import Backend, Engine, Result, StepFailedError, TokenStream
from asyncsched.gpu.cpu_executor import CpuExecutor
from asyncsched.gpu.models.decoder import Decoder
from asyncsched.gpu.models.decoder_config import DecoderConfig
from asyncsched.gpu.sampler import Sampler
from asyncsched.testing import check_invariants

from .models_helpers import TINY, VOCAB, ModuleWeights, limits_for, tiny_transformer, tokens_for


@pytest.fixture(scope="module")
def model() -> Iterator[Decoder]:
    weights = ModuleWeights(tiny_transformer("llama", **TINY))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from more, and they wait for each other on a busy machine
    yield Decoder(DecoderConfig.from_hf(weights.config), weights)
    torch.set_num_threads(threads)


@asynccontextmanager
async def running(
    model: Decoder, *, rows: int = 16, pages: int = 160, page_size: int = 8, **options: Any
) -> AsyncIterator[Engine]:
    limits = limits_for(model, rows=rows, pages=pages, page_size=page_size)
    executor = CpuExecutor(model, Sampler(limits.max_rows, limits.vocab_size), limits)
    async with Engine(backend=Backend(executor, None, "tiny"), **options) as engine:
        yield engine
        await engine.drain()
        check_invariants(engine)


async def answers(engine: Engine, prompts: Sequence[Sequence[int]], **options: Any) -> list[tuple[int, ...]]:
    return [result.token_ids for result in await engine.generate(prompts, **options)]


def test_penalties_are_the_same_with_and_without_overlap(model: Decoder) -> None:
    """sgl-project/sglang 8056: the penalty read the output while it was being appended; 64 requests."""
    prompts = [tokens_for(index, 1 + index % 9) for index in range(64)]
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3}

    async def run(depth: int) -> list[tuple[int, ...]]:
        async with running(model, rows=32, depth=depth) as engine:
            return await answers(engine, prompts, **options)

    async def without() -> list[tuple[int, ...]]:
        async with running(model) as engine:
            return await answers(engine, prompts[:8], max_tokens=12, temperature=0.0)

    serial = anyio.run(run, 0)
    assert anyio.run(run, 2) == serial
    assert anyio.run(without) != serial[:8], "the penalties change something"


@pytest.mark.parametrize("page_size", [1, 8])
def test_cold_warm_flushed_and_uncached_answers_are_equal(model: Decoder, page_size: int) -> None:
    """sgl-project/sglang 4175, 34683; vllm-project/vllm 5543, 7845: greedy output changed on a cache hit."""
    shared = tokens_for(7, 40)
    prompts = [[*shared[: 20 + index], *tokens_for(index, 5)] for index in range(8)]

    async def main() -> None:
        async with running(model, page_size=page_size, pages=1280 // page_size) as engine:
            cold = await answers(engine, prompts, max_tokens=12, temperature=0.0)
            hits = engine.statistics().cached_tokens
            warm = await answers(engine, prompts, max_tokens=12, temperature=0.0)
            assert engine.statistics().cached_tokens >= hits + 8 * 16
            await engine.flush_cache()
            assert await answers(engine, prompts, max_tokens=12, temperature=0.0) == warm == cold
        async with running(model, page_size=page_size, pages=1280 // page_size, prefix_cache=False) as engine:
            assert await answers(engine, prompts, max_tokens=12, temperature=0.0) == cold
            assert engine.statistics().cached_tokens == 0

    anyio.run(main)


@pytest.mark.parametrize("depth", [0, 2])
def test_preemption_changes_no_greedy_answer(model: Decoder, depth: int) -> None:
    """vllm-project/vllm 28787: wrong tokens after a preempted request was resumed."""
    prompts = [tokens_for(index, 10) for index in range(8)]

    async def main() -> None:
        async with running(model, depth=depth) as engine:
            expected = await answers(engine, prompts, max_tokens=40, temperature=0.0, frequency_penalty=0.5)
        async with running(model, depth=depth, pages=26, reserve="expected", chunk_cap=6) as engine:
            assert await answers(engine, prompts, max_tokens=40, temperature=0.0, frequency_penalty=0.5) == expected
            assert engine.statistics().preemptions > 0

    anyio.run(main)


def test_neighbours_without_a_seed_change_nothing(model: Decoder) -> None:
    """vllm-project/vllm 51226: a seeded result changed when another request of the batch had no seed."""
    prompt = tokens_for(3, 9)
    options: dict[str, Any] = {"max_tokens": 25, "temperature": 1.0, "top_p": 0.9, "seed": 12}

    async def main() -> None:
        async with running(model) as engine:
            alone = (await engine.generate(prompt, **options)).token_ids
            streams: list[TokenStream] = [
                engine.stream(tokens_for(index, 3 + index), max_tokens=25, temperature=0.7 + index / 10) for index in range(5)
            ]
            assert (await engine.generate(prompt, **options)).token_ids == alone
            for stream in streams:
                await stream.result()
            assert (await engine.generate(prompt, **{**options, "seed": 13})).token_ids != alone

    anyio.run(main)


@pytest.mark.parametrize("depth", [0, 2])
def test_prompt_logprobs_over_several_chunks(model: Decoder, depth: int) -> None:
    """vllm-project/vllm 14239: prompt log-probabilities and chunked prefill broke an invariant."""
    prompt = tokens_for(5, 30)

    async def run(**options: Any) -> Result:
        async with running(model, depth=depth, **options) as engine:
            await engine.generate(prompt, max_tokens=1)  # its pages are cached, and must not be used
            other = engine.stream(tokens_for(6, 20), max_tokens=10)
            result = await engine.generate(prompt, max_tokens=3, temperature=0.0, prompt_logprobs=2, logprobs=1)
            await other.result()
            return result

    async def main() -> None:
        whole, chunked = await run(), await run(chunk_cap=11, token_budget=16)
        assert whole.usage.cached_tokens == chunked.usage.cached_tokens == 0
        assert whole.prompt_logprobs is not None
        assert chunked.prompt_logprobs is not None
        assert len(whole.prompt_logprobs) == len(chunked.prompt_logprobs) == 30
        assert whole.prompt_logprobs[0] is None
        assert chunked.prompt_logprobs[0] is None
        for left, right in zip(whole.prompt_logprobs[1:], chunked.prompt_logprobs[1:], strict=True):
            assert left is not None
            assert right is not None
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert len(right.top_ids) == 2
        assert chunked.token_ids == whole.token_ids

    anyio.run(main)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_logprobs_of_a_request_that_stops_in_the_middle(model: Decoder, depth: int) -> None:
    """vllm-project/vllm 29216: log-probabilities were off by the rows that were discarded."""
    prompts = [tokens_for(index, 5) for index in range(6)]

    async def main() -> None:
        async with running(model, depth=depth, chunk_cap=3, token_budget=16) as engine:
            plain = await engine.generate(prompts, max_tokens=12, temperature=0.0)
            stops = [result.token_ids[4 + index] for index, result in enumerate(plain)]
            streams = [
                engine.stream(prompt, max_tokens=12, temperature=0.0, logprobs=1, stop_token_ids=(stop,))
                for prompt, stop in zip(prompts, stops, strict=True)
            ]
            for stream in streams:
                (completion,) = (await stream.result()).completions
                assert completion.finish_reason == "stop"
                assert completion.logprobs is not None
                assert [entry.top_ids[0] for entry in completion.logprobs] == list(completion.token_ids)
                assert [entry.rank for entry in completion.logprobs] == [1] * len(completion.token_ids)

    anyio.run(main)


def test_ids_at_the_edges_of_the_vocabulary(model: Decoder) -> None:
    """gonka-ai/gonka 1170: a stop id beyond the vocabulary with min_tokens killed the engine."""

    async def main() -> None:
        async with running(model) as engine:
            with pytest.raises(ValueError, match="outside the vocabulary"):
                engine.stream([5], stop_token_ids=(VOCAB,), min_tokens=2)
            result = await engine.generate(
                [VOCAB - 1, 0], max_tokens=6, min_tokens=6, temperature=0.0, stop_token_ids=(0, VOCAB - 1)
            )
            assert len(result.token_ids) == 6
            assert not {0, VOCAB - 1} & set(result.token_ids[:5])

    anyio.run(main)


def test_a_random_mix_equals_its_parts(model: Decoder) -> None:
    """sgl-project/sglang 2312, 26380: outputs changed when steps overlapped and rows came and went."""
    random = Random(5)
    jobs: list[tuple[list[int], dict[str, Any]]] = [
        (
            tokens_for(index, random.randint(1, 30)),
            {
                "max_tokens": random.randint(1, 20),
                "seed": index,
                "temperature": random.choice([0.0, 1.0]),
                "top_k": random.choice([0, 5]),
                "presence_penalty": random.choice([0.0, 0.7]),
            },
        )
        for index in range(24)
    ]

    async def main() -> None:
        async with running(model, depth=0, rows=1) as engine:
            alone = [(await engine.generate(prompt, **options)).token_ids for prompt, options in jobs]
        async with running(model, depth=2, rows=6, chunk_cap=7, token_budget=20) as engine:
            streams = [engine.stream(prompt, **options) for prompt, options in jobs]
            cancelled = [engine.stream(tokens_for(90 + index, 12), max_tokens=30) for index in range(4)]
            for stream in cancelled:
                await anext(aiter(stream))
                stream.close()
            assert [(await stream.result()).token_ids for stream in streams] == alone

    anyio.run(main)


def test_a_chunk_without_tokens_has_no_stale_logprobs(model: Decoder) -> None:
    """vllm-project/vllm, output processing: an output with no new tokens repeated the last log-probabilities."""

    async def main() -> None:
        async with running(model) as engine:
            stream = engine.stream(tokens_for(1, 5), max_tokens=200, logprobs=1)
            first = await anext(aiter(stream))
            assert len(first.logprobs or ()) == len(first.token_ids) > 0
            await engine.pause()
            await anext(aiter(stream))  # what had arrived until then
            engine.abort(stream.request_id)
            last = await anext(aiter(stream))
            assert (last.token_ids, last.logprobs, last.finish_reason) == ((), (), "abort")
            engine.resume()

    anyio.run(main)


class FailingModel:
    """A model whose forward pass raises in chosen calls."""

    def __init__(self, model: Decoder, calls: set[int]) -> None:
        self._model = model
        self._calls = calls
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any) -> torch.Tensor:
        self._count += 1
        if self._count in self._calls:
            raise ArithmeticError("scripted")
        return self._model.forward(*args)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("failing", [1, 2, 3, 5])
def test_a_step_that_raises_ends_its_requests_and_no_others(model: Decoder, depth: int, failing: int) -> None:
    """vllm-project/vllm 5901, 2197: one exception in a step, and the engine was dead; here steps in flight go on."""
    prompts = [tokens_for(index, 4 + 3 * index) for index in range(6)]

    async def ask(engine: Engine, prompt: Sequence[int]) -> tuple[int, ...] | None:
        try:
            return (await engine.generate(prompt, max_tokens=8, temperature=0.0)).token_ids
        except StepFailedError:
            return None

    async def run(calls: set[int]) -> list[tuple[int, ...] | None]:
        found: list[tuple[int, ...] | None] = [None] * len(prompts)

        async def one(index: int) -> None:
            found[index] = await ask(engine, prompts[index])

        async with running(FailingModel(model, calls), rows=4, depth=depth, token_budget=16, chunk_cap=6) as engine:  # type: ignore[arg-type]
            async with anyio.create_task_group() as tasks:
                for index in range(len(prompts)):
                    tasks.start_soon(one, index)
            assert [await ask(engine, prompt) for prompt in prompts] == right
        return found

    right: list[tuple[int, ...] | None] = []

    async def serial() -> None:
        async with running(model, depth=0) as engine:
            right.extend([await ask(engine, prompt) for prompt in prompts])

    anyio.run(serial)
    got = anyio.run(run, {failing})
    assert None in got, "the step that raised had requests in it"
    assert [answer for answer in got if answer is not None] == [
        r for r, answer in zip(right, got, strict=True) if answer is not None
    ]
