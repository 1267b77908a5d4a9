"""Simulations: virtual time, figures worked out by hand, what is written down, and that nothing is left to chance."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from asyncsched import ConfigError, PolicyNotFoundError
from asyncsched.cost import LinearCost, StepWork
from asyncsched.lab import Setup, SimulationResult, Trace, TraceRequest, recorder, simulate
from asyncsched.lab.readers import read_trace
from asyncsched.lab.trace import limited, with_targets
from asyncsched.lab.virtual_time import VirtualTimeLoop
from asyncsched.policy import EngineView, RequestView

DATA = Path(__file__).parent / "data" / "traces"

COST = LinearCost(fixed=1.0, per_decode_row=0.01, per_context_token=0.0, per_prefill_token=0.1)
"""A prompt of 10 tokens takes 2 s, a step with one decoding row 1.01 s."""


def trace(*requests: TraceRequest) -> Trace:
    return Trace("test", list(requests))


def ask(at: float, prompt: int, output: int, **about: Any) -> TraceRequest:
    return TraceRequest(at, prompt, output, **about)


def setup(cost: Any = COST, *, max_tokens: Any = "exact", hint_error: float | None = 0.0, **options: Any) -> Setup:
    """64 pages of 16 tokens for 8 rows, unless ``options`` says otherwise."""
    device = {
        name: options.pop(name) for name in ("pages", "page_size", "max_rows", "max_model_len", "seed") if name in options
    }
    return Setup(cost, **{"pages": 64, "max_rows": 8, **device}, options=options, max_tokens=max_tokens, hint_error=hint_error)


# Virtual time


def in_virtual_time(main: Any) -> Any:
    return anyio.run(main, backend_options={"loop_factory": VirtualTimeLoop})


def test_the_clock_jumps_to_the_next_timer() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await anyio.sleep(seconds)
        seen.append((name, anyio.current_time()))

    async def main() -> None:
        assert anyio.current_time() == 0.0
        async with anyio.create_task_group() as tasks:
            for name, seconds in (("week", 604_800.0), ("hour", 3600.0), ("blink", 1e-3), ("also an hour", 3600.0)):
                tasks.start_soon(sleeper, name, seconds)
        with anyio.move_on_after(10.0):
            await anyio.sleep_forever()
        seen.append(("given up", anyio.current_time()))

    in_virtual_time(main)
    assert [name for name, _ in seen] == ["blink", "hour", "also an hour", "week", "given up"]
    assert [at for _, at in seen] == pytest.approx([1e-3, 3600, 3600, 604_800, 604_810], abs=1e-6)


def test_the_clock_stands_while_anything_is_ready() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 5.0)
            for _ in range(1000):
                await anyio.lowlevel.checkpoint()
                assert anyio.current_time() == 0.0
        assert anyio.current_time() == pytest.approx(5.0)

    in_virtual_time(main)


def test_the_clock_stands_while_there_is_something_to_read() -> None:
    """Without a task that is ready, but with a file that is: it goes before the timer, and the clock need not move."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            arrived = anyio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(ours, arrived.set)
            theirs.send(b"x")
            with anyio.fail_after(5.0):
                await arrived.wait()
            loop.remove_reader(ours)
        assert anyio.current_time() == 0.0

    in_virtual_time(main)


def test_threads_take_no_virtual_time() -> None:
    async def main() -> int:
        await anyio.sleep(2.0)
        total = await anyio.to_thread.run_sync(lambda: sum(range(1_000_000)))
        assert anyio.current_time() == pytest.approx(2.0)
        return total

    assert in_virtual_time(main) == 499_999_500_000


# Latencies worked out by hand


def latencies(result: SimulationResult) -> list[tuple[float, float | None, float]]:
    """TTFT, TPOT and E2E per request."""
    found = []
    for record in result.requests:
        assert record.ttft is not None
        assert record.e2e is not None
        found.append((record.ttft, record.tpot, record.e2e))
    return found


def close(*expected: tuple[float, float | None, float]) -> list[Any]:
    return [tuple(None if value is None else pytest.approx(value, abs=1e-6) for value in one) for one in expected]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", ["exact", "longest", 50])
