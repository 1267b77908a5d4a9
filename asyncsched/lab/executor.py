"""A device that exists only as a cost model: steps take virtual time, outputs end where the trace says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..contract import EMPTY_INTS, ExecutorLimits, IntArray, StepPlan, StepResult
from ..cost import CostModel, StepWork

TOKEN = 1
"""What every position but the last of an output holds."""

END = 2
"""The stop token."""


class ModelledExecutor:
    """Runs plans one after the other in the event loop's time, each for as long as ``cost`` says.

    The length of an output is known to the device alone, as in life: it is passed as the request's
    seed, and the device samples ``END`` there.

    Args:
        limits: Capacities.
        cost: Seconds per step.
        observer: Told of every step when it is submitted.
    """

    def __init__(self, limits: ExecutorLimits, cost: CostModel, observer: StepObserver) -> None:
        self._limits = limits
        self._cost = cost
        self._observer = observer
        self._loop: asyncio.AbstractEventLoop
        self._deliver: Callable[[StepResult], None]
        self._free_at = 0.0
        rows = limits.max_rows
        self._active = np.zeros(rows, np.bool_)
        self._length = np.zeros(rows, np.int64)
        self._produced = np.zeros(rows, np.int64)
        self._target = np.zeros(rows, np.int64)

    @property
    def limits(self) -> ExecutorLimits:
        """Capacities."""
        return self._limits

    def start(self, deliver: Callable[[StepResult], None]) -> None:
        """Begin to accept plans; inside the loop the engine lives in."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver

    def submit(self, plan: StepPlan) -> None:
        """Compute the plan's answer now and deliver it when its time has passed."""
        rows, tokens, work = self._compute(plan)
        launched = max(self._loop.time(), self._free_at)
        self._free_at = completed = launched + self._cost.seconds(work)
        self._observer.step(plan, rows, self._produced[rows], work, launched, completed)
        result = StepResult(plan.step, rows, tokens, launched_at=launched, completed_at=completed)
        self._loop.call_at(completed, self._deliver, result)

    def close(self) -> None:
        """Nothing to free."""

    def _compute(self, plan: StepPlan) -> tuple[IntArray, IntArray, StepWork]:
        for row in plan.leaves:
            self._active[row] = False
        for join in plan.joins:
            self._produced[join.row] = join.generated
            self._target[join.row] = join.seed
        decode = np.flatnonzero(self._active).astype(np.int32) if plan.decode else EMPTY_INTS
        self._length[decode] += 1
        for chunk in plan.prefill:
            self._length[chunk.row] = chunk.start + len(chunk.tokens)
        lengths = self._length[decode]
        work = StepWork(
            len(decode),
            int(lengths.sum()),
            [(chunk.start, len(chunk.tokens)) for chunk in plan.prefill],
            (int(lengths.min()), int(lengths.max())) if len(lengths) else None,
        )
        sampled = [chunk.row for chunk in plan.prefill if chunk.sample]
        self._active[sampled] = True
        rows = np.concatenate([decode, np.array(sampled, np.int32)]) if sampled else decode
        self._produced[rows] += 1
        tokens = np.where(self._produced[rows] == self._target[rows], END, TOKEN).astype(np.int32)
        return rows, tokens, work


class StepObserver:
    """Is told what the device does; this one does not care."""

    def step(
        self,
        plan: StepPlan,
        rows: IntArray,
        places: NDArray[np.int64],
        work: StepWork,
        launched: float,
        completed: float,
    ) -> None:
        """A step will run from ``launched`` to ``completed`` and yield a token for each of ``rows``.

        ``places`` says which one of its output, from 1 on; it goes beyond the end while the engine has not
        heard of that, and back if a request lost its row before a token was delivered.
        """
