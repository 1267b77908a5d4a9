"""What the planner puts into a step, seen in the plans that reach a held device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from asyncsched.errors import RequestTooLargeError
from asyncsched.testing import check_invariants, expected_tokens

from . import control_helpers
from .control_helpers import ONE_LOOP, Simulation, owners, plain, prompt, simulation, traffic

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 4])


def rows_decoded(sim: Simulation, step: int) -> list[int]:
    """Numbers of the requests that decode in a step: they have joined, sampled, and not left."""
    owner = owners(sim.plans, step)
    sampled: set[int] = set()
    for plan in sim.plans[: step - 1]:
        now = owners(sim.plans, plan.step)
        sampled |= {now[chunk.row] for chunk in plan.prefill if chunk.sample}
    return sorted(number for number in owner.values() if number in sampled) if sim.plans[step - 1].decode else []


# Prefill: order, budget, chunks


async def test_the_first_step_takes_all_in_arrival_order_with_full_prompts() -> None:
    async with simulation() as sim:
        for index, length in enumerate([5, 9, 3, 17]):
            sim.send(prompt(length, index))
        await sim.settle()
        assert sim.joined() == [1, 2, 3, 4]
        assert sim.shapes()[0] == [(1, 0, 5), (2, 0, 9), (3, 0, 3), (4, 0, 17)]
        assert all(chunk.sample for chunk in sim.plans[0].prefill)
        assert [chunk.tokens.tolist() for chunk in sim.plans[0].prefill] == [prompt(n, i) for i, n in enumerate([5, 9, 3, 17])]
        await sim.finish()


async def test_long_prompts_share_a_step_under_the_chunk_cap() -> None:
    async with simulation(chunk_cap=400, pages=256, page_size=16, max_model_len=1100) as sim:
        for index in range(3):
            sim.send(prompt(1000, index), 2)
        await sim.settle()
        await sim.step(3)
        assert sim.shapes()[:4] == [
            [(1, 0, 400), (2, 0, 400), (3, 0, 224)],
            [(1, 400, 400), (2, 400, 400), (3, 224, 224)],
            [(1, 800, 200), (2, 800, 200), (3, 448, 400)],
            [(3, 848, 152)],
        ]
        assert [plan.decode for plan in sim.plans[:4]] == [False, False, False, True]
        await sim.finish()


async def test_a_partial_prefill_yields_no_token() -> None:
    async with simulation(token_budget=8) as sim:
        sent = sim.send(prompt(20))
        await sim.settle()
        for done in range(3):
            assert sent.stream.usage.completion_tokens == 0
            assert [chunk.sample for chunk in sim.plans[done].prefill] == [done == 2]
            await sim.step()
        assert sent.stream.usage.completion_tokens == 1
        await sim.finish()


@pytest.mark.parametrize("first", [7, 8, 9, 15, 16, 17])
@ONE_LOOP
async def test_prompts_around_the_budget(first: int) -> None:
    async with simulation(token_budget=8) as sim:
        sim.send(prompt(first, 1), 1)
        sim.send(prompt(3, 2), 1)
        await sim.finish()
        sizes = [sum(size for _, _, size in shape) for shape in sim.shapes()]
        assert sizes == [8] * ((first + 3) // 8) + [(first + 3) % 8] * bool((first + 3) % 8)


async def test_begun_prompts_go_before_new_ones() -> None:
    async with simulation(token_budget=10, chunk_cap=6) as sim:
        sim.send(prompt(9, 1))
        sim.send(prompt(9, 2))
        sim.send(prompt(9, 3))
        await sim.settle()
        await sim.step(3)
        assert sim.shapes()[0] == [(1, 0, 6), (2, 0, 4)]
        assert sim.shapes()[1] == [(1, 6, 3), (2, 4, 5), (3, 0, 2)]
        await sim.finish()


async def test_without_chunking_shorter_prompts_do_not_overtake() -> None:
    """The second prompt does not fit into what is left of the step; the third would."""
    async with simulation(token_budget=100, chunked_prefill=False) as sim:
        sim.send(prompt(60, 1))
        sim.send(prompt(80, 2))
        sim.send(prompt(10, 3))
        await sim.settle()
        assert sim.shapes()[:2] == [[(1, 0, 60)], [(2, 0, 80), (3, 0, 10)]]
        await sim.finish()


@pytest.mark.parametrize("order", [[1, 2, 3], [2, 1, 3], [2, 3, 1]])
@DEPTHS
@ONE_LOOP
async def test_without_chunking_a_prompt_over_the_budget_runs_alone(order: list[int], depth: int) -> None:
    """While others decode, too: it neither starves nor shares its step."""
    async with simulation(token_budget=40, chunked_prefill=False, depth=depth) as sim:
        for kind in order:
            sim.send(prompt(90 if kind == 1 else 10, kind), 30)
        await sim.finish()
        (alone,) = [plan for plan, shape in zip(sim.plans, sim.shapes(), strict=True) if (order.index(1) + 1, 0, 90) in shape]
        assert len(alone.prefill) == 1
        assert not alone.decode
        assert alone.step <= 4


@DEPTHS
@ONE_LOOP
async def test_without_chunking_decoding_goes_on_between_prompts_over_the_budget(depth: int) -> None:
    async with simulation(token_budget=20, chunked_prefill=False, depth=depth, max_rows=4) as sim:
        sim.send(prompt(3), 20)
        for index in range(8):
            sim.send(prompt(50, index + 1), 1)
        await sim.finish()
        last = max(plan.step for plan in sim.plans if 1 in rows_decoded(sim, plan.step))
        decoded = [plan.decode for plan in sim.plans[1:last]]
        assert (False, False) not in pairwise(decoded), "two steps in a row left a decoding row standing"
        assert False in decoded


async def test_decode_rows_count_against_the_budget() -> None:
    async with simulation(token_budget=16) as sim:
        for index in range(4):
            sim.send(prompt(2, index), 20)
        await sim.settle()
        sim.send(prompt(40, 9), 2)
        await sim.step(6)
        chunks = [shape for shape in sim.shapes() if shape and shape[0][0] == 5]
        assert chunks == [[(5, 0, 12)], [(5, 12, 12)], [(5, 24, 12)], [(5, 36, 4)]]
        await sim.finish()


async def test_decoding_goes_on_when_it_fills_the_whole_budget() -> None:
    async with simulation(token_budget=3) as sim:
        for index in range(3):
            sim.send(prompt(1, index), 12)
        await sim.settle()
        sim.send(prompt(5, 7), 3)
        await sim.step(8)
        assert sim.joined() == [1, 2, 3], "no room beside three rows that decode"
        await sim.finish()


async def test_a_short_prompt_starts_in_the_step_after_a_long_ones_last_chunk() -> None:
    async with simulation(token_budget=16, depth=1) as sim:
        sim.send(prompt(40, 1))
        await sim.settle()
        await sim.step(2)
        assert sim.shapes()[-1] == [(1, 32, 8)]
        sim.send(prompt(5, 2))
        await sim.settle()
        await sim.step()
        assert sim.shapes()[3] == [(2, 0, 5)]
        assert sim.plans[3].decode
        await sim.finish()


async def test_a_short_prompt_shares_a_long_ones_last_step() -> None:
    async with simulation(token_budget=16, depth=1) as sim:
        sim.send(prompt(40, 1))
        await sim.settle()
        sim.send(prompt(5, 2))
        await sim.step(2)
        assert sim.shapes()[2] == [(1, 32, 8), (2, 0, 5)]
        await sim.finish()


async def test_an_arrival_joins_the_next_plan_while_others_decode() -> None:
    for depth in (1, 2, 4):
        async with simulation(depth=depth) as sim:
            sim.send(prompt(4), 30)
            await sim.settle()
            await sim.step(3)
            planned = len(sim.plans)
            sim.send(prompt(4, 1), 2)
            await sim.settle()
            await sim.step()
            assert sim.join_of(2)[0] == planned + 1
            await sim.finish()


# Steps: how many, how far ahead


@DEPTHS
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
@ONE_LOOP
async def test_a_length_ending_wastes_no_step(depth: int, max_tokens: int) -> None:
    async with simulation(depth=depth) as sim:
        sim.send(prompt(5), max_tokens)
        await sim.finish()
        assert len(sim.plans) == max_tokens
        assert sim.statistics.dropped_tokens == 0
        assert [plan.decode for plan in sim.plans] == [False] + [True] * (max_tokens - 1)


@DEPTHS
@ONE_LOOP
async def test_mixed_lengths_waste_no_row_step(depth: int) -> None:
    async with simulation(depth=depth) as sim:
        for index, count in enumerate([1, 7, 2, 1, 12, 5]):
            sim.send(prompt(3, index), count)
        await sim.finish()
        assert len(sim.plans) == 12
        assert sim.statistics.generated_tokens == 28
        assert sim.statistics.dropped_tokens == 0
        assert sum(len(rows_decoded(sim, plan.step)) for plan in sim.plans) == 28 - 6


@DEPTHS
@pytest.mark.parametrize("position", [0, 1, 5])
@ONE_LOOP
async def test_a_stop_id_wastes_at_most_depth_row_steps(depth: int, position: int) -> None:
    whole = expected_tokens(prompt(6), 3, 40, 1000)
    assert whole[position] not in whole[:position]
    async with simulation(depth=depth) as sim:
        sim.send(prompt(6), 40, seed=3, stop_token_ids=[whole[position]])
        (result,) = await sim.finish()
        assert result.finish_reason == "stop"
        assert result.completions[0].stop_reason == whole[position]
        assert len(result.token_ids) == position + 1
        assert sim.statistics.dropped_tokens <= depth
        assert len(sim.plans) == position + 1 + sim.statistics.dropped_tokens


@DEPTHS
async def test_no_more_than_depth_steps_are_in_flight(depth: int) -> None:
    async with simulation(depth=depth) as sim:
        sim.send(prompt(5), 12)
        sim.send(prompt(9, 1), 12)
        await sim.settle()
        for _ in range(6):
            assert sim.statistics.steps_in_flight == max(1, depth)
            await sim.step()
        await sim.finish()


async def test_steps_run_ahead_before_any_output_arrives() -> None:
    async with simulation(depth=4) as sim:
        sim.send(prompt(5), 12)
        await sim.settle()
        assert [plan.decode for plan in sim.plans] == [False, True, True, True]
        assert sim.statistics.generated_tokens == 0
        await sim.finish()


@ONE_LOOP
async def test_serial_steps_see_every_result_before_the_next_plan() -> None:
    """Depth 0 plans after the bookkeeping, depth 1 before it: the only difference is the wasted row-step."""
    whole = expected_tokens(prompt(6), 3, 10, 1000)
    steps = {}
    for depth in (0, 1):
        async with simulation(depth=depth) as sim:
            sim.send(prompt(6), 40, seed=3, stop_token_ids=[whole[4]])
            await sim.finish()
            steps[depth] = len(sim.plans)
    assert steps == {0: 5, 1: 6}


async def test_max_tokens_zero_computes_the_prompt_only() -> None:
    async with simulation() as sim:
        first = sim.send(prompt(10), 0)
        await sim.settle()
        assert [chunk.sample for chunk in sim.plans[0].prefill] == [False]
        sim.executor.unhold()
        await sim.settle()
        assert first.stream.finish_reason == "length"
        sim.send(prompt(10), 2)
        empty, _ = await sim.finish()
        assert empty.token_ids == ()
        assert sim.join_of(2)[1].cached == 8
        assert len(sim.plans) == 3


async def test_max_tokens_one_in_a_mixed_batch() -> None:
    async with simulation(max_rows=3, token_budget=12, chunk_cap=8) as sim:
        for index in range(12):
            sim.send(prompt(3 + 4 * (index % 3), index), [1, 5, 1, 0][index % 4])
        await sim.finish()
        assert sim.joined() == list(range(1, 13))


# Sharing


async def test_identical_prompts_of_one_step_share_their_whole_pages() -> None:
    async with simulation() as sim:
        sim.send(prompt(11), 3, seed=1)
        sim.send(prompt(11), 3, seed=2)
        sim.send(prompt(12), 3, seed=3)
        await sim.settle()
        assert sim.shapes()[0] == [(1, 0, 11), (2, 8, 3), (3, 8, 4)]
        first, second, third = (sim.join_of(number)[1] for number in (1, 2, 3))
        assert (first.cached, second.cached, third.cached) == (0, 8, 8)
        assert first.pages[:2].tolist() == second.pages[:2].tolist() == third.pages[:2].tolist()
        assert not set(first.pages[2:].tolist()) & set(second.pages[2:].tolist())
        await sim.finish()
        assert (sim.statistics.prompt_tokens, sim.statistics.cached_tokens) == (34, 16)


async def test_identical_prompts_share_what_is_planned_so_far() -> None:
    async with simulation(token_budget=20, chunk_cap=9) as sim:
        sim.send(prompt(30), 2, seed=1)
        sim.send(prompt(30), 2, seed=2)
        await sim.settle()
        assert sim.shapes()[0] == [(1, 0, 9), (2, 8, 9)]
        await sim.finish()


async def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached whole still needs one position to sample from."""
    for length in (1, 3, 4, 5, 8, 9):
        async with simulation() as sim:
            sim.send(prompt(length), 2, seed=1)
            await sim.run_out()
            sim.send(prompt(length), 2, seed=2)
            await sim.finish()
            assert sim.join_of(2)[1].cached == (length - 1) // 4 * 4