def test_one_request(depth: int, max_tokens: Any) -> None:
    """However the output ends, and however many steps are in flight: the device computes one step after the other."""
    result = simulate(trace(ask(0, 10, 3), ask(100, 20, 1)), setup(depth=depth, max_tokens=max_tokens))
    assert latencies(result) == close((2.0, 1.01, 4.02), (3.0, None, 3.0))
    assert result.gaps == pytest.approx([1.01, 1.01])
    assert result.seconds == pytest.approx(103.0)
    assert [record.admitted for record in result.requests] == pytest.approx([0.0, 100.0])
    assert [record.output_tokens for record in result.requests] == [3, 1]
    assert [record.error for record in result.requests] == ["", ""]


@pytest.mark.parametrize(
    ("depth", "ttft", "dropped"),
    [
        (0, 0.51 + 2.0, 0),  # waits for the step that runs; then alone
        (1, 0.51 + 2.01, 1),  # the next step was planned before it was known that the other had ended
        (2, 0.51 + 1.01 + 2.0, 1),  # and was submitted before this one had come
    ],
)
def test_what_running_ahead_costs(depth: int, ttft: float, dropped: int) -> None:
    """An output that ends by a stop token; a second request arrives at 2.5, while the step from 2 to 3.01 runs."""
    result = simulate(trace(ask(0, 10, 2), ask(2.5, 10, 1)), setup(depth=depth, max_tokens=50))
    assert latencies(result) == close((2.0, 1.01, 3.01), (ttft, None, ttft))
    assert result.statistics.dropped_tokens == dropped
    assert len(result.gaps) == 1, "tokens after the end are nobody's"


def test_a_known_end_wastes_nothing() -> None:
    """As the benchmarks do that ignore the end of sequence."""
    result = simulate(trace(ask(0, 10, 2), ask(2.5, 10, 1)), setup(depth=2, max_tokens="exact"))
    assert latencies(result) == close((2.0, 1.01, 3.01), (2.51, None, 2.51))
    assert result.statistics.dropped_tokens == 0
    assert result.statistics.finished["length"] == 2


def test_chunked_prefill() -> None:
    """Four tokens per step: a prompt alone in chunks of 4, 4 and 2; then one beside a row that decodes, in two of 3."""
    server = setup(depth=0, token_budget=4)
    assert latencies(simulate(trace(ask(0, 10, 1)), server)) == close((1.4 + 1.4 + 1.2, None, 4.0))
    result = simulate(trace(ask(0, 4, 4), ask(0.5, 6, 1)), server)
    assert latencies(result) == close((1.4, (1.31 + 1.31 + 1.01) / 3, 5.03), (1.4 + 1.31 + 1.31 - 0.5, None, 3.52))
    assert sorted(result.gaps) == pytest.approx([1.01, 1.31, 1.31])


def test_context_and_attention_count() -> None:
    """Every feature of the model: rows attend to prompt and output so far, chunks to what precedes them."""
    cost = LinearCost(1.0, 0.0, per_context_token=0.5, per_prefill_token=0.0, per_attention_pair=0.25)
    result = simulate(trace(ask(0, 4, 3)), setup(cost, token_budget=3, depth=0))
    first = (1 + 0.25 * (1 + 2 + 3)) + (1 + 0.25 * 4)
    assert latencies(result) == close((first, 1 + 0.5 * (5 + 6) / 2, first + 2 + 0.5 * 11))


@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_shared_blocks_are_computed_once(page_size: int) -> None:
    """The second prompt shares 32 tokens with the first; the third has the same blocks in another order."""
    shared = {"blocks": (1, 2), "block_size": 16}
    requests = [ask(0, 48, 1, **shared), ask(10, 40, 1, **shared), ask(20, 40, 1, blocks=(2, 1), block_size=16)]
    result = simulate(trace(*requests), setup(page_size=page_size))
    assert [record.cached_tokens for record in result.requests] == [0, 32, 0]
    assert latencies(result) == close((5.8, None, 5.8), (1.8, None, 1.8), (5.0, None, 5.0))
    assert result.statistics.hit_rate == pytest.approx(32 / 128)


def test_a_whole_prompt_again() -> None:
    """The last token is always computed, and with it the rest of its page."""
    same = {"blocks": (7, 8, 9), "block_size": 16}
    result = simulate(trace(ask(0, 48, 1, **same), ask(10, 48, 1, **same)), setup(page_size=16))
    assert [record.cached_tokens for record in result.requests] == [0, 32]
    assert latencies(result)[1] == close((1 + 1.6, None, 2.6))[0]


