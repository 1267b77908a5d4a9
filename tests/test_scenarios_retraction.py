"""Pages run out while requests run: who gives way, how often, and that no output shows it.

Cases from reports of other engines; each test names the report it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from asyncsched import EngineView, Preempted, RequestView
from asyncsched.errors import RequestTooLargeError
from asyncsched.policies.lpm import LPM
from asyncsched.reserve import ReserveEstimate
from asyncsched.testing import check_invariants, expected_tokens

from .control_helpers import Sent, Simulation, owners, prompt, simulation
from .engine_helpers import ASYNCIO

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3])


class Hopeful(ReserveEstimate):
    """Expects that nobody needs another page and does not learn, so that pages run out as often as they can."""

    def __init__(self) -> None:
        super().__init__(start=0.0, floor=0.0)

    def shortage(self, generated: int, limit: int) -> None:
        """Learn nothing."""


class Chosen:
    """Arrival order; the victims are given by a key, the smallest first."""

    def __init__(self, key: Any) -> None:
        self._key = key
        self.asked: list[tuple[int, list[int]]] = []

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        return waiting

    def victims(self, running: Sequence[RequestView], needed: int, view: EngineView) -> Iterable[RequestView]:
        self.asked.append((needed, [request.number for request in running]))
        return sorted(running, key=self._key)


def hope(sim: Simulation) -> None:
    """Admit whatever fits now."""
    sim.engine._running().control.placement.estimate = Hopeful()


async def until_preempted(sim: Simulation, count: int = 1) -> None:
    """Advance until ``count`` requests have lost their rows."""
    for _ in range(500):
        if sim.statistics.preemptions >= count:
            return
        await sim.step()
    raise AssertionError(f"only {sim.statistics.preemptions} preemptions")


@ASYNCIO
@DEPTHS
@pytest.mark.parametrize("page_size", [1, 4, 16])
async def test_a_storm_changes_no_output_and_leaves_nothing(depth: int, page_size: int) -> None:
    """sgl-project/sglang 4184, 4913, 4914, 4977, 11970, 11976, 11981, 14939, 14942."""
    random = Random(depth * 100 + page_size)
    async with simulation(
        depth=depth, reserve="expected", page_size=page_size, pages=96 // page_size, token_budget=32, chunk_cap=10
    ) as sim:
        hope(sim)
        for wave in range(2):  # the pool is full again after it was drained
            for index in range(14):
                tokens, wanted = prompt(random.randint(1, 30), index % 5), random.randint(1, 60)
                stops = tuple(random.sample(expected_tokens(tokens, index, wanted, 1000), 1)) if index % 4 == 0 else ()
                sim.send(tokens, wanted, seed=index, stop_token_ids=stops)
            await sim.finish()
            assert sim.statistics.preemptions >= 2 * (wave + 1)
        assert sim.statistics.restarts == sim.statistics.preemptions


@ASYNCIO
@DEPTHS
async def test_requests_lose_their_rows_every_third_step(depth: int) -> None:
    """sgl-project/sglang 11970; vllm-project/vllm 48245, 46066, 47900: preempted with steps in flight."""
    random = Random(depth)
    async with simulation(depth=depth, token_budget=24, chunk_cap=7, pages=48) as sim:
        for index in range(10):
            sim.send(prompt(random.randint(1, 40), index % 3), random.randint(1, 25), seed=index)
        for step in range(60):
            await sim.step()
            running = sim.state.running()
            if step % 3 == 0 and running and step < 45:
                sim.state.preempt(random.choice(running))
                sim.engine._running().control.planner.wake.set()
                await sim.settle()
                check_invariants(sim.engine)
        assert sim.statistics.preemptions >= 10
        await sim.finish()


@ASYNCIO
@DEPTHS
@pytest.mark.parametrize("chunk_cap", [3, 64])
async def test_random_preemption_at_every_step_and_stage(depth: int, chunk_cap: int) -> None:
    """vllm-project/vllm 57562, 28787, 48245: chunked prefill and preemption with steps in flight."""
    for seed in range(6):
        random = Random(seed)
        async with simulation(depth=depth, token_budget=64, chunk_cap=chunk_cap, max_rows=4) as sim:
            sent = [sim.send(prompt(random.randint(1, 12), index % 2), random.randint(1, 9), seed=index) for index in range(5)]
            await sim.settle()
            for _ in range(12):
                for request in sim.state.running():
                    if random.random() < 0.3:
                        sim.state.preempt(request)
                sim.engine._running().control.planner.wake.set()
                await sim.settle()
                await sim.step()
            await sim.finish()
            assert all(one.stream.finish_reason == "length" for one in sent)


@ASYNCIO
@DEPTHS
async def test_a_reader_sees_no_repeat_and_no_gap(depth: int) -> None:
    """sgl-project/sglang 39645: two generations were spliced when a request was retracted while it streamed."""
    async with simulation(depth=depth) as sim:
        sent = sim.send(prompt(6), 30, seed=3)
        await sim.settle()
        got: list[int] = []
        stream = aiter(sent.stream)
        for round_ in range(30):
            await sim.step(depth + 2)
            if round_ in (2, 3, 5):
                before = len(got)
                sim.state.preempt(sim.state.running()[0])
                sim.engine._running().control.planner.wake.set()
                await sim.settle()
                assert len(got) == before
            if sim.state.running() and sim.state.running()[0].received > len(got):
                got += (await anext(stream)).token_ids
            if sent.stream.finish_reason is not None:
                break
        got += [token for chunk in [chunk async for chunk in stream] for token in chunk.token_ids]
        assert got == expected_tokens(prompt(6), 3, 30, 1000)
        assert sim.statistics.preemptions == 3
        await sim.finish()


@ASYNCIO
async def test_a_resumed_request_computes_prompt_and_output() -> None:
    """vllm-project/vllm, preemption: 30 prompt tokens and 2 generated ones resume as a fill of 32."""
    async with simulation(depth=1, prefix_cache=False) as sim:
        sent = sim.send(prompt(30), 6, seed=1, frequency_penalty=0.5)
        await sim.settle()
        await sim.step(2)
        assert sent.stream.usage.completion_tokens == 2
        sim.state.preempt(sim.state.running()[0])
        sim.engine._running().control.planner.wake.set()
        await sim.settle()
        await sim.step()
        join = sim.plans[-1].joins[0]
        (chunk,) = sim.plans[-1].prefill
        so_far = prompt(30) + expected_tokens(prompt(30), 1, 2, 1000)
        assert (chunk.start, chunk.tokens.tolist(), chunk.sample) == (0, so_far, True)
        assert (join.cached, join.generated) == (0, 2)
        assert join.history.tolist() == so_far, "penalties must count what was generated before (28787)"
        await sim.finish()


@ASYNCIO
async def test_a_resumed_request_finds_its_own_pages() -> None:
    """vllm-project/vllm, preemption: what was computed is not computed again while it is still cached."""
    async with simulation(depth=2) as sim:
        sent = sim.send(prompt(30), 20, seed=1)
        await sim.settle()
        await sim.step(12)
        sim.state.preempt(sim.state.running()[0])
        sim.engine._running().control.planner.wake.set()
        await sim.settle()
        received = sent.stream.usage.completion_tokens
        while len(sim.joined()) < 2:
            await sim.step()
        assert sim.plans[-1].joins[0].cached == (30 + received - 1) // 4 * 4
        await sim.finish()


@ASYNCIO
@DEPTHS
async def test_the_last_to_arrive_gives_way_and_the_older_goes_on(depth: int) -> None:
    """vllm-project/vllm, preemption: exhaustion preempts the last-arrived."""
    async with simulation(depth=depth, reserve="expected", pages=10) as sim:
        hope(sim)
        sent = [sim.send(prompt(7, index), 25, seed=index) for index in range(3)]
        async with sim.engine.events() as events:
            await until_preempted(sim)
            assert [request.number for request in sim.state.running()] == [1, 2]
            await sim.run_out()
        lost = [event.number async for event in events if isinstance(event, Preempted)]
        assert 1 not in lost
        ends = [one.stream.times.finished for one in sent]
        assert ends == sorted(ends, key=float)  # type: ignore[arg-type]
        await sim.finish()


@ASYNCIO
@DEPTHS
async def test_no_more_are_preempted_than_needed(depth: int) -> None:
    """sgl-project/sglang 13111, 13201: the freed tokens were counted with the wrong request's offset."""
    async with simulation(depth=depth, reserve="expected", pages=24, prefix_cache=False) as sim:
        hope(sim)
        for index in range(6):  # four pages each, all full at the same moment: six are wanted, the last one has four
            sim.send(prompt(13, index), 16, seed=index)
        await until_preempted(sim)
        assert sim.statistics.preemptions == 2  # one frees four pages for five rows, two free eight for four
        await sim.finish()