async def test_page_size_one_shares_all_but_the_last_token() -> None:
    async with simulation(page_size=1, pages=200) as sim:
        sim.send(prompt(9), 4, seed=1)
        sim.send(prompt(9), 4, seed=2)
        await sim.settle()
        assert sim.join_of(2)[1].cached == 8
        await sim.finish()


@DEPTHS
@ONE_LOOP
async def test_the_next_turn_of_a_conversation_hits_generated_pages(depth: int) -> None:
    """Everything but the last token of the answer has been through the model."""
    async with simulation(depth=depth) as sim:
        sim.send(prompt(10), 9, seed=5)
        await sim.run_out()
        answer = expected_tokens(prompt(10), 5, 9, 1000)
        turn = prompt(10) + answer + [1, 2, 3, 4, 5]
        second = sim.send(turn, 3, seed=6)
        await sim.finish()
        assert sim.join_of(2)[1].cached == 16
        assert second.stream.usage.cached_tokens == 16


async def test_a_stopped_answer_is_cached_up_to_what_was_certain() -> None:
    answer = expected_tokens(prompt(10), 5, 12, 1000)
    async with simulation() as sim:
        sim.send(prompt(10), 40, seed=5, stop_token_ids=[answer[10]])
        await sim.run_out()
        sim.send(prompt(10) + answer[:11] + [7] * 8, 3)
        await sim.finish()
        assert sim.join_of(2)[1].cached == 20


