"""The device in threads: its timeline's arithmetic, the order and the stamps of its answers, errors, closing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched import Backend, Engine
from asyncsched.contract import EMPTY_INTS, ExecutorLimits, PrefillChunk, StepPlan, StepResult
from asyncsched.errors import ConfigError, EngineClosedError
from asyncsched.testing import ByteTokenizer, DeviceTimeline, ThreadedExecutor, check_invariants

LIMITS = ExecutorLimits(max_rows=8, pages=64, page_size=4, max_model_len=128, vocab_size=ByteTokenizer().vocab_size)


def arrival(step: int, *rows: int, decode: bool = False, leaves: Sequence[int] = ()) -> StepPlan:
    """A plan that samples a first token for ``rows``."""
    chunks = tuple(PrefillChunk(row, 0, EMPTY_INTS, True) for row in rows)
    return StepPlan(step, leaves=tuple(leaves), prefill=chunks, decode=decode)


def printable(step: int, *rows: int) -> list[int]:
    """The tokens the class promises."""
    return [32 + (row + step) % 95 for row in rows]


class Harness:
    """A started executor whose results end up in a queue."""

    def __init__(self, latency: float | Callable[[StepPlan], float] = 0.0) -> None:
        self.results: SimpleQueue[StepResult] = SimpleQueue()
        self.executor = ThreadedExecutor(LIMITS, latency)
        self.executor.start(self.results.put)

    def run(self, *plans: StepPlan) -> list[StepResult]:
        """Submit all, then take as many results."""
        for plan in plans:
            self.executor.submit(plan)
        return [self.results.get(timeout=30) for _ in plans]


# Timeline


def test_a_new_timeline_is_empty() -> None:
    empty = DeviceTimeline()
    assert (empty.steps, empty.busy, empty.idle, empty.idle_share) == (0, 0.0, 0.0, 0.0)


def test_the_time_before_the_first_step_is_not_idle() -> None:
    assert DeviceTimeline().then(100.0, 4.0) == DeviceTimeline(1, 4.0, 0.0, began=100.0, started=100.0, ended=104.0)


def test_a_step_launched_during_another_follows_without_a_gap() -> None:
    line = DeviceTimeline().then(100.0, 4.0).then(101.0, 2.0).then(101.5, 1.0)
    assert line == DeviceTimeline(3, 7.0, 0.0, began=100.0, started=106.0, ended=107.0)


def test_a_step_launched_late_leaves_a_gap() -> None:
    line = DeviceTimeline().then(100.0, 4.0).then(107.0, 2.0)
    assert line == DeviceTimeline(2, 6.0, 3.0, began=100.0, started=107.0, ended=109.0)
    assert line.idle_share == 3 / 9


def test_a_difference_counts_only_what_came_between() -> None:
    before = DeviceTimeline().then(0.0, 4.0).then(6.0, 2.0)
    after = before.then(7.0, 2.0).then(13.0, 1.0)
    assert after.since(before) == DeviceTimeline(2, 3.0, 3.0, began=8.0, started=13.0, ended=14.0)
    assert after.since(DeviceTimeline()) == after
    assert after.since(after).idle_share == 0.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=30), st.data())
def test_busy_and_idle_add_up(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whole seconds, so that sums are exact; launches may be any time after the one before."""
    now, lines = 0, [DeviceTimeline()]
    for pause, seconds in steps:
        now += pause
        lines.append(lines[-1].then(now, seconds))
        assert lines[-1].started >= max(now, lines[-2].ended if lines[-2].steps else 0)
        assert lines[-1].ended == lines[-1].started + seconds
    last = lines[-1]
    assert last.busy == sum(seconds for _, seconds in steps)
    assert last.busy + last.idle == last.ended - last.began
    part = last.since(lines[data.draw(st.integers(0, len(steps)))])
    assert part.busy + part.idle == part.ended - part.began


# Answers


def test_every_active_row_gets_a_printable_token_in_plan_order() -> None:
    harness = Harness()
    first, second, third, fourth = harness.run(
        arrival(1, 5, 2), arrival(2, 0, decode=True), StepPlan(3, decode=True), StepPlan(4, leaves=(2,), decode=True)
    )
    harness.executor.close()

    def answer(result: StepResult) -> tuple[list[int], list[int]]:
        return result.rows.tolist(), result.tokens.tolist()

    assert answer(first) == ([5, 2], printable(1, 5, 2))
    assert answer(second) == ([2, 5, 0], printable(2, 2, 5, 0))
    assert answer(third) == ([0, 2, 5], printable(3, 0, 2, 5))
    assert answer(fourth) == ([0, 5], printable(4, 0, 5))
    assert all(chr(token).isprintable() for result in (first, second, third, fourth) for token in result.tokens)
    assert first.tokens.dtype == first.rows.dtype == np.int32


