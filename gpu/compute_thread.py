"""The threads beside a device: one launches its steps, another waits for those that run on by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Final, Generic, Protocol, TypeVar

from ..contract import EMPTY_INTS, StepPlan, StepResult
from ..errors import EngineClosedError, EngineError
from ..logs import get_logger

_STOP: Final = None


class Pending(Protocol):
    """A step that was launched and runs on by itself."""

    @property
    def step(self) -> int:
        """The plan's number."""
        ...

    def finish(self) -> StepResult:
        """Wait for its end and read what it sampled. Completion thread only."""
        ...


Answer = TypeVar("Answer", bound=StepResult | Pending)


class DeviceLostError(EngineError):
    """The device cannot run another step. A runner raises this, or anything with ``device_lost = True``."""

    device_lost: Final = True


class ComputeThread(Generic[Answer]):
    """Runs plans one after the other on a daemon thread of its own.

    A plan whose ``run`` raises is answered with a result that carries the exception. Once ``run``
    has raised an exception with a true ``device_lost`` attribute, that plan and every later one are
    answered with it at once, ``fatal`` set. While nothing is queued the thread is blocked and uses
    no CPU. It knows nothing of the device, so that every executor can use it.

    Args:
        run: Computes or launches one plan. Called on the compute thread only.
        deliver: Takes each answer, in plan order, once per plan: what ``run`` returned, or a failure.
            Called on the compute thread; must not block.
        name: The thread's name.
    """

    def __init__(self, run: Callable[[StepPlan], Answer], deliver: Callable[[Answer | StepResult], None], name: str) -> None:
        self._run = run
        self._deliver = deliver
        self._queue: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._closing = False
        self._lost: BaseException | None = None
        self._thread = Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        """Queue one plan and return at once. Loop thread only.

        Raises:
            EngineClosedError: ``close`` was called before.
        """
        if self._closing:
            raise EngineClosedError(f"step {plan.step} was submitted after the executor was closed")
        self._queue.put(plan)

    def close(self) -> None:
        """Finish the running plan, answer the queued ones with ``EngineClosedError``, join the thread.

        Idempotent. Blocks for as long as one step takes, except on the compute thread itself, where
        it only marks the end.
        """
        if not self._closing:
            self._closing = True
            self._queue.put(_STOP)
        if current_thread() is not self._thread:
            self._thread.join()

    def lose(self, error: BaseException) -> None:
        """The device is lost: answer every plan from now on with this error. Any thread."""
        self._lost = error

    def _loop(self) -> None:
        while (plan := self._queue.get()) is not _STOP:
            step = plan.step
            answer = self._answer(plan)
            del plan
            _pass_on(self._deliver, answer, step)
            del answer  # an idle thread must not keep the last step's arrays (or its traceback) alive

    def _answer(self, plan: StepPlan) -> Answer | StepResult:
        if self._lost is not None:
            return _failure(plan.step, self._lost, fatal=True)
        if self._closing:
            return _failure(plan.step, EngineClosedError(f"step {plan.step} was dropped: the executor is closing"))
        started = time.monotonic()
        try:
            return self._run(plan)
        except BaseException as error:  # whatever it is, the plan needs an answer
            if getattr(error, "device_lost", False):
                self._lost = error
            return _failure(plan.step, error, fatal=self._lost is not None, started=started)


class CompletionThread:
    """Waits for launched steps, in order, and delivers their results.

    A step whose ``finish`` raises is answered with a result that carries the exception, ``fatal`` set
    if it has a true ``device_lost`` attribute. While nothing is launched the thread is blocked and uses
    no CPU.

    Args:
        deliver: Takes each result, in order. Called on the completion thread; must not block.
        lose: Told when the device is lost.
        name: The thread's name.
    """

    def __init__(self, deliver: Callable[[StepResult], None], lose: Callable[[BaseException], None], name: str) -> None:
        self._deliver = deliver
        self._lose = lose
        self._queue: SimpleQueue[StepResult | Pending | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, answer: StepResult | Pending) -> None:
        """Queue the answer to one plan. Compute thread only."""
        self._queue.put(answer)

    def close(self) -> None:
        """Wait for what is queued and join the thread. After the last ``put``; blocks, except on the thread itself."""
        self._queue.put(_STOP)
        if current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while (answer := self._queue.get()) is not _STOP:
            step = answer.step
            result = answer if isinstance(answer, StepResult) else self._finish(answer)
            del answer
            _pass_on(self._deliver, result, step)
            del result

    def _finish(self, pending: Pending) -> StepResult:
        started = time.monotonic()
        try:
            return pending.finish()
        except BaseException as error:  # whatever it is, the plan needs an answer
            lost = bool(getattr(error, "device_lost", False))
            if lost:
                self._lose(error)
            return _failure(pending.step, error, fatal=lost, started=started)


def _pass_on(deliver: Callable[[Answer], None], answer: Answer, step: int) -> None:
    try:
        deliver(answer)
    except Exception:
        # The receiver is broken or gone (its event loop was closed, say). Dying here would leave the
        # plans behind this one without an answer, so report and go on.
        get_logger("compute thread").exception("step result could not be delivered", step=step)


def _failure(step: int, error: BaseException, *, fatal: bool = False, started: float | None = None) -> StepResult:
    now = time.monotonic()
    return StepResult(
        step,
        EMPTY_INTS,
        EMPTY_INTS,
        error=error,
        fatal=fatal,
        launched_at=now if started is None else started,
        completed_at=now,
    )