async def test_without_prefix_cache_nothing_is_shared_or_kept() -> None:
    async with simulation(prefix_cache=False) as sim:
        for seed in (1, 2):
            sim.send(prompt(12), 3, seed=seed)
        await sim.run_out()
        sim.send(prompt(12), 3, seed=3)
        await sim.finish()
        assert sim.statistics.cached_tokens == 0
        assert sim.statistics.free_pages == 64


async def test_several_completions_share_the_prompt_even_without_prefix_cache() -> None:
    async with simulation(prefix_cache=False) as sim:
        sim.send(prompt(12), 3, seed=1, n=3)
        await sim.finish()
        assert [sim.join_of(number)[1].cached for number in (1, 2, 3)] == [0, 8, 8]
        assert sim.statistics.free_pages == 64


async def test_salted_prompts_share_with_their_own_kind_only() -> None:
    async with simulation() as sim:
        for salt in ("a", "b", "a"):
            sim.send(prompt(12), 3, cache_salt=salt)
            await sim.run_out()
        await sim.finish()
        assert [sim.join_of(number)[1].cached for number in (1, 2, 3)] == [0, 0, 8]


async def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    async with simulation() as sim:
        sim.send(prompt(12), 3, seed=1)
        await sim.run_out()
        sim.send(prompt(12), 3, seed=2, prompt_logprobs=0)
        await sim.run_out()
        assert sim.join_of(2)[1].cached == 0
        check_invariants(sim.engine, idle=True)


