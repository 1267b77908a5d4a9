"""The compute thread: order, errors, loss of the device, closing, idleness."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from asyncsched.contract import EMPTY_INTS, StepPlan, StepResult
from asyncsched.errors import EngineClosedError
from asyncsched.gpu.compute_thread import ComputeThread, DeviceLostError


def succeed(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, EMPTY_INTS, EMPTY_INTS)


class Harness:
    """A compute thread whose results end up in a queue."""

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self.results: SimpleQueue[StepResult] = SimpleQueue()
        self.thread = ComputeThread(run, self.results.put, "compute-test")

    def get(self, count: int) -> list[StepResult]:
        return [self.results.get(timeout=30) for _ in range(count)]


def test_plans_run_in_order_on_one_named_daemon_thread() -> None:
    seen: list[tuple[int, str, bool]] = []

    def run(plan: StepPlan) -> StepResult:
        thread = threading.current_thread()
        seen.append((plan.step, thread.name, thread.daemon))
        return succeed(plan)

    harness = Harness(run)
    for step in range(1, 101):
        harness.thread.submit(StepPlan(step))
    assert [result.step for result in harness.get(100)] == list(range(1, 101))
    assert seen == [(step, "compute-test", True) for step in range(1, 101)]
    harness.thread.close()


def test_a_raising_step_is_answered_and_the_next_ones_run() -> None:
    def run(plan: StepPlan) -> StepResult:
        if plan.step == 2:
            raise ZeroDivisionError("step two")
        return succeed(plan)

    harness = Harness(run)
    before = time.monotonic()
    for step in (1, 2, 3):
        harness.thread.submit(StepPlan(step))
    first, second, third = harness.get(3)
    harness.thread.close()
    assert first.error is None
    assert third.error is None
    assert isinstance(second.error, ZeroDivisionError)
    assert not second.fatal
    assert second.step == 2
    assert second.rows.size == second.tokens.size == 0
    assert before <= second.launched_at <= second.completed_at <= time.monotonic()


def test_even_an_exit_is_an_answer() -> None:
    def run(plan: StepPlan) -> StepResult:
        raise SystemExit(3)

    harness = Harness(run)
    harness.thread.submit(StepPlan(1))
    harness.thread.submit(StepPlan(2))
    assert [type(result.error) for result in harness.get(2)] == [SystemExit, SystemExit]
    harness.thread.close()


def test_a_lost_device_answers_every_later_plan_at_once() -> None:
    calls: list[int] = []
    lost = DeviceLostError("fell off the bus")

    def run(plan: StepPlan) -> StepResult:
        calls.append(plan.step)
        if plan.step == 2:
            raise lost
        return succeed(plan)

    harness = Harness(run)
    for step in range(1, 6):
        harness.thread.submit(StepPlan(step))
    results = harness.get(5)
    assert calls == [1, 2]
    assert [(result.step, result.fatal) for result in results] == [(1, False), (2, True), (3, True), (4, True), (5, True)]
    assert all(result.error is lost for result in results[1:])
    harness.thread.close()


def test_any_exception_can_say_that_the_device_is_lost() -> None:
    class DriverError(RuntimeError):
        device_lost = True

    def run(plan: StepPlan) -> StepResult:
        raise DriverError

    harness = Harness(run)
    harness.thread.submit(StepPlan(1))
    assert harness.get(1)[0].fatal
    harness.thread.close()


def test_close_finishes_the_running_plan_and_drops_the_queued_ones() -> None:
    submitted = threading.Event()
    calls: list[int] = []

    def run(plan: StepPlan) -> StepResult:
        calls.append(plan.step)
        assert submitted.wait(30)
        harness.thread.close()  # on the compute thread itself it only marks the end
        return succeed(plan)

    harness = Harness(run)
    for step in (1, 2, 3):
        harness.thread.submit(StepPlan(step))
    submitted.set()
    results = harness.get(3)
    harness.thread.close()
    harness.thread.close()
    assert calls == [1]
    assert [type(result.error) for result in results] == [type(None), EngineClosedError, EngineClosedError]
    assert not any(result.fatal for result in results)
    assert harness.results.empty()
    assert not harness.thread._thread.is_alive()
    with pytest.raises(EngineClosedError, match="step 4"):
        harness.thread.submit(StepPlan(4))


def test_close_from_the_delivery_does_not_wait_for_itself() -> None:
    closed = threading.Event()

    def deliver(result: StepResult) -> None:
        thread.close()
        closed.set()

    thread = ComputeThread(succeed, deliver, "compute-test")
    thread.submit(StepPlan(1))
    assert closed.wait(30)
    thread.close()


def test_a_broken_receiver_does_not_stop_the_answers() -> None:
    results: SimpleQueue[int] = SimpleQueue()

    def deliver(result: StepResult) -> None:
        results.put(result.step)
        if result.step == 1:
            raise RuntimeError("the loop is closed")

    thread = ComputeThread(succeed, deliver, "compute-test")
    thread.submit(StepPlan(1))
    thread.submit(StepPlan(2))
    assert [results.get(timeout=30), results.get(timeout=30)] == [1, 2]
    thread.close()


def test_an_idle_thread_keeps_no_result_and_uses_no_cpu() -> None:
    class Mark(Exception):
        pass

    marks: list[weakref.ref[Mark]] = []
    delivered: SimpleQueue[int] = SimpleQueue()

    def run(plan: StepPlan) -> StepResult:
        if plan.step == 3:
            return succeed(plan)
        error = Mark()
        marks.append(weakref.ref(error))
        raise error

    thread = ComputeThread(run, lambda result: delivered.put(result.step), "compute-test")
    for step in (1, 2, 3):
        thread.submit(StepPlan(step))
    assert [delivered.get(timeout=30) for _ in range(3)] == [1, 2, 3]
    gc.collect()
    assert [mark() for mark in marks] == [None, None]
    idle = time.pthread_getcpuclockid(thread._thread.ident or 0)
    idle_before, busy_before = time.clock_gettime(idle), time.thread_time()
    while time.thread_time() - busy_before < 0.05:
        sum(range(10_000))
    assert time.clock_gettime(idle) - idle_before < 0.005
    thread.close()
