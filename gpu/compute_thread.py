"""The one thread that owns a device: plans in, results out, strictly in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Final

from ..contract import EMPTY_INTS, StepPlan, StepResult
from ..errors import EngineClosedError, EngineError
from ..logs import get_logger

_STOP: Final = None


class DeviceLostError(EngineError):
    """The device cannot run another step. A runner raises this, or anything with ``device_lost = True``."""

    device_lost: Final = True


class ComputeThread:
    """Runs plans one after the other on a daemon thread of its own.

    A plan whose ``run`` raises is answered with a result that carries the exception. Once ``run``
    has raised an exception with a true ``device_lost`` attribute, that plan and every later one are
    answered with it at once, ``fatal`` set. While nothing is queued the thread is blocked and uses
    no CPU. It knows nothing of the device, so that every executor can use it.

    Args:
        run: Computes one plan. Called on the compute thread only.
        deliver: Takes each result, in plan order, once per plan. Called on the compute thread; must not block.
        name: The thread's name.
    """

    def __init__(self, run: Callable[[StepPlan], StepResult], deliver: Callable[[StepResult], None], name: str) -> None:
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

    def _loop(self) -> None:
        while (plan := self._queue.get()) is not _STOP:
            step = plan.step
            result = self._answer(plan)
            del plan
            try:
                self._deliver(result)
            except Exception:
                # The receiver is broken or gone (its event loop was closed, say). Dying here would leave the
                # plans behind this one without an answer, so report and go on.
                get_logger("compute thread").exception("step result could not be delivered", step=step)
            del result  # an idle thread must not keep the last step's arrays (or its traceback) alive

    def _answer(self, plan: StepPlan) -> StepResult:
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