# Pages


@pytest.mark.parametrize("reserve", ["full", "expected"])
@pytest.mark.parametrize("page_size", [1, 4])
@ONE_LOOP
async def test_around_the_size_of_the_pool_requests_are_served_or_refused(page_size: int, reserve: str) -> None:
    """Nothing hangs, whatever prompt + max_tokens lacks or spares; two at a time get in each other's way."""
    slots = 32
    pages = slots // page_size
    async with simulation(
        page_size=page_size, pages=pages, max_rows=3, max_model_len=60, token_budget=16, reserve=reserve, hold=False
    ) as sim:
        for length in (1, 15, 27, 28, 29, 31, 32, 33):
            for total in range(slots - page_size, slots + page_size + 2):
                max_tokens = total - length + 1  # the last token is never stored
                if max_tokens < 0:
                    continue
                fits = -(-max(length, total) // page_size) <= pages
                for copy in range(2):
                    try:
                        sim.send(prompt(length, length), max_tokens, seed=copy)
                    except RequestTooLargeError:
                        assert not fits
                    else:
                        assert fits
                await sim.settle()
                assert not sim.state.live, f"{length} + {max_tokens} tokens hang"
        assert len(sim.sent) > 20
        await sim.finish()


@ONE_LOOP
async def test_a_pool_of_one_page_serves_what_fits() -> None:
    async with simulation(page_size=16, pages=1, max_rows=4, hold=False) as sim:
        for length, count in ((1, 16), (16, 1), (8, 9), (16, 0), (3, 2)):
            sim.send(prompt(length, length), count)
        for length, count in ((1, 17), (16, 2), (17, 0)):
            with pytest.raises(RequestTooLargeError, match="lower max_tokens or enlarge the pool"):
                sim.send(prompt(length, length), count)
        await sim.finish()


async def test_steady_overload_reaches_max_rows() -> None:
    async with simulation(max_rows=5, token_budget=16, chunk_cap=4) as sim:
        for index in range(30):
            sim.send(prompt(1 + index % 7, index), 3 + index % 5)
        await sim.settle()
        running = []
        while sim.statistics.waiting:
            running.append(sim.statistics.running)
            await sim.step()
        assert max(running) == 5
        assert sorted(running)[len(running) // 2] >= 4, "rows must not stay empty while requests wait"
        await sim.finish()


async def test_one_row_serves_one_request_after_the_other() -> None:
    for depth in (0, 1, 2):
        async with simulation(max_rows=1, depth=depth) as sim:
            for index in range(4):
                sim.send(prompt(5, index), 1 + index)
            await sim.finish()
            assert sim.joined() == [1, 2, 3, 4]


async def test_a_head_that_finds_no_pages_is_not_overtaken() -> None:
    async with simulation(pages=8, max_rows=4) as sim:
        sim.send(prompt(8, 1), 13)  # 5 pages
        sim.send(prompt(8, 2), 13)  # 5 pages: must wait
        sim.send(prompt(2, 3), 2)  # 1 page: would fit
        await sim.settle()
        await sim.step(5)
        assert sim.joined() == [1]
        await sim.finish()
        assert sim.joined() == [1, 2, 3]
        assert sim.join_of(3)[0] == sim.join_of(2)[0]


async def test_unused_cache_makes_room() -> None:
    async with simulation(pages=8) as sim:
        sim.send(prompt(28, 1), 1)
        await sim.run_out()
        assert sim.statistics.cached_pages == 7
        sim.send(prompt(20, 2), 13)
        await sim.finish()
        assert sim.statistics.evicted_pages == 7


async def test_only_as_much_cache_is_evicted_as_is_needed() -> None:
    async with simulation(pages=8) as sim:
        sim.send(prompt(24, 1), 1)
        await sim.run_out()
        sim.send(prompt(12, 2), 1)  # 3 pages, 2 are free
        await sim.finish()
        assert sim.statistics.evicted_pages == 1
        assert sim.cached(prompt(24, 1)) == 20, "the tail goes first"


@pytest.mark.parametrize("max_tokens", [12, 20])
async def test_a_requests_own_hit_is_not_evicted_to_make_room_for_it(max_tokens: int) -> None:
    """The hit is the least recently used prefix, but giving it up would cost what it saves."""
    async with simulation(pages=8) as sim:
        sim.send(prompt(12, 1), 1)
        await sim.run_out()
        sim.send(prompt(12, 2), 1)
        await sim.run_out()
        assert (sim.statistics.free_pages, sim.statistics.cached_pages) == (2, 6)
        sim.send(prompt(13, 1), max_tokens)
        await sim.finish()
        assert sim.join_of(3)[1].cached == 12


async def test_a_refused_request_gives_back_every_reference() -> None:
    async with simulation(pages=8) as sim:
        sim.send(prompt(8, 1), 1)
        await sim.run_out()
        sim.executor.hold()
        sim.send(prompt(9, 2), 4)  # 3 pages; 3 are free besides the cached 2
        await sim.settle()
        before = sim.references()
        sim.send(prompt(9, 1), 20)  # 7 pages, 2 of them cached: not before the other one ends
        for _ in range(2):
            await sim.settle()
            assert sim.statistics.waiting == 1
            assert sim.references() == before
            await sim.step()
        await sim.finish()
        assert sim.join_of(3)[1].cached == 8


async def test_a_request_that_cannot_start_yet_costs_nobodys_cache() -> None:
    """It could not start even if all of the cache it does not use itself were given up."""
    async with simulation(pages=10) as sim:
        sim.send(prompt(12, 1), 1)
        await sim.run_out()
        sim.executor.hold()
        sim.send(prompt(13, 2), 8)  # 5 pages
        await sim.settle()
        sim.send(prompt(13, 1), 20)  # 8 pages, 3 of them cached, 2 free
        await sim.step(2)
        assert sim.statistics.waiting == 1
        assert sim.statistics.evicted_pages == 0
        assert sim.cached(prompt(12, 1)) == 12
        await sim.finish()
        assert sim.join_of(3)[1].cached == 12


@DEPTHS
@ONE_LOOP
async def test_a_copy_of_a_cached_page_does_not_stop_the_last_request(depth: int) -> None:
    """Both compute the same page; one copy is cached, the other is its owner's, which then needs the whole pool."""
    async with simulation(page_size=1, pages=8, depth=depth, reserve="expected", hold=False) as sim:
        for seed in (1, 2):
            sim.send([5], 8, seed=seed)
        await sim.finish()


async def test_pages_and_rows_come_back_when_nothing_follows() -> None:
    """At idle nothing may wait for a step that never comes."""
    async with simulation(pages=8, max_rows=2) as sim:
        for index in range(3):
            sim.send(prompt(9, index), 5)
            await sim.run_out()
            check_invariants(sim.engine, idle=True)
            assert sim.statistics.limbo_pages == 0
        await sim.finish()


# Determinism


async def scenario(seed: int, **options: Any) -> list[tuple[object, ...]]:
    async with simulation(**options) as sim:
        await traffic(sim, seed)
        await sim.finish()
        return [plain(plan) for plan in sim.plans]


TIGHT: dict[str, Any] = {"pages": 24, "max_rows": 4, "token_budget": 24, "chunk_cap": 10}


@ONE_LOOP
async def test_the_same_input_gives_the_same_plans() -> None:
    first = await scenario(3, policy="lpm", **TIGHT)
    assert first == await scenario(3, policy="lpm", **TIGHT)
    assert first != await scenario(4, policy="lpm", **TIGHT)


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    script = Path(control_helpers.__file__)
    outputs = [
        subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(outputs[0].strip()) == 64
    assert outputs[0] == outputs[1]


VARIANTS: list[dict[str, Any]] = [
    {"depth": 0},
    {"depth": 1, "policy": "lpm"},
    {"depth": 3, "page_size": 1, "pages": 90},
    {"depth": 2, "page_size": 16, "pages": 9},
    {"depth": 2, "prefix_cache": False},
    {"depth": 2, "chunked_prefill": False, "token_budget": 30, "chunk_cap": None},
    {"depth": 2, "low_watermark": 0.2, "high_watermark": 0.5},
    {"depth": 2, "max_rows": 1},
    {"depth": 0, "reserve": "expected"},
    {"depth": 2, "reserve": "expected"},
    {"depth": 3, "reserve": "expected", "max_preemptions": 0, "page_size": 1, "pages": 60},
    {"depth": 0, "pages": 15},
    {"depth": 2, "reserve": "expected", "pages": 15},
    {"depth": 0, "reserve": "expected", "pages": 4, "page_size": 16},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(f"{k}={v}" for k, v in variant.items()))
@pytest.mark.parametrize("seed", [15, 35])
@ONE_LOOP
async def test_busy_traffic_gives_the_oracles_tokens(variant: dict[str, Any], seed: int) -> None:
    """Colliding prompts, stops, several completions, aborts and resubmitted answers in a tiny pool."""
    plans = await scenario(seed, **{**TIGHT, **variant})
    steps: Sequence[Any] = [plan[0] for plan in plans]
    assert steps == list(range(1, len(plans) + 1))


async def test_busy_traffic_on_every_event_loop() -> None:
    await scenario(5, **TIGHT)


@ONE_LOOP
async def test_a_row_is_left_before_it_is_joined_again() -> None:
    async with simulation(**TIGHT) as sim:
        await traffic(sim, 11)
        await sim.finish()
        owners(sim.plans, len(sim.plans))  # asserts it for every join
        joins = [join.row for plan in sim.plans for join in plan.joins]
        assert len(joins) > 3 * len(set(joins)), "rows must have been used again and again"
        left = [row for plan in sim.plans for row in plan.leaves]
        assert len(joins) - len(left) <= 4


@pytest.mark.parametrize("position", range(1, 12))
@ONE_LOOP
async def test_an_abort_at_any_step_gives_everything_back(position: int) -> None:
    """During a chunked prefill, between its chunks, while decoding: the others are not disturbed."""
    async with simulation(token_budget=8) as sim:
        victim = sim.send(prompt(22, 1), 12)
        sim.send(prompt(18, 1), 6, seed=4)
        await sim.settle()
        await sim.step(position)
        sim.engine.abort(victim.stream.request_id)
        planned = len(sim.plans)
        check_invariants(sim.engine)
        await sim.finish()
        for plan in sim.plans[planned:]:
            assert victim.number not in {number for number, _, _ in sim.shape(plan)}
            assert victim.number not in owners(sim.plans, plan.step).values()
