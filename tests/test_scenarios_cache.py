"""The prefix cache and the page pool: exact sizes, no stale hit, nothing lost.

Cases from reports of other engines; each test names the report it comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from asyncsched import Admitted, Finished
from asyncsched.errors import RequestTooLargeError
from asyncsched.testing import ScriptedRun, check_invariants, expected_tokens

from .control_helpers import Simulation, prompt, simulation
from .engine_helpers import ASYNCIO, limits, oracle

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3])


async def finished(sim: Simulation, tokens: Sequence[int], count: int, *, seed: int = 0, **options: str) -> list[int]:
    """Prompt and answer, as the next turn of a conversation would send them."""
    sent = sim.send(tokens, count, seed=seed, **options)
    await sim.run_out()
    sim.executor.hold()
    return [*tokens, *(await sent.stream.result()).token_ids]


@ASYNCIO
@DEPTHS
async def test_mixed_lengths_drain_to_free_plus_cached(depth: int) -> None:
    """sgl-project/sglang 6888: mixed chunks with pages of 16 were reported as a leak."""
    random = Random(depth)
    async with simulation(depth=depth, page_size=16, pages=40, token_budget=48, chunk_cap=20) as sim:
        for index in range(30):
            sim.send(prompt(random.randint(1, 90), index % 4), random.randint(0, 30), seed=index)
        await sim.finish()
        numbers = sim.statistics
        assert numbers.free_pages + numbers.cached_pages == numbers.total_pages == 40


@ASYNCIO
async def test_prefixes_that_diverge_inside_a_page_are_counted_exactly() -> None:
    """sgl-project/sglang 35270: pages shared by two nodes were counted twice, and the idle check killed the server."""
    async with simulation(page_size=16, pages=40) as sim:
        common = prompt(40)
        for index, length in enumerate([33, 40, 24, 17]):
            sim.send([*common[:length], *prompt(48 - length, index + 1)], 1, seed=index)
        await sim.finish()
        # 16 common tokens are one page, 32 are two; each prompt fills three pages.
        assert sim.statistics.cached_pages == 1 + 1 + (1 + 1) + (2 + 2)
        check_invariants(sim.engine, idle=True)


@ASYNCIO
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_cancelled_at_every_chunk(page_size: int, how: str) -> None:
    """sgl-project/sglang 38981, 38982, 38941: an abort between chunks that share a page killed all ranks."""
    capacity = limits(page_size=page_size, pages=256 // page_size)
    for chunk in range(1, 9):
        async with ScriptedRun(capacity, depth=2, token_budget=20, chunk_cap=10) as run:
            tokens = list(range(80))
            victim = await run.submit(tokens, seed=1, max_tokens=8)
            twin = await run.submit(tokens, seed=2, max_tokens=8)
            await run.to_chunk(victim, chunk)
            if how == "close":
                victim.close()
            else:
                run.engine.abort(victim.request_id)
            await run.steps(60)
            assert (await twin.result()).token_ids == oracle(tokens, 2, 8)
            check_invariants(run.engine, idle=True)


@ASYNCIO
@DEPTHS
async def test_each_request_is_released_exactly_once(depth: int) -> None:
    """sgl-project/sglang-jax 982: two release paths freed the same pages."""
    random = Random(depth)
    async with simulation(depth=depth, max_rows=3, token_budget=16, chunk_cap=6) as sim, sim.engine.events() as events:
        for index in range(24):
            sim.send(prompt(random.randint(1, 20), index % 3), random.randint(0, 12), seed=index, n=1 + index % 2)
            await sim.step(random.randint(0, 2))
            if index % 4 == 0:
                for _ in range(2):
                    random.choice(sim.sent).stream.close()
                    sim.engine.abort(random.choice(sim.sent).stream.request_id)
        await sim.finish()
        events.close()
        ends = Counter([event.number async for event in events if isinstance(event, Finished)])
        assert set(ends.values()) == {1}
        assert len(ends) == sum(sent.params.n for sent in sim.sent)
        assert sum(sim.statistics.finished.values()) == len(ends)


@ASYNCIO
@DEPTHS
async def test_cold_warm_flushed_and_uncached_runs_are_equal(depth: int) -> None:
    """sgl-project/sglang 4175, 34683; vllm-project/vllm 5543: a cache hit changed the answer."""
    turns = [[*prompt(30, index % 2), index] for index in range(6)]
    async with simulation(depth=depth, chunk_cap=9) as sim:
        for round_ in range(3):
            if round_ == 2:
                assert await sim.engine.flush_cache() > 0
                assert sim.statistics.cached_pages == 0
            for index, tokens in enumerate(turns):
                sim.send(tokens, 6, seed=index)
            await sim.finish()  # compares with the oracle
        assert sim.statistics.cached_tokens > 0
    async with simulation(depth=depth, chunk_cap=9, prefix_cache=False) as sim:
        for index, tokens in enumerate(turns):
            sim.send(tokens, 6, seed=index)
        await sim.finish()
        assert sim.statistics.cached_tokens == 0
        assert sim.statistics.free_pages == sim.statistics.total_pages


@ASYNCIO
@DEPTHS
async def test_tails_of_63_tokens_in_pages_of_64(depth: int) -> None:
    """sgl-project/sglang 4602: decoding ran out of memory although tokens were free."""
    async with simulation(depth=depth, page_size=64, pages=9, max_model_len=256, reserve="expected", token_budget=200) as sim:
        for index in range(12):
            sim.send(prompt(63 + 64 * (index % 2), index), 66, seed=index)
        await sim.finish()


@ASYNCIO
@DEPTHS
async def test_the_second_turn_hits_prompt_and_answer(depth: int) -> None:
    """vllm-project/vllm, async scheduling: turn two hits all full blocks, the generated ones included."""
    async with simulation(depth=depth) as sim:
        history = await finished(sim, prompt(14), 11)
        for turn in range(3):
            history += [turn, turn + 1]
            certain = len(history) - 2 - 1  # the last sampled token was never computed
            before = sim.statistics.cached_tokens
            history = await finished(sim, history, 9, seed=turn)
            hit = sim.statistics.cached_tokens - before
            assert hit == certain // 4 * 4
        sim.sent.clear()


@ASYNCIO
async def test_an_edited_history_does_not_hit_what_it_was() -> None:
    """vllm-project/vllm 49449: a session was edited, and old block hashes were kept."""
    async with simulation() as sim:
        history = await finished(sim, prompt(16), 8)
        for where in (0, 5, 15, 17, 22):
            edited = list(history)
            edited[where] = (edited[where] + 1) % 1000
            join = sim.send([*edited, 3], 4, seed=where)
            await sim.run_out()
            sim.executor.hold()
            assert sim.join_of(join.number)[1].cached <= where // 4 * 4
        await sim.finish()


@ASYNCIO
async def test_two_updates_of_a_session_in_a_row() -> None:
    """vllm-project/vllm 42655, 42490: two updates of a session before one output crashed the engine."""
    async with simulation(depth=2) as sim:
        history = await finished(sim, prompt(12), 6)
        first = sim.send([*history, 1], 6, seed=1)
        second = sim.send([*history, 1, 2, 3], 6, seed=2)
        first.stream.close()
        third = sim.send([*history, 1, 2, 3, 4], 6, seed=3)
        await sim.settle()
        sim.sent.remove(first)
        await sim.finish()
        assert [one.stream.finish_reason for one in (second, third)] == ["length", "length"]


@ASYNCIO
async def test_a_hit_is_the_same_tokens_and_not_the_same_hash() -> None:
    """vllm-project/vllm 12621, 8229; openvino.genai 3722: a hash collision reused somebody else's keys and values."""

    class Colliding(bytes):
        """Page keys that all have one hash: the dictionary must compare them."""

        def __hash__(self) -> int:
            return 1

        def __getitem__(self, key: object) -> bytes:  # type: ignore[override]  # slices only
            return Colliding(super().__getitem__(key))  # type: ignore[call-overload]

    async with simulation() as sim:
        tree = sim.state.tree
        match, extend, peek = tree.match, tree.extend, tree.peek
        tree.match = lambda namespace, tokens, *rest: match(namespace, Colliding(tokens), *rest)  # type: ignore[method-assign]
        tree.peek = lambda namespace, tokens: peek(namespace, Colliding(tokens))  # type: ignore[method-assign]
        tree.extend = lambda node, tokens, *rest, **more: extend(node, Colliding(tokens), *rest, **more)  # type: ignore[method-assign]
        for index in range(12):
            sim.send(prompt(16, index % 6), 4, seed=index)
        await sim.finish()
        assert sim.statistics.cached_tokens > 0
        keys = [key for root in tree._roots.values() for key in root.children]
        assert len(keys) == 6
        assert {hash(key) for key in keys} == {1}


