"""An executor without a model: checks every plan, answers with the oracle's tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import anyio
import numpy as np

from ..bridge import LoopBinding
from ..contract import EMPTY_INTS, ExecutorLimits, StepPlan, StepResult
from ..wakeup import Signal
from .simulated_device import SimulatedDevice, SimulationError

Latency = Callable[[StepPlan], float]


class SimulatedExecutor:
    """Runs plans on a ``SimulatedDevice``, one after the other, in the event loop's time.

    Under trio's ``MockClock`` that time is virtual. A broken contract is fatal for the engine, so
    that no test can miss it.

    Args:
        limits: Capacities.
        latency: Seconds a step takes, a number or a function of the plan.
        token_budget: Checked if given.
        faults: Step → exception to raise instead of computing it.
        lost_at: Step at which the device is lost.
        hold: Start held: steps complete only through ``step()``.

    Attributes:
        plans: Every plan so far, oldest first.
    """

    def __init__(
        self,
        limits: ExecutorLimits | None = None,
        *,
        latency: float | Latency = 0.0,
        token_budget: int | None = None,
        faults: Mapping[int, BaseException] | None = None,
        lost_at: int | None = None,
        hold: bool = False,
    ) -> None:
        self._limits = limits or ExecutorLimits(max_rows=8, pages=64, page_size=4, max_model_len=128, vocab_size=1000)
        self._latency: Latency = latency if callable(latency) else lambda plan: latency
        self._faults = dict(faults or {})
        self._lost_at = lost_at
        self._queue: deque[StepPlan] = deque()
        self._in_flight: deque[StepPlan] = deque()
        self._wake = Signal()
        self._allowed = 0 if hold else -1
        self._deliver: Callable[[StepResult], None] | None = None
        self._task: object = None
        self._binding: LoopBinding | None = None
        self.device = SimulatedDevice(self._limits, token_budget)
        self.plans: list[StepPlan] = []
        self.closed = False

    @property
    def limits(self) -> ExecutorLimits:
        """Capacities."""
        return self._limits

    def start(self, deliver: Callable[[StepResult], None]) -> None:
        """Begin to accept plans; inside the loop the engine lives in."""
        self._deliver = deliver
        self._binding = LoopBinding()
        self._task = self._binding.spawn(self._run, "simulated-device")

    def submit(self, plan: StepPlan) -> None:
        """Queue one plan."""
        self.plans.append(plan)
        if self._in_flight and self._fence_broken(plan):
            self._faults[plan.step] = SimulationError(
                f"step {plan.step}: a row or page is given out that a step in flight may use"
            )
        self._queue.append(plan)
        self._in_flight.append(plan)
        self._wake.set()

    def step(self, count: int = 1) -> None:
        """Let ``count`` more steps complete (when held)."""
        self._allowed = max(self._allowed, 0) + count
        self._wake.set()

    def hold(self) -> None:
        """Complete no further step without being asked."""
        self._allowed = 0

    def fail_next(self, error: BaseException) -> None:
        """Raise ``error`` in the next plan that is submitted."""
        self._faults[(self.plans[-1].step if self.plans else 0) + 1] = error

    def unhold(self) -> None:
        """Complete steps without being asked from now on."""
        self._allowed = -1
        self._wake.set()

    def close(self) -> None:
        """Stop. Any thread."""
        self.closed = True
        if self._binding is not None:
            self._binding.call_soon(self._wake.set)

    def _fence_broken(self, plan: StepPlan) -> bool:
        """True if ``plan`` gives out rows or pages that a step in flight may still touch.

        Those are what the device knows now, less the rows that leave with the oldest step in flight,
        and what later steps in flight give out.
        """
        device, first = self.device, self._in_flight[0]
        held = device.joined.copy()
        if device.step < first.step:
            held[list(first.leaves)] = False
        rows = set(np.flatnonzero(held).tolist())
        pages = [device.table[held].ravel()]
        for earlier in self._in_flight:
            if earlier.step > device.step:
                rows.update(join.row for join in earlier.joins)
                pages += [join.pages for join in earlier.joins]
                pages.append(earlier.pages.pages)
        if any(join.row in rows for join in plan.joins):
            return True
        size = self._limits.page_size
        fresh = [join.pages[join.cached // size :] for join in plan.joins] + [plan.pages.pages]
        return bool(np.isin(np.concatenate(fresh), np.concatenate(pages)).any())

    async def _run(self) -> None:
        while not self.closed:
            await self._wake.wait()
            while self._queue and self._allowed:
                if self._allowed > 0:
                    self._allowed -= 1
                plan = self._queue.popleft()
                launched = anyio.current_time()
                seconds = self._latency(plan)
                if seconds > 0:
                    await anyio.sleep(seconds)
                result = self.run(plan, launched, launched + seconds)
                self._in_flight.popleft()
                assert self._deliver is not None
                self._deliver(result)

    def run(self, plan: StepPlan, launched: float, completed: float) -> StepResult:
        """Apply and compute one plan."""
        rows, tokens, error, fatal = EMPTY_INTS, EMPTY_INTS, None, False
        try:
            self.device.apply_deltas(plan)
            if plan.step == self._lost_at:
                raise RuntimeError("device lost")
            fault = self._faults.get(plan.step)
            if fault is not None:
                self.device.compute(plan, failing=True)
                raise fault
            rows, tokens = self.device.compute(plan)
        except Exception as exc:
            error = exc
            fatal = isinstance(exc, SimulationError) or plan.step == self._lost_at
        return StepResult(plan.step, rows, tokens, error=error, fatal=fatal, launched_at=launched, completed_at=completed)


class InstantExecutor:
    """Answers every plan at once with token 1 and checks nothing: the control plane's cost alone.

    Args:
        limits: Capacities.
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self._limits = limits
        self._active = np.zeros(limits.max_rows, np.bool_)
        self._deliver: Callable[[StepResult], None] | None = None

    @property
    def limits(self) -> ExecutorLimits:
        """Capacities."""
        return self._limits

    def start(self, deliver: Callable[[StepResult], None]) -> None:
        """Begin to accept plans."""
        self._deliver = deliver

    def submit(self, plan: StepPlan) -> None:
        """Answer ``plan``."""
        assert self._deliver is not None
        self._deliver(self.answer(plan))

    def answer(self, plan: StepPlan) -> StepResult:
        """The result a device would give."""
        for row in plan.leaves:
            self._active[row] = False
        rows = np.flatnonzero(self._active).astype(np.int32) if plan.decode else EMPTY_INTS
        sampled = [chunk.row for chunk in plan.prefill if chunk.sample]
        if sampled:
            rows = np.concatenate([rows, np.array(sampled, np.int32)])
            self._active[sampled] = True
        return StepResult(plan.step, rows, np.ones(len(rows), np.int32))

    def close(self) -> None:
        """Nothing to free."""