def test_waiting_for_a_row() -> None:
    result = simulate(trace(ask(0, 10, 3), ask(1, 10, 1)), setup(max_rows=1, depth=0))
    assert [record.admitted for record in result.requests] == pytest.approx([0.0, 4.02])
    assert latencies(result)[1] == close((5.02, None, 5.02))[0]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_preemption(depth: int) -> None:
    """Six pages of four tokens; two requests need four each, and are let in with three."""
    server = setup(pages=6, page_size=4, reserve="prompt", depth=depth, low_watermark=0.0, high_watermark=0.0)
    result = simulate(trace(ask(0, 8, 8), ask(0.5, 8, 8)), server)
    assert result.statistics.preemptions == 1
    assert [record.output_tokens for record in result.requests] == [8, 8]
    first, second = result.requests
    assert second.finished is not None
    assert first.finished is not None
    assert second.finished > first.finished
    # Each token but the first has one gap, however often it was computed, and all gaps together are the time they took.
    assert len(result.gaps) == 2 * 7
    assert result.gaps.min() > 0.0
    spent = sum(record.e2e - record.ttft for record in result.requests if record.e2e is not None and record.ttft is not None)
    assert result.gaps.sum() == pytest.approx(spent)
    if depth == 0:
        # Steps with two prompts' tokens, with both rows, without the second, and the second's prompt again: three pages
        # are needed for the twelve tokens it had, of which its first is still cached.
        assert latencies(result)[0] == close((1.8, 1.01 + (0.8 + 0.01 * 3) / 7, 1.8 + 7 * 1.01 + 0.83))[0]


def test_arrivals_count_from_the_first() -> None:
    shifted = simulate(trace(ask(50, 10, 3), ask(52.5, 10, 1)), setup())
    plain = simulate(trace(ask(0, 10, 3), ask(2.5, 10, 1)), setup())
    assert [record.arrived for record in shifted.requests] == [0.0, 2.5]
    assert latencies(shifted) == close(*latencies(plain))
    assert shifted.seconds == pytest.approx(plain.seconds)


def test_no_requests() -> None:
    result = simulate(trace(), setup())
    assert (result.requests, result.seconds, len(result.gaps), len(result.timeline.at)) == ([], 0.0, 0, 0)


# What callers say


class Noting:
    """Arrival order; notes what policies are told of each request."""

    def __init__(self) -> None:
        self.limits: dict[int, int] = {}
        self.hints: dict[int, Any] = {}
        self.facts: dict[int, tuple[Any, ...]] = {}

    def on_submit(self, request: RequestView) -> None:
        self.limits[request.number] = request.max_tokens
        self.hints[request.number] = request.hints.get("output_tokens")
        self.facts[request.number] = (
            request.tenant, request.priority, request.ttft_target, request.tpot_target, request.program_id,
            None if request.deadline is None else request.deadline - request.arrived_at, request.hints.get("colour"),
        )  # fmt: skip

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        return waiting


@pytest.mark.parametrize(
    ("max_tokens", "limits"), [("exact", [3, 9, 9]), ("longest", [5, 9, 9]), (7, [7, 9, 9]), (1, [3, 9, 9])], ids=str
)
def test_output_limits(max_tokens: Any, limits: list[int]) -> None:
    """What the trace says goes first; a number never cuts an answer short."""
    policy = Noting()
    requests = [ask(0, 10, 3), ask(0.1, 10, 5, max_tokens=9), ask(0.2, 10, 4, max_tokens=9)]
    result = simulate(trace(*requests), setup(max_tokens=max_tokens, policy=policy))
    assert list(policy.limits.values()) == limits
    assert [record.output_tokens for record in result.requests] == [3, 5, 4]
    exact = [limit == request.output_tokens for limit, request in zip(limits, requests, strict=True)]
    assert result.statistics.finished["length"] == sum(exact)
    assert result.statistics.finished["stop"] == 3 - sum(exact)


def test_hints() -> None:
    """Right, off by a random factor that depends on the seed alone, or none; what the trace says of them stays."""

    def hints(error: float | None, seed: int = 0) -> list[Any]:
        policy = Noting()
        requests = [ask(0, 10, output, hints={"colour": "red"}) for output in range(20, 60)]
        simulate(trace(*requests), setup(hint_error=error, seed=seed, policy=policy, max_rows=64, pages=512))
        assert {fact[-1] for fact in policy.facts.values()} == {"red"}
        return list(policy.hints.values())

    assert hints(None) == [None] * 40
    assert hints(0.0) == list(range(20, 60))
    wrong = hints(0.5)
    factors = np.log(np.array(wrong) / np.arange(20, 60))
    assert 0.3 < factors.std() < 0.7
    assert abs(factors.mean()) < 0.3
    assert hints(0.5) == wrong != hints(0.5, seed=1)