@ASYNCIO
@DEPTHS
async def test_one_shortage_has_one_victim_while_its_pages_are_fenced(depth: int) -> None:
    """vllm-project/vllm-ascend 16315: preempting freed nothing in this step, so it cascaded through the batch."""
    async with simulation(depth=depth, reserve="expected", pages=16) as sim:
        hope(sim)
        for index in range(4):  # their lengths differ, so one row at a time comes to the end of its page
            sim.send(prompt(12 + index, index), 40 - index, seed=index)
        await sim.settle()
        before = 0
        for _ in range(300):
            now = sim.statistics.preemptions
            assert now - before <= 1, "one missing page cost more than one request its row"
            before = now
            if not sim.statistics.steps_in_flight:
                break
            await sim.step()
        assert before >= 2
        await sim.finish()


@ASYNCIO
async def test_a_shortage_that_steps_in_flight_will_cure_preempts_nobody() -> None:
    """vllm-project/vllm-ascend 16315: pages that are fenced are as good as free."""
    async with simulation(depth=2, reserve="expected", pages=8, prefix_cache=False) as sim:
        hope(sim)
        leaver = sim.send(prompt(13, 0), 15, seed=0)
        stayer = sim.send(prompt(13, 1), 15, seed=1)
        await sim.settle()
        await sim.step()  # both have 4 pages; the next token but one needs a fifth
        assert sim.statistics.free_pages == 0
        leaver.stream.close()
        await sim.settle()
        assert sim.statistics.limbo_pages == 4
        await sim.run_out()
        assert sim.statistics.preemptions == 0
        assert list((await stayer.stream.result()).token_ids) == expected_tokens(prompt(13, 1), 1, 15, 1000)
        sim.sent.remove(leaver)
        await sim.finish()