def test_answers_come_in_order_not_before_their_end_and_carry_the_timeline() -> None:
    delivered: list[tuple[StepResult, float, str]] = []
    done = threading.Event()

    def deliver(result: StepResult) -> None:
        delivered.append((result, time.monotonic(), threading.current_thread().name))
        if result.step == 20:
            done.set()

    executor = ThreadedExecutor(LIMITS, lambda plan: plan.step % 3 / 1024)
    assert executor.limits is LIMITS
    executor.start(deliver)
    begun = time.monotonic()
    for step in range(1, 21):
        executor.submit(StepPlan(step))
    assert done.wait(30)
    executor.close()
    results = [result for result, _, _ in delivered]
    assert [result.step for result in results] == list(range(1, 21))
    assert {name for _, _, name in delivered} == {"simulated-completion"}
    assert begun <= results[0].launched_at
    for result, at, _ in delivered:
        assert result.completed_at == result.launched_at + result.step % 3 / 1024
        assert at >= result.completed_at
    gaps = [after.launched_at - before.completed_at for before, after in pairwise(results)]
    assert min(gaps) >= 0.0
    line = executor.timeline
    assert (line.steps, line.began, line.ended) == (20, results[0].launched_at, results[-1].completed_at)
    assert line.idle == sum(gaps)
    assert line.busy == sum(step % 3 / 1024 for step in range(1, 21))


def test_a_vocabulary_without_the_printable_characters_is_refused() -> None:
    limits = ExecutorLimits(max_rows=1, pages=8, page_size=4, max_model_len=16, vocab_size=126)
    with pytest.raises(ConfigError, match="at least 127"):
        ThreadedExecutor(limits, 0.0)


async def test_an_engine_streams_its_text() -> None:
    executor, tokenizer = ThreadedExecutor(LIMITS, 0.0), ByteTokenizer()
    texts: dict[int, str] = {}

    async def read(index: int) -> None:
        async with engine.stream(f"prompt {index}", max_tokens=40) as stream:
            async for chunk in stream:
                assert chunk.text == tokenizer.decode(chunk.token_ids)
                texts[index] = texts.get(index, "") + chunk.text

    async with Engine(backend=Backend(executor, tokenizer, "simulated"), depth=2) as engine:
        async with anyio.create_task_group() as readers:
            for index in range(4):
                readers.start_soon(read, index)
        check_invariants(engine, idle=True)
    assert sorted(texts) == [0, 1, 2, 3]
    for text in texts.values():  # each row counts on by one, whatever the others do
        assert len(text) == 40
        assert all((ord(after) - ord(before)) % 95 == 1 for before, after in pairwise(text))


# Errors


def test_a_step_that_raises_is_answered_and_its_deltas_are_kept() -> None:
    def latency(plan: StepPlan) -> float:
        if plan.step == 2:
            raise ZeroDivisionError("step two")
        return 0.0

    harness = Harness(latency)
    first, second, third = harness.run(arrival(1, 3, 4), StepPlan(2, leaves=(4,), decode=True), StepPlan(3, decode=True))
    harness.executor.close()
    assert first.error is third.error is None
    assert isinstance(second.error, ZeroDivisionError)
    assert not second.fatal
    assert second.rows.size == second.tokens.size == 0
    assert first.completed_at <= second.launched_at == second.completed_at <= third.launched_at
    assert third.rows.tolist() == [3]


def test_a_broken_receiver_does_not_stop_the_answers() -> None:
    results: SimpleQueue[int] = SimpleQueue()

    def deliver(result: StepResult) -> None:
        results.put(result.step)
        if result.step == 1:
            raise RuntimeError("the loop is closed")

    executor = ThreadedExecutor(LIMITS, 0.0)
    executor.start(deliver)
    executor.submit(StepPlan(1))
    executor.submit(StepPlan(2))
    assert [results.get(timeout=30), results.get(timeout=30)] == [1, 2]
    executor.close()


# Closing


def test_close_finishes_the_step_on_the_device_and_drops_the_queued_ones() -> None:
    submitted = threading.Event()

    def latency(plan: StepPlan) -> float:
        assert submitted.wait(30)
        harness.executor.close()  # on the launch thread itself it only marks the end
        return 0.0

    harness = Harness(latency)
    for step in (1, 2, 3):
        harness.executor.submit(StepPlan(step))
    submitted.set()
    results = [harness.results.get(timeout=30) for _ in range(3)]
    harness.executor.close()
    harness.executor.close()
    assert [result.step for result in results] == [1, 2, 3]
    assert [type(result.error) for result in results] == [type(None), EngineClosedError, EngineClosedError]
    assert not any(result.fatal for result in results)
    assert harness.results.empty()
    assert not any(thread.is_alive() for thread in harness.executor._threads)
    with pytest.raises(EngineClosedError, match="step 4"):
        harness.executor.submit(StepPlan(4))


def test_one_that_was_never_started_can_be_closed() -> None:
    executor = ThreadedExecutor(LIMITS, 0.0)
    executor.close()
    with pytest.raises(EngineClosedError):
        executor.submit(StepPlan(1))


def test_idle_threads_keep_no_result_and_use_no_cpu() -> None:
    class Mark(Exception):
        pass

    marks: list[weakref.ref[Mark]] = []
    delivered: SimpleQueue[int] = SimpleQueue()

    def latency(plan: StepPlan) -> float:
        error = Mark()
        marks.append(weakref.ref(error))
        raise error

    executor = ThreadedExecutor(LIMITS, latency)
    executor.start(lambda result: delivered.put(result.step))
    for step in (1, 2):
        executor.submit(StepPlan(step))
    assert [delivered.get(timeout=30) for _ in range(2)] == [1, 2]
    clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in executor._threads]
    before = [time.clock_gettime(clock) for clock in clocks]
    working = time.thread_time()
    while time.thread_time() - working < 0.05:
        sum(range(10_000))
    assert all(time.clock_gettime(clock) - start < 0.005 for clock, start in zip(clocks, before, strict=True))
    gc.collect()
    assert [mark() for mark in marks] == [None, None]
    executor.close()