def test_options_reach_the_policies() -> None:
    policy = Noting()
    about = {"tenant": "a", "priority": 3, "ttft_target": 1.5, "tpot_target": 0.5, "program_id": "p", "deadline": 40.0}
    simulate(trace(ask(0, 10, 1, **about, hints={"colour": "blue"}), ask(1, 10, 1)), setup(policy=policy))
    assert list(policy.facts.values()) == [
        ("a", 3, 1.5, 0.5, "p", pytest.approx(40.0), "blue"),
        ("", 0, None, None, None, None, None),
    ]


# Refusals


class Bouncer:
    """Lets no prompt of 13 tokens in."""

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        return "unlucky" if request.prompt_tokens == 13 else None


def test_refused_requests_are_written_down() -> None:
    """By the admission policy, for their size, and because their deadline passed while they waited."""
    requests = [
        ask(0, 10, 5, tenant="a"),
        ask(0.1, 13, 5, tenant="b"),
        ask(0.2, 200, 1, tenant="b"),
        ask(0.3, 90, 90, tenant="b"),
        ask(0.4, 10, 5, tenant="a", deadline=3.0),
        ask(0.5, 10, 2, tenant="c", deadline=60.0),
    ]
    server = setup(max_rows=1, pages=10, max_model_len=190, depth=0, admission_policy=Bouncer())
    ended: list[int] = []
    result = simulate(trace(*requests), server, progress=ended.append)
    assert [record.error for record in result.requests] == [
        "", "AdmissionRejectedError", "PromptTooLongError", "RequestTooLargeError", "DeadlineExpiredError", "",
    ]  # fmt: skip
    for record in result.requests:
        assert (record.finished is None) == bool(record.error)
        assert (record.first_token is None) == bool(record.error)
    assert [record.output_tokens for record in result.requests] == [5, 0, 0, 0, 0, 2]
    assert ended == [1, 2, 3, 4, 5, 6]
    # The last one, who came after all those, is still taken for himself: by his tenant, and by his latencies.
    assert latencies(dataclasses.replace(result, requests=result.requests[-1:])) == close((6.04 + 2.0 - 0.5, 1.01, 8.55))
    line = result.timeline
    assert {tenant: served[-1] for tenant, served in line.service.items()} == {"a": 15, "b": 0, "c": 12}
    assert line.backlog["b"].max() == 0
    assert line.backlog["c"].max() == 1
    assert {tenant: int(waiting[-1]) for tenant, waiting in line.backlog.items()} == {"a": 0, "b": 0, "c": 0}


# Timelines


def test_service_adds_up_to_tokens() -> None:
    """Computed prompt tokens and delivered output tokens, no matter how many steps were wasted behind an end."""
    requests = [ask(0.7 * index, 5 + index, 1 + index % 7, tenant="abc"[index % 3]) for index in range(30)]
    last = ask(1000, 5, 1, tenant="d")  # its only step takes the last sample
    result = simulate(trace(*requests, last), setup(max_tokens=40, token_budget=16))
    assert result.statistics.dropped_tokens > 0
    for tenant in "abcd":
        tokens = sum(r.prompt_tokens + r.output_tokens for r in (*requests, last) if r.tenant == tenant)
        assert result.timeline.service[tenant][-1] == tokens
    assert len(result.gaps) == sum(request.output_tokens - 1 for request in requests)


def test_timeline() -> None:
    """One row; at 0 one request runs and, from the next step on, another waits. Pages are counted by who holds them."""
    server = setup(max_rows=1, depth=0, low_watermark=0.0, high_watermark=0.0)
    result = simulate(trace(ask(0, 32, 3, tenant="a"), ask(0.5, 32, 1, tenant="b")), server)
    line = result.timeline
    assert line.at == pytest.approx([0.0, 4.2, 5.21, 6.22])
    assert line.running.tolist() == [1, 1, 1, 1]
    assert line.waiting.tolist() == [0, 1, 1, 0]
    assert line.used_pages.tolist() == [3, 3, 3, 2]
    assert line.cached_pages.tolist() == [0, 0, 0, 2]
    assert line.backlog["b"].tolist() == [0, 1, 1, 0]
    assert line.service["a"].tolist() == [33, 34, 35, 35]
    assert line.service["b"].tolist() == [0, 0, 0, 33]