@ASYNCIO
@pytest.mark.parametrize("allowed", [1, 2, 3])
async def test_who_was_preempted_often_is_spared(allowed: int) -> None:
    """vllm-project/vllm 35541 and others: the same request was preempted for ever."""
    policy = Chosen(lambda request: request.number)  # always the oldest, who would never get anywhere
    async with simulation(depth=2, reserve="expected", pages=16, policy=policy, max_preemptions=allowed) as sim:
        hope(sim)
        for index in range(4):
            sim.send(prompt(9, index), 45, seed=index)
        taken: list[tuple[int, int]] = []
        preempt = sim.state.preempt

        def watched(request: Any) -> None:
            taken.append((request.preemptions, min(other.preemptions for other in sim.state.running())))
            preempt(request)

        sim.state.preempt = watched  # type: ignore[method-assign]
        await sim.run_out()
        assert len(taken) > allowed
        assert all(own < allowed or least >= allowed for own, least in taken)
        await sim.finish()


@ASYNCIO
@DEPTHS
async def test_the_policys_victim_is_taken_before_the_newcomer(depth: int) -> None:
    """vllm-project/vllm, priority: under pressure the lowest-priority running request gives way, not the newcomer."""
    policy = Chosen(lambda request: -request.priority)
    async with simulation(depth=depth, reserve="expected", pages=10, policy=policy) as sim:
        hope(sim)
        unimportant = sim.send(prompt(7, 0), 25, priority=9)
        important = sim.send(prompt(7, 1), 25, priority=1)
        newcomer = sim.send(prompt(7, 2), 25, priority=0)
        await until_preempted(sim)
        assert [request.number for request in sim.state.running()] == [important.number, newcomer.number]
        assert sim.state.live[unimportant.stream.request_id].requests[0].preemptions == 1
        await sim.finish()


@ASYNCIO
async def test_cached_pages_of_waiting_requests_are_reclaimed_and_those_of_running_ones_are_not() -> None:
    """vllm-project/vllm: growth may take what only waits for a hit, never what another request uses."""
    async with simulation(depth=1, reserve="expected", pages=16, max_rows=2) as sim:
        hope(sim)
        warm = sim.send(prompt(24, 5), 1)
        await sim.run_out()
        sim.executor.hold()
        await warm.stream.result()
        running = [sim.send(prompt(9, index), 20, seed=index) for index in range(2)]
        waiting = sim.send([*prompt(24, 5), 1], 2)  # would find six pages
        await sim.settle()
        least = sim.cached(waiting.prompt)
        assert least == 24
        while sim.statistics.running == 2 and sim.statistics.steps_in_flight:
            least = min(least, sim.cached(waiting.prompt))
            locked = {int(page) for node in sim.state.tree.nodes() if node.refs for page in node.pages}
            assert locked.isdisjoint(sim.state.pool.free_pages().tolist())
            await sim.step()
        assert sim.statistics.evicted_pages > 0
        assert least < 24
        assert sim.statistics.preemptions == 0
        assert all(one.stream.usage.completion_tokens == 20 for one in running)
        await sim.finish()


