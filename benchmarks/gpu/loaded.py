"""A model that stays on the device from one measurement to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Event

import torch

from asyncsched import Backend, EngineConfig, ExecutorLimits, StepPlan, StepResult
from asyncsched.gpu.cuda.executor import CudaExecutor
from asyncsched.gpu.cuda.step import LaunchedStep
from asyncsched.gpu.models.decoder_config import DecoderConfig

_CLEAR = -1
_PATIENCE = 60.0  # seconds


class Reusable:
    """An executor that serves one engine after the other, and notes plans and results.

    Closing it empties the rows and keeps everything else. While no engine has it, its steps may be
    launched directly.

    Attributes:
        plans, results: Since ``forget``.
    """

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self._deliver: Callable[[StepResult], None] | None = None
        self._running = False
        self._cleared = Event()
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    @property
    def limits(self) -> ExecutorLimits:
        """The executor's."""
        return self._executor.limits

    def start(self, deliver: Callable[[StepResult], None]) -> None:
        """Serve another engine."""
        self._deliver = deliver
        if not self._running:
            self._running = True
            self._executor.start(self._pass_on)

    def submit(self, plan: StepPlan) -> None:
        """Note and pass on."""
        self.plans.append(plan)
        self._executor.submit(plan)

    def close(self) -> None:
        """Wait for what was submitted and empty the rows. Idempotent; blocks."""
        if self._deliver is None:
            return
        self._cleared.clear()
        self._executor.submit(self._emptied())
        if not self._cleared.wait(_PATIENCE):
            raise RuntimeError(f"the device has not finished its steps within {_PATIENCE:.0f} s")
        self._deliver = None

    def forget(self) -> None:
        """Begin a new record."""
        self.plans, self.results = [], []

    def launch(self, plans: Iterable[StepPlan], depth: int = 2) -> list[StepResult]:
        """Run plans in a bare loop with up to ``depth`` steps in flight, then empty the rows. Only between two engines."""
        assert self._deliver is None, "an engine is running"
        pending: deque[LaunchedStep] = deque()
        results = []
        for plan in plans:
            if len(pending) == depth:
                results.append(pending.popleft().finish())
            pending.append(self._executor.launcher.launch(plan))
        results += [step.finish() for step in pending]
        self._executor.launcher.launch(self._emptied()).finish()
        return results

    def fill_with_noise(self) -> None:
        """Normal numbers in place of all keys and values, for measurements that compute no prompt."""
        executor = self._executor
        with torch.inference_mode(), executor.launcher.computing():
            for keys, values in executor.launcher.pools:
                keys.normal_()
                values.normal_()

    def shut_down(self) -> None:
        """Free everything."""
        self._executor.close()

    def _emptied(self) -> StepPlan:
        return StepPlan(_CLEAR, leaves=tuple(range(self.limits.max_rows)))

    def _pass_on(self, result: StepResult) -> None:
        if result.step == _CLEAR:
            self._cleared.set()
            return
        self.results.append(result)
        if self._deliver is not None:
            self._deliver(result)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on the device.

    Attributes:
        name: Of its configuration.
        shape: Its sizes.
        config: Options that it was loaded with, for engines.
        reusable: Its executor.
    """

    name: str
    shape: DecoderConfig
    config: EngineConfig
    reusable: Reusable

    @property
    def itemsize(self) -> int:
        """Bytes per number of weights and cache."""
        return 2 if self.config.dtype == "bfloat16" else 4

    def backend(self) -> Backend:
        """For the next engine."""
        return Backend(self.reusable, None, self.name)