@ASYNCIO
async def test_salts_keep_tenants_apart() -> None:
    """vllm-project/vllm 44701: what separates two caches must not collide with anything else."""
    async with simulation() as sim:
        for salt in ("", "a", "b", "\0", "a\0b", "ab"):
            join = sim.send(prompt(20), 3, cache_salt=salt)
            await sim.run_out()
            assert sim.join_of(join.number)[1].cached == 0
        for salt in ("a\0b", "", "b"):
            join = sim.send(prompt(20), 3, cache_salt=salt)
            await sim.run_out()
            assert sim.join_of(join.number)[1].cached == 16
        await sim.finish()


@ASYNCIO
async def test_a_reused_page_carries_nothing_of_its_past() -> None:
    """vllm-project/vllm, blocks: a block that was given away and not refilled kept its hash."""
    async with simulation(pages=8) as sim:
        await finished(sim, prompt(28), 1)
        assert sim.cached(prompt(28)) == 28
        filler = sim.send(prompt(20, 5), 12, seed=9)  # takes every page
        await sim.settle()
        assert sim.cached(prompt(28)) == 0
        filler.stream.close()  # before it has written most of them
        sim.sent.remove(filler)
        await sim.run_out()
        assert sim.cached(prompt(28)) == 0
        sim.send(prompt(28), 2, seed=4)
        await sim.finish()