@ASYNCIO
@DEPTHS
async def test_a_preemption_is_counted_and_told(depth: int) -> None:
    """vllm-project/vllm, preemption: counter and event."""
    async with simulation(depth=depth) as sim, sim.engine.events() as events:
        sent = sim.send(prompt(16), 12, seed=1)
        await sim.settle()
        await sim.step(6)
        received = sent.stream.usage.completion_tokens
        sim.state.preempt(sim.state.running()[0])
        sim.engine._running().control.planner.wake.set()
        await sim.finish()
        events.close()
        told = [(event.number, event.output_tokens) async for event in events if isinstance(event, Preempted)]
        assert told == [(1, received)]
        assert sim.statistics.preemptions == 1


@ASYNCIO
@DEPTHS
async def test_what_a_request_finds_of_its_own_is_no_hit(depth: int) -> None:
    """vllm-project/vllm: after a preemption the prefix is asked for again, which must not look like a hit of the prompt."""
    async with simulation(depth=depth) as sim:
        sent = sim.send(prompt(16), 12, seed=1)
        await sim.settle()
        await sim.step(6)
        sim.state.preempt(sim.state.running()[0])
        sim.engine._running().control.planner.wake.set()
        await sim.finish()
        usage = sent.stream.usage
        assert usage.cached_tokens <= usage.prompt_tokens
        assert usage.cached_tokens == 0, "the caller's prompt was computed, not found"
        assert (sim.statistics.prompt_tokens, sim.statistics.hit_rate) == (16, 0.0)


@ASYNCIO
async def test_several_completions_survive_the_loss_of_their_rows() -> None:
    """sgl-project/sglang 14939: requests with n > 1 were retracted in part."""
    async with simulation(depth=2, reserve="expected", pages=12) as sim:
        hope(sim)
        sim.send(prompt(9), 30, seed=5, n=4)
        results = await sim.finish()
        assert sim.statistics.preemptions >= 1
        assert [completion.index for completion in results[0].completions] == [0, 1, 2, 3]


@ASYNCIO
@DEPTHS
async def test_a_request_with_the_whole_pool_to_itself_runs_to_its_end(depth: int) -> None:
    """sgl-project/sglang 19881; vllm-project/vllm 39734, 56028: the last request could not fit and preempted itself."""
    async with simulation(depth=depth, reserve="expected", pages=6) as sim:
        hope(sim)
        with pytest.raises(RequestTooLargeError, match="pool has 6"):
            sim.send(prompt(10), 16)
        sim.send(prompt(10), 15)  # 24 tokens are kept, the last one is not
        sim.send(prompt(10, 1), 15)
        await sim.finish()


@ASYNCIO
@DEPTHS
async def test_closing_a_preempted_request(depth: int) -> None:
    """vllm-project/vllm 46066: aborted while preempted, with its steps still in flight."""
    async with simulation(depth=depth) as sim:
        sent, other = sim.send(prompt(9), 20, seed=1), sim.send(prompt(9), 20, seed=2)
        await sim.settle()
        await sim.step(4)
        sim.state.preempt(sim.state.running()[1])
        other.stream.close()
        sim.sent.remove(other)
        sim.engine._running().control.planner.wake.set()
        await sim.settle()
        check_invariants(sim.engine)
        await sim.finish()
        assert sent.stream.finish_reason == "length"


@ASYNCIO
async def test_no_output_token_waits_for_other_peoples_prompts() -> None:
    """sgl-project/sglang 32549: under a flood of long prompts decoding got one step in 24 seconds."""
    async with simulation(depth=2, token_budget=16, pages=256, max_rows=6) as sim:
        reader = sim.send(prompt(4), 60, seed=1)
        await sim.settle()
        await sim.step()
        flood: list[Sent] = []
        for index in range(120):
            if len(flood) - sum(one.stream.finish_reason is not None for one in flood) < 4:
                flood.append(sim.send(prompt(100, index + 1), 1, seed=index))
            before = reader.stream.usage.completion_tokens
            await sim.step()
            if reader.stream.finish_reason is not None:
                break
            assert reader.stream.usage.completion_tokens == before + 1, "every step brings a token"
        assert reader.stream.usage.completion_tokens == 60
        assert len(flood) > 5
        await sim.finish()


