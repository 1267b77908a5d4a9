"""A device in threads: a GPU's timing without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread, current_thread

import numpy as np

from ..contract import EMPTY_INTS, ExecutorLimits, IntArray, StepPlan, StepResult
from ..errors import ConfigError, EngineClosedError
from ..logs import get_logger
from .simulated_executor import InstantExecutor, Latency

FIRST_TOKEN, TOKENS = 32, 95
"""The printable ASCII characters, which are bytes of their own in most vocabularies."""


@dataclass(frozen=True, slots=True)
class DeviceTimeline:
    """When a device that runs one step after the other was busy, and when it had nothing to run.

    Idle is what lies between the end of one step and the start of the next. The time before the first
    step and after the last is not counted, so that ``busy + idle`` is ``ended - began``. Whether a gap
    could have been filled the device cannot know: measure while there is work.

    Attributes:
        steps: Steps so far.
        busy: Seconds in steps.
        idle: Seconds between steps.
        began: When the first step started, seconds on the caller's clock.
        started: When the last step starts; may lie ahead.
        ended: When the last step ends; may lie ahead.
    """

    steps: int = 0
    busy: float = 0.0
    idle: float = 0.0
    began: float = 0.0
    started: float = 0.0
    ended: float = 0.0

    def then(self, launched: float, seconds: float) -> DeviceTimeline:
        """After one more step, launched at ``launched``: it starts when the one before has ended, at the earliest."""
        if not self.steps:
            return DeviceTimeline(1, seconds, 0.0, launched, launched, launched + seconds)
        started = max(launched, self.ended)
        idle = self.idle + (started - self.ended)
        return DeviceTimeline(self.steps + 1, self.busy + seconds, idle, self.began, started, started + seconds)

    def since(self, earlier: DeviceTimeline) -> DeviceTimeline:
        """Only what came after ``earlier``, a former state of this timeline: it begins where that ended."""
        if not earlier.steps:
            return self
        steps, busy, idle = self.steps - earlier.steps, self.busy - earlier.busy, self.idle - earlier.idle
        return DeviceTimeline(steps, busy, idle, earlier.ended, self.started, self.ended)

    @property
    def idle_share(self) -> float:
        """Idle time as a share of all time (0 … 1)."""
        return self.idle / (self.busy + self.idle) if self.busy + self.idle else 0.0


class ThreadedExecutor:
    """Behaves in time like a GPU with one stream; the answers are printable characters.

    A launch thread takes the plans and puts them on the device's timeline, where a step starts when it
    was launched and the one before has ended, whichever is later. A completion thread sleeps until a
    step's end and delivers its result. Both compete for the interpreter lock with the event loop, as
    those of a real device do; while there is nothing to do they are blocked and use no CPU.

    The token of row ``r`` in step ``s`` is ``32 + (r + s) % 95``: one printable ASCII character, as a
    token of ``ByteTokenizer`` or any vocabulary whose first 128 ids are ASCII. Plans are not checked:
    that is ``SimulatedExecutor``'s.

    Args:
        limits: Capacities.
        latency: Seconds a step takes on the device, a number or a function of the plan (called on the
            launch thread). If it raises, the step fails with that error.

    Raises:
        ConfigError: the vocabulary has no 127 tokens.
    """

    def __init__(self, limits: ExecutorLimits, latency: float | Latency) -> None:
        if limits.vocab_size < FIRST_TOKEN + TOKENS:
            raise ConfigError(f"vocab_size={limits.vocab_size} does not hold the printable characters; use at least 127")
        self._limits = limits
        self._latency: Latency = latency if callable(latency) else lambda plan: latency
        self._rows = InstantExecutor(limits)
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._launched: SimpleQueue[StepResult | None] = SimpleQueue()
        self._timeline = DeviceTimeline()
        self._closing = False
        self._threads: list[Thread] = []

    @property
    def limits(self) -> ExecutorLimits:
        """Capacities."""
        return self._limits

    @property
    def timeline(self) -> DeviceTimeline:
        """Everything launched so far, in ``time.monotonic`` seconds. Any thread."""
        return self._timeline

    def start(self, deliver: Callable[[StepResult], None]) -> None:
        """Begin to accept plans; ``deliver`` is called on the completion thread, once per plan, in order."""
        self._threads = [
            Thread(target=self._launch, name="simulated-launch", daemon=True),
            Thread(target=self._complete, args=(deliver,), name="simulated-completion", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, plan: StepPlan) -> None:
        """Queue one plan and return at once.

        Raises:
            EngineClosedError: ``close`` was called before.
        """
        if self._closing:
            raise EngineClosedError(f"step {plan.step} was submitted after the executor was closed")
        self._plans.put(plan)

    def close(self) -> None:
        """Let the steps on the device end, answer the queued ones with ``EngineClosedError``, join the threads.

        Idempotent. Called on one of those threads it only marks the end.
        """
        if not self._closing:
            self._closing = True
            self._plans.put(None)
        if current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def _launch(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._launched.put(self._answer(plan))
            del plan  # an idle thread keeps nothing alive
        self._launched.put(None)

    def _answer(self, plan: StepPlan) -> StepResult:
        """Put one plan on the device; the result is due when the timeline ends. A step that fails takes no time."""
        launched, seconds = time.monotonic(), 0.0
        rows, error = EMPTY_INTS, None
        try:
            if self._closing:
                raise EngineClosedError(f"step {plan.step} was dropped: the executor is closing")
            computed = self._rows.answer(plan).rows  # a failed step has applied its deltas, too
            seconds = self._latency(plan)
            rows = computed
        except Exception as exc:
            error = exc
        self._timeline = timeline = self._timeline.then(launched, seconds)
        tokens: IntArray = FIRST_TOKEN + (rows + np.int32(plan.step % TOKENS)) % np.int32(TOKENS)
        return StepResult(plan.step, rows, tokens, error=error, launched_at=timeline.started, completed_at=timeline.ended)

    def _complete(self, deliver: Callable[[StepResult], None]) -> None:
        while (result := self._launched.get()) is not None:
            wait = result.completed_at - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            step = result.step
            try:
                deliver(result)
            except Exception:
                # The receiver is gone (its event loop was closed, say); the steps behind this one still need an answer.
                get_logger("simulated device").exception("step result could not be delivered", step=step)
            del result