@ASYNCIO
async def test_refused_and_deferred_requests_are_counted_once() -> None:
    """vllm-project/vllm, statistics: a request that had to wait was counted at every attempt."""
    async with simulation(pages=8, depth=2) as sim:
        sim.send(prompt(16), 17)
        await sim.settle()
        waiting = sim.send(prompt(17), 8, seed=2)
        await sim.step(10)
        assert sim.engine.health().blocked == "pages"
        assert sim.statistics.prompt_tokens == 16
        with pytest.raises(RequestTooLargeError):
            sim.send(prompt(16), 40)
        await sim.finish()
        assert sim.statistics.prompt_tokens == 33
        assert sim.statistics.cached_tokens == 16
        assert waiting.stream.usage.cached_tokens == 16


@ASYNCIO
async def test_identical_prompts_added_together() -> None:
    """vllm-project/vllm, async scheduling: the second shares all full blocks in the same step."""
    async with ScriptedRun(depth=2) as run:
        tokens = list(range(18))
        async with run.engine.events() as events:
            streams = [run.engine.stream(tokens, seed=index, max_tokens=2) for index in range(3)]
            await run.settle()
            await run.steps(4)
        hits = [event.cached_tokens async for event in events if isinstance(event, Admitted)]
        assert hits == [0, 16, 16]
        assert [len(chunk.tokens) for chunk in run.plans[0].prefill] == [18, 2, 2]
        for index, stream in enumerate(streams):
            assert list((await stream.result()).token_ids) == expected_tokens(tokens, index, 2, 1000)


@ASYNCIO
async def test_a_hit_makes_a_long_prompt_fit() -> None:
    """vllm-project/vllm, blocks: the need is computed after the hit, so a long-looking prompt may fit."""
    async with simulation(pages=16, chunked_prefill=False, token_budget=16) as sim:
        long = prompt(40)
        first = sim.send(long, 12)
        await sim.run_out()
        sim.executor.hold()
        sim.send(prompt(4, 3), 9, seed=1)
        await sim.settle()
        hit = sim.send([*long, 1, 2], 9, seed=2)
        await sim.step(2)
        step, join = sim.join_of(hit.number)
        assert join.cached == 40
        assert len(sim.plans[step - 1].prefill[0].tokens) == 2
        assert sim.plans[step - 1].decode, "beside a row that decodes"
        assert first.stream.finish_reason == "length"
        await sim.finish()


@ASYNCIO
async def test_flushing_an_idle_engine_twice() -> None:
    """sgl-project/sglang 20272; vllm-project/vllm, cache reset: nothing to flush is no error."""
    async with simulation() as sim:
        assert await sim.engine.flush_cache() == 0
        assert await sim.engine.flush_cache() == 0
        await finished(sim, prompt(20), 5)
        assert await sim.engine.flush_cache() == 6
        assert await sim.engine.flush_cache() == 0
        assert sim.statistics.free_pages == sim.statistics.total_pages
        sim.send(prompt(20), 5)
        await sim.finish()


@ASYNCIO
async def test_flushing_under_load_spares_what_is_used() -> None:
    """sgl-project/sglang 20272: a flush with requests running."""
    async with simulation(depth=2, chunk_cap=8) as sim:
        for index in range(6):
            sim.send(prompt(30, index % 2), 10, seed=index)
        for _ in range(25):
            await sim.step()
            await sim.engine.flush_cache()
            check_invariants(sim.engine)
        await sim.finish()
