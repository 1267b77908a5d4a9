"""What comes out: the oracle's tokens, whatever the depth, the chunks, the cache, the pages and the neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from asyncsched import EngineConfig, Result, SamplingParams
from asyncsched.testing import ByteTokenizer

from .engine_helpers import ASYNCIO, LETTERS, LIMITS, Pieces, Recorder, Rig, limits, oracle, read, tokens_of, turns

SHARED = list(range(100, 133))

# 24 requests: prompts of 1 to 40 tokens, some equal, some sharing a prefix that ends inside a page, some unrelated.
PROMPTS = [
    [[7], SHARED, [*SHARED[:17], *range(i)], [500 + i, *SHARED[: i % 7]], SHARED[: 9 + i], list(range(i, i + 40))][i % 6]
    for i in range(24)
]
BATCH = [(prompt, i % 5, 1 + i % 12) for i, prompt in enumerate(PROMPTS)]  # prompt, seed, max_tokens


async def generate_all(rig: Rig, requests: Sequence[tuple[list[int], int, int]]) -> list[Result]:
    """All at once, results in order."""
    results: dict[int, Result] = {}

    async def one(index: int, prompt: list[int], seed: int, count: int) -> None:
        results[index] = await rig.engine.generate(prompt, seed=seed, max_tokens=count)

    async with anyio.create_task_group() as tasks:
        for index, request in enumerate(requests):
            tasks.start_soon(one, index, *request)
    return [results[index] for index in range(len(requests))]


def assert_right(results: Sequence[Result], requests: Sequence[tuple[list[int], int, int]]) -> None:
    for result, (prompt, seed, count) in zip(results, requests, strict=True):
        assert result.token_ids == oracle(prompt, seed, count)
        assert result.finish_reason == "length"
        assert result.prompt_token_ids == tuple(prompt)


@ASYNCIO
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no_cache"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
async def test_outputs_are_the_oracles(depth: int, chunked: bool, prefix_cache: bool, page_size: int) -> None:
    options: dict[str, Any] = {"depth": depth, "chunked_prefill": chunked, "prefix_cache": prefix_cache}
    device = limits(page_size=page_size, pages=192 // page_size)
    async with Rig(device, token_budget=16, chunk_cap=8, **options) as rig:
        for request in BATCH[:6]:
            assert_right(await generate_all(rig, [request]), [request])
        assert_right(await generate_all(rig, BATCH), BATCH)
        assert bool(rig.statistics.cached_tokens) is prefix_cache
        assert rig.statistics.finished == {"stop": 0, "length": 30, "abort": 0, "error": 0}


@pytest.mark.parametrize("depth", [0, 2])
async def test_outputs_are_the_oracles_in_every_event_loop(depth: int) -> None:
    async with Rig(depth=depth, token_budget=32) as rig:
        assert_right(await generate_all(rig, BATCH), BATCH)


@ASYNCIO
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("device", [limits(max_rows=1), limits(pages=13), limits(max_rows=2, pages=16)])
async def test_a_device_too_small_for_all_serves_them_in_turn(device: Any, depth: int) -> None:
    async with Rig(device, depth=depth) as rig:
        assert_right(await generate_all(rig, BATCH), BATCH)
        assert max(len(plan.joins) for plan in rig.plans) <= device.max_rows


@ASYNCIO
async def test_a_whole_prompt_may_be_over_the_step_budget() -> None:
    async with Rig(token_budget=8, chunked_prefill=False) as rig:
        prompt = list(range(60))
        assert (await rig.engine.generate(prompt, seed=1, max_tokens=3)).token_ids == oracle(prompt, 1, 3)
        assert [len(chunk.tokens) for plan in rig.plans for chunk in plan.prefill] == [60]


@ASYNCIO
async def test_chunks_keep_to_the_budget_and_the_cap() -> None:
    async with Rig(token_budget=16, chunk_cap=5) as rig:
        await generate_all(rig, BATCH)
        sizes = [len(chunk.tokens) for plan in rig.plans for chunk in plan.prefill]
        assert max(sizes) == 5
        assert max(sum(len(chunk.tokens) for chunk in plan.prefill) for plan in rig.plans) <= 16


@ASYNCIO
@pytest.mark.parametrize("depth", [0, 2])
async def test_the_same_input_gives_the_same_plans(depth: int) -> None:
    plans = []
    for _ in range(2):
        async with Rig(depth=depth, token_budget=16, limits=limits(max_rows=4)) as rig:
            await rig.engine.generate([prompt for prompt, _, _ in BATCH], seed=3, max_tokens=6)
            plans.append([repr(plan) for plan in rig.plans])
    assert plans[0] == plans[1]
    assert len(plans[0]) > 20


async def test_serial_steps_wait_for_each_other_and_overlapped_ones_do_not() -> None:
    for depth in (0, 1, 2, 3):
        async with Rig(depth=depth, hold=True) as rig:
            stream = rig.engine.stream([1, 2, 3], max_tokens=20, seed=0)
            await turns()
            assert rig.statistics.steps_in_flight == max(1, depth)
            await rig.step(3)
            assert rig.statistics.steps_in_flight == max(1, depth)
            rig.executor.unhold()
            assert tokens_of(await read(stream)) == oracle([1, 2, 3], 0, 20)
            overlap = rig.statistics.overlap
            assert overlap == 0 if depth < 2 else overlap > 0.8


# Several completions of one prompt


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no_cache"])
async def test_completions_have_seeds_of_their_own_and_share_the_prompts_pages(prefix_cache: bool) -> None:
    async with Rig(prefix_cache=prefix_cache) as rig:
        prompt = list(range(17))
        result = await rig.engine.generate(prompt, n=3, seed=7, max_tokens=9)
        assert [completion.index for completion in result.completions] == [0, 1, 2]
        for completion in result.completions:
            assert completion.token_ids == oracle(prompt, 7 + completion.index, 9)
        assert len({completion.token_ids for completion in result.completions}) == 3
        assert rig.statistics.cached_tokens == 2 * 16  # the last token is always computed
        assert result.usage.completion_tokens == 27
        await rig.settle()
        assert bool(rig.statistics.cached_pages) is prefix_cache


async def test_completions_that_do_not_fit_at_once_come_one_after_the_other() -> None:
    async with Rig(limits(max_rows=2)) as rig:
        result = await rig.engine.generate([1, 2, 3, 4, 5], n=7, seed=0, max_tokens=5)
        assert [c.token_ids for c in result.completions] == [oracle([1, 2, 3, 4, 5], i, 5) for i in range(7)]


async def test_the_seed_of_the_last_completion_wraps() -> None:
    async with Rig() as rig:
        top = 2**63 - 1
        result = await rig.engine.generate([5, 6], n=2, seed=top, max_tokens=3)
        assert [c.token_ids for c in result.completions] == [oracle([5, 6], top, 3), oracle([5, 6], 0, 3)]


# Seeds


async def test_a_seed_fixes_the_output_and_no_seed_draws_one(rig: Rig) -> None:
    generate = rig.engine.generate
    first, again, other, drawn, drawn_again = [
        (await generate([3, 1, 4], seed=seed, max_tokens=12)).token_ids for seed in (8, 8, 9, None, None)
    ]
    assert first == again == oracle([3, 1, 4], 8, 12)
    assert len({first, other, drawn, drawn_again}) == 4
    seeds = [join.seed for plan in rig.plans for join in plan.joins]
    assert seeds[:3] == [8, 8, 9]
    assert drawn == oracle([3, 1, 4], seeds[3], 12)


# Lengths


async def test_no_tokens_at_all_fills_the_cache(rig: Rig) -> None:
    prompt = list(range(40, 57))
    result = await rig.engine.generate(prompt, max_tokens=0)
    assert result.completions[0].token_ids == ()
    assert result.text == ""
    assert result.finish_reason == "length"
    assert result.usage.prompt_tokens == result.usage.total_tokens == 17
    assert not any(chunk.sample for plan in rig.plans for chunk in plan.prefill)
    result = await rig.engine.generate(prompt, max_tokens=2, seed=0)
    assert result.usage.cached_tokens == 16
    assert result.token_ids == oracle(prompt, 0, 2)


async def test_no_tokens_as_a_stream_is_one_chunk(rig: Rig) -> None:
    (chunk,) = await read(rig.engine.stream([1, 2, 3], max_tokens=0))
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", (), "length")


async def test_a_prompt_of_the_models_whole_length_fits_if_nothing_is_generated(rig: Rig) -> None:
    result = await rig.engine.generate(list(range(128)), max_tokens=0)
    assert result.finish_reason == "length"


async def test_one_token_is_one_step(rig: Rig) -> None:
    result = await rig.engine.generate([1, 2, 3], max_tokens=1, seed=0)
    assert result.token_ids == oracle([1, 2, 3], 0, 1)
    assert len(rig.plans) == 1


@pytest.mark.parametrize("max_tokens", [None, 1000])
async def test_output_ends_at_the_models_length(rig: Rig, max_tokens: int | None) -> None:
    prompt = list(range(10))
    result = await rig.engine.generate(prompt, max_tokens=max_tokens, seed=4)
    assert result.token_ids == oracle(prompt, 4, LIMITS.max_model_len - 10)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
async def test_a_known_length_costs_no_step_too_many(depth: int) -> None:
    async with Rig(depth=depth) as rig:
        await rig.engine.generate([1, 2], max_tokens=9, seed=0)
        assert len(rig.plans) == 9
        assert rig.statistics.dropped_tokens == 0


@ASYNCIO
@pytest.mark.parametrize("count", [63, 64, 65, 128, 150])
async def test_long_outputs(count: int) -> None:
    async with Rig(limits(max_model_len=256)) as rig:
        prompt = [9, 9, 9]
        assert (await rig.engine.generate(prompt, seed=2, max_tokens=count)).token_ids == oracle(prompt, 2, count)
        chunks = await read(rig.engine.stream(prompt, seed=2, max_tokens=count))
        assert tokens_of(chunks) == oracle(prompt, 2, count)


# Stops


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("fillers", [0, 20], ids=["few", "many"])
async def test_a_stop_id_ends_the_output_and_is_its_last_token(depth: int, fillers: int) -> None:
    prompt = [1, 2, 3, 4]
    tokens = oracle(prompt, 6, 30)
    unused = [token for token in range(LIMITS.vocab_size) if token not in tokens][:fillers]
    async with Rig(depth=depth) as rig:
        result = await rig.engine.generate(prompt, seed=6, max_tokens=30, stop_token_ids=[*unused, tokens[11], tokens[15]])
        (completion,) = result.completions
        assert completion.token_ids == tokens[:12]
        assert completion.finish_reason == "stop"
        assert completion.stop_reason == tokens[11]
        await rig.settle()
        assert rig.statistics.dropped_tokens <= depth
        assert rig.statistics.generated_tokens == 12


@pytest.mark.parametrize("fillers", [0, 20], ids=["few", "many"])
async def test_min_tokens_lets_early_stops_pass(rig: Rig, fillers: int) -> None:
    prompt = [1, 2, 3, 4]
    tokens = oracle(prompt, 6, 30)
    unused = [token for token in range(LIMITS.vocab_size) if token not in tokens][:fillers]
    params = SamplingParams(seed=6, max_tokens=30, min_tokens=8, stop_token_ids=(*unused, tokens[3], tokens[11]))
    result = await rig.engine.generate(prompt, params)
    assert result.token_ids == tokens[:12]
    assert result.completions[0].stop_reason == tokens[11]


def eos_case() -> tuple[Pieces, list[int], tuple[int, ...]]:
    """A tokenizer whose end-of-sequence token comes up as the fifth token of an output."""
    prompt = [1, 2, 3]
    tokens = oracle(prompt, 0, 20, 50)
    assert tokens[4] not in tokens[:4]
    return Pieces([f"<{i}>" for i in range(50)], eos=tokens[4]), prompt, tokens


async def test_end_of_sequence_ends_the_output() -> None:
    tokenizer, prompt, tokens = eos_case()
    async with Rig(limits(vocab_size=50), tokenizer=tokenizer) as rig:
        (completion,) = (await rig.engine.generate(prompt, seed=0, max_tokens=20)).completions
        assert completion.token_ids == tokens[:5]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.text == "".join(f"<{token}>" for token in tokens[:4])


async def test_end_of_sequence_can_be_ignored() -> None:
    tokenizer, prompt, tokens = eos_case()
    async with Rig(limits(vocab_size=50), tokenizer=tokenizer) as rig:
        result = await rig.engine.generate(prompt, seed=0, max_tokens=20, ignore_eos=True)
        assert result.token_ids == tokens
        assert result.finish_reason == "length"


async def test_the_device_is_told_which_ids_stop() -> None:
    tokenizer, prompt, tokens = eos_case()
    async with Rig(limits(vocab_size=50), tokenizer=tokenizer) as rig:
        await rig.engine.generate(prompt, max_tokens=1, stop_token_ids=[9, tokens[4], 9])
        await rig.engine.generate(prompt, max_tokens=1, stop_token_ids=[9], ignore_eos=True)
        first, second = [join for plan in rig.plans for join in plan.joins]
        assert first.stop_ids == (tokens[4], 9)
        assert second.stop_ids == (9,)


# Batches, chats, text


async def test_a_batch_of_texts_keeps_its_order() -> None:
    async with Rig(limits(vocab_size=26), tokenizer=LETTERS) as rig:
        texts = [f"prompt {'x' * (i % 5)}{i}" for i in range(24)]
        results = await rig.engine.generate(texts, seed=1, max_tokens=5)
        for text, result in zip(texts, results, strict=True):
            ids = [ord(c) % 26 for c in text]
            assert result.prompt_token_ids == tuple(ids)
            assert result.token_ids == oracle(ids, 1, 5, 26)
            assert result.text == LETTERS.decode(result.token_ids)


async def test_a_batch_of_token_lists_keeps_its_order(rig: Rig) -> None:
    prompts = [list(range(i + 1)) for i in range(24)]
    results = await rig.engine.generate(prompts, seed=1, max_tokens=3)
    assert [result.token_ids for result in results] == [oracle(prompt, 1, 3) for prompt in prompts]


async def test_a_list_of_one_is_a_batch_and_a_token_list_is_not(rig: Rig) -> None:
    batch = await rig.engine.generate([[4, 2]], seed=1, max_tokens=3)
    single = await rig.engine.generate([4, 2], seed=1, max_tokens=3)
    assert [result.token_ids for result in batch] == [single.token_ids] == [oracle([4, 2], 1, 3)]


async def test_params_of_a_batch_hold_for_each(rig: Rig) -> None:
    params = SamplingParams(seed=2, max_tokens=4)
    results = await rig.engine.generate([[1], [2]], params, n=2, max_tokens=3)
    for prompt, result in zip(([1], [2]), results, strict=True):
        assert [c.token_ids for c in result.completions] == [oracle(prompt, 2, 3), oracle(prompt, 3, 3)]
    assert params.max_tokens == 4


async def test_chats_are_rendered_without_a_second_begin_token() -> None:
    tokenizer = ByteTokenizer()
    device = limits(vocab_size=tokenizer.vocab_size)
    async with Rig(device, tokenizer=tokenizer) as rig:
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        several: Any = [messages, messages]
        rendered = "<|system|>be brief<|eos|><|user|>hello<|eos|><|assistant|>"
        expected = tokenizer.encode([rendered], add_special_tokens=False, limit=128)[0]
        assert isinstance(expected, list)
        tokens = oracle(expected, 3, 4, device.vocab_size)
        chat = await rig.engine.chat(messages, seed=3, max_tokens=4, ignore_eos=True)
        single = await rig.engine.generate(messages, seed=3, max_tokens=4, ignore_eos=True)
        batch = await rig.engine.generate(several, seed=3, max_tokens=4, ignore_eos=True)
        for result in (chat, single, *batch):
            assert result.prompt_token_ids == tuple(expected)
            assert result.token_ids == tokens


async def test_text_prompts_begin_with_the_begin_token() -> None:
    tokenizer = ByteTokenizer()
    async with Rig(limits(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer) as rig:
        result = await rig.engine.generate("hi", max_tokens=1)
        assert result.prompt_token_ids == (256, ord("h"), ord("i"))


async def test_token_ids_without_text() -> None:
    tokenizer = ByteTokenizer()
    device = limits(vocab_size=tokenizer.vocab_size)
    async with Rig(device, tokenizer=tokenizer) as rig:
        result = await rig.engine.generate("hi", seed=0, max_tokens=6, detokenize=False, ignore_eos=True)
        assert result.text == ""
        assert result.token_ids == oracle([256, 104, 105], 0, 6, device.vocab_size)
        chunks = await read(rig.engine.stream("hi", seed=0, max_tokens=6, detokenize=False, ignore_eos=True))
        assert not any(chunk.text for chunk in chunks)
        assert tokens_of(chunks) == result.token_ids


async def test_a_model_without_tokenizer_yields_tokens_only(rig: Rig) -> None:
    result = await rig.engine.generate([1, 2], seed=0, max_tokens=3)
    assert result.text == ""
    assert result.token_ids == oracle([1, 2], 0, 3)
    assert rig.engine.tokenizer is None


# The prefix cache, seen from outside


async def test_a_later_prompt_reuses_prompt_and_answer(rig: Rig) -> None:
    prompt = list(range(200, 211))
    first = await rig.engine.generate(prompt, seed=0, max_tokens=10)
    turn = [*prompt, *first.token_ids, 1, 2, 3]  # 11 + 10 tokens, of which the last one's keys and values do not exist yet
    second = await rig.engine.generate(turn, seed=1, max_tokens=5)
    assert second.usage.cached_tokens == 20
    assert second.token_ids == oracle(turn, 1, 5)
    assert rig.statistics.hit_rate == 20 / (11 + 24)


async def test_salts_keep_prefixes_apart(rig: Rig) -> None:
    prompt = list(range(17))
    for salt, cached in (("a", 0), ("b", 0), ("", 0), ("a", 16), ("", 16)):
        result = await rig.engine.generate(prompt, seed=0, max_tokens=2, cache_salt=salt)
        assert result.usage.cached_tokens == cached
        assert result.token_ids == oracle(prompt, 0, 2)


async def test_prompt_logprobs_do_not_read_the_cache(rig: Rig) -> None:
    prompt = list(range(17))
    await rig.engine.generate(prompt, max_tokens=1)
    result = await rig.engine.generate(prompt, seed=0, max_tokens=1, prompt_logprobs=0)
    assert result.usage.cached_tokens == 0
    assert result.token_ids == oracle(prompt, 0, 1)


async def test_old_prefixes_make_room_for_new_requests() -> None:
    async with Rig(limits(pages=16)) as rig:
        for start in range(0, 400, 40):
            prompt = list(range(start, start + 30))
            assert (await rig.engine.generate(prompt, seed=0, max_tokens=10)).token_ids == oracle(prompt, 0, 10)
        assert rig.statistics.evicted_pages > 0


# Policies


async def test_a_policy_instance_orders_the_waiting() -> None:
    class Newest(Recorder):
        def order(self, waiting: Sequence[Any], view: object) -> Sequence[Any]:
            super().order(waiting, view)
            return waiting[::-1]

    policy = Newest()
    async with Rig(limits(max_rows=1), policy=policy) as rig:
        await rig.engine.generate([[i] for i in range(5)], max_tokens=2)
        order = [int(chunk.tokens[0]) for plan in rig.plans for chunk in plan.prefill]
        assert order == [4, 3, 2, 1, 0]
        assert max(policy.waiting) == 5
        assert not rig.statistics.policy_faults


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
async def test_bundled_policies_change_no_output(policy: str) -> None:
    async with Rig(policy=policy, token_budget=32) as rig:
        assert_right(await generate_all(rig, BATCH), BATCH)


# Configuration


async def test_engine_takes_its_options_three_ways() -> None:
    config = EngineConfig(depth=3, page_size=8)
    async with Rig(config=config) as rig:
        assert rig.engine.config is config
    async with Rig(config=config, depth=1) as rig:
        assert (rig.engine.config.depth, rig.engine.config.page_size) == (1, 8)
        assert rig.engine.model_name == "simulated"
        assert rig.engine.limits == LIMITS