def test_pages_that_a_step_may_still_name_are_nobodys() -> None:
    """Each reserves four. What the first gives back is free when the step has completed that was in flight then."""
    server = setup(depth=2, max_tokens=50, low_watermark=0.0, high_watermark=0.0)
    line = simulate(trace(ask(0, 10, 2), ask(2.5, 10, 1)), server).timeline
    assert line.at == pytest.approx([0.0, 2.0, 3.01, 4.02, 6.02])
    assert line.used_pages.tolist() == [4, 4, 4, 4, 4]


def test_long_runs_are_sampled_half_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "SAMPLES", 8)
    result = simulate(trace(ask(0, 10, 90)), setup())
    at = result.timeline.at
    assert 8 <= len(at) < 16
    gaps = [later - earlier for earlier, later in pairwise(at.tolist())]
    assert min(gaps) >= 4.0, "steps take 1.01 s: one in four is sampled in the end, at least"
    assert max(gaps) < 2.5 * min(gaps), "the beginning is as dense as the end"
    assert (at[0], result.seconds - at[-1]) == (0.0, pytest.approx(5.0, abs=5.0))
    for column in (result.timeline.running, result.timeline.waiting, result.timeline.used_pages, result.timeline.service[""]):
        assert len(column) == len(at)


# Nothing is left to chance

SETS: list[dict[str, Any]] = [
    {"policy": "lpm", "eviction_policy": "slru", "budget_policy": "slo", "reserve": "expected"},
    {"policy": {"name": "random", "seed": 3}, "eviction_policy": "lfu", "preemption_policy": "cheapest", "reserve": "prompt"},
    {"policy": "srpt", "budget_policy": "decode-first", "admission_policy": "deadline", "reserve": "expected"},
]


@pytest.mark.parametrize("policies", SETS, ids=lambda policies: str(policies["policy"]))
def test_the_same_again(policies: dict[str, Any]) -> None:
    """Real prompts, policies that decide a lot, memory for a few requests: two runs are equal to the last bit."""
    real = limited(read_trace(DATA / "mooncake_conversation.jsonl"), count=16)
    real = with_targets(real, ttft=60.0, tpot=0.1)
    cost = LinearCost(5e-3, 1e-4, 1e-7, 1e-4, 1e-9)
    server = Setup(cost, pages=500, page_size=64, max_rows=4, options={"token_budget": 1024, **policies}, hint_error=0.3)
    one, other = (simulate(real, server, "name") for _ in range(2))
    assert one.requests == other.requests
    assert one.statistics == other.statistics
    assert not any(one.statistics.policy_faults.values())
    assert np.array_equal(one.gaps, other.gaps)
    for field in dataclasses.fields(one.timeline):
        mine, theirs = getattr(one.timeline, field.name), getattr(other.timeline, field.name)
        if isinstance(mine, dict):
            assert list(mine) == list(theirs)
            assert all(np.array_equal(mine[tenant], theirs[tenant]) for tenant in mine)
        else:
            assert np.array_equal(mine, theirs)
    assert one.seconds == other.seconds
    assert sum(record.finished is not None for record in one.requests) > len(real.requests) / 2
    assert one.statistics.evicted_pages > 0


class Slow:
    """A cost model of steps that take longer than any watchdog likes."""

    def seconds(self, work: StepWork) -> float:
        return 3600.0


def test_slow_steps_alarm_nobody() -> None:
    result = simulate(trace(ask(0, 10, 3)), setup(Slow()))
    assert latencies(result) == close((3600.0, 3600.0, 3 * 3600.0))
    assert result.statistics.slow_steps == result.statistics.stuck_warnings == 0


# Mistakes


def test_an_impossible_setup_is_refused_as_it_is() -> None:
    """No group around it, nothing half done."""
    with pytest.raises(PolicyNotFoundError, match="fcsf"):
        simulate(trace(ask(0, 10, 3)), setup(policy="fcsf"))
    with pytest.raises(ConfigError, match="token_budgt"):
        simulate(trace(ask(0, 10, 3)), setup(token_budgt=5))


def test_not_within_an_event_loop() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="Already running"):
            simulate(trace(ask(0, 10, 3)), setup())

    anyio.run(main)


@pytest.mark.parametrize(
    ("name", "instead"), [("max_rows", r"Setup\(max_rows=…\).*--rows"), ("page_size", r"Setup\(page_size=…\).*--page-size")]
)
def test_what_the_device_has_is_no_option_of_the_engine(name: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is no option of the engine here; use {instead}"):
        Setup(LinearCost(1e-3, 0.0, 0.0, 0.0), options={name: 8})