@ASYNCIO
async def test_whole_prompts_leave_every_other_step_to_decoding() -> None:
    """sgl-project/sglang 32549, with chunking off: the gap is two steps."""
    async with simulation(depth=2, token_budget=16, pages=256, max_rows=6, chunked_prefill=False) as sim:
        reader = sim.send(prompt(4), 40, seed=1)
        await sim.settle()
        await sim.step()
        for index in range(30):
            sim.send(prompt(100, index + 1), 1, seed=index)
        await sim.settle()
        gap = longest = 0
        while reader.stream.finish_reason is None:
            before = reader.stream.usage.completion_tokens
            await sim.step()
            gap = 0 if reader.stream.usage.completion_tokens > before else gap + 1
            longest = max(longest, gap)
        assert longest == 1
        await sim.finish()


@ASYNCIO
async def test_a_cold_request_starts_in_spite_of_a_hot_flood() -> None:
    """sgl-project/sglang 31954, 31723, 33210: cold requests starved behind requests whose prefix was cached."""
    age = 12
    async with simulation(policy=LPM(age_steps=age, refresh_steps=1), max_rows=2, pages=64, depth=2) as sim:
        hot = prompt(16)
        await sim.settle()
        sim.send([*hot, 1], 2)
        await sim.settle()
        await sim.step(4)
        for index in range(6):
            sim.send([*hot, index], 3, seed=index)
        cold = sim.send(prompt(20, 9), 3)
        asked = len(sim.plans)
        served_before = 0
        while cold.number not in sim.joined():
            sim.send([*hot, len(sim.plans) % 900], 3)
            await sim.step()
            served_before += 1
            assert len(sim.plans) - asked <= age + 6, "it starts within its age and the time a row needs to come free"
        assert served_before > 3, "there was a flood"
        await sim.finish()


@ASYNCIO
async def test_an_important_arrival_is_next_when_pages_come_back() -> None:
    """sgl-project/sglang 14872, 15249: the arrival with the highest priority was not even tried.

    Running requests are not stopped for an arrival; it goes before everyone who waits.
    """

    class Priority(Chosen):
        def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
            return sorted(waiting, key=lambda request: (request.priority, request.number))

    async with simulation(policy=Priority(lambda request: -request.priority), pages=8, depth=2) as sim:
        running = sim.send(prompt(9), 20, priority=5)
        await sim.settle()
        ordinary = sim.send(prompt(9, 1), 20, priority=5)
        urgent = sim.send(prompt(9, 2), 20, priority=0)
        await sim.settle()
        while len(sim.joined()) < 2:
            await sim.step()
        assert sim.joined() == [running.number, urgent.number]
        step, join = sim.join_of(urgent.number)
        assert step == 20 + 1, "in the first step after the pages came back"
        assert owners(sim.plans, step) == {join.row: urgent.number}
        await sim.finish()
        assert ordinary.stream.finish_reason == "length"


@ASYNCIO
async def test_a_row_cap_admits_the_best_first() -> None:
    """vllm-project/vllm, priority: a cap of k rows takes the k best, ties by arrival, whatever the mix."""

    class Priority(Chosen):
        def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
            return sorted(waiting, key=lambda request: (request.priority, request.number))

    random = Random(3)
    async with simulation(policy=Priority(lambda request: 0), max_rows=3, depth=1, token_budget=64) as sim:
        await sim.engine.pause()
        ranks = [random.randrange(4) for _ in range(20)]
        for index, rank in enumerate(ranks):
            sim.send(prompt(3, index), 2, seed=index, priority=rank)
        for index in random.sample(range(20), 5):  # the order survives removals
            sim.sent[index].stream.close()
        kept = [sent for sent in sim.sent if sent.stream.finish_reason is None]
        sim.sent = kept
        sim.engine.resume()
        await sim.finish()
        assert sim.joined() == sorted((sent.number for sent in kept), key=lambda number: (ranks[number - 1], number))


@ASYNCIO
async def test_pages_that_were_given_up_are_not_named_again_before_their_step() -> None:
    """sgl-project/sglang 26380, 38258: a page table was written while a step still read it."""
    async with simulation(depth=3, reserve="expected", pages=12) as sim:
        hope(sim)
        for index in range(4):
            sim.send(prompt(9, index), 25, seed=index)
        for _ in range(60):
            free = sim.state.pool.free_pages()
            for plan in list(sim.plans)[len(sim.plans) - sim.statistics.steps_in_flight :]:
                for join in plan.joins:
                    holder = sim.state.by_row[join.row]
                    if holder is None or holder.number != join.number:
                        continue
                    assert not np.isin(join.pages, free).any()
            await sim.step()
        await sim.finish()
