"""The two threads beside a GPU."""

from __future__ import annotations

from collections.abc import Callable

from ...contract import ExecutorLimits, StepPlan, StepResult
from ...errors import EngineClosedError
from ..compute_thread import CompletionThread, ComputeThread
from .launcher import Launcher
from .step import LaunchedStep


class CudaExecutor:
    """The ``Executor`` of the CUDA backend: one thread launches steps, another waits for their results.

    Args:
        launcher: Loaded and warm.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._limits = launcher.limits
        self._launcher: Launcher | None = launcher
        self._threads: tuple[ComputeThread[LaunchedStep], CompletionThread] | None = None

    @property
    def limits(self) -> ExecutorLimits:
        """Capacities, constant."""
        return self._limits

    @property
    def launcher(self) -> Launcher:
        """What the compute thread uses; another thread may before ``start`` only.

        Raises:
            EngineClosedError: its memory is gone.
        """
        if self._launcher is None:
            raise EngineClosedError("this executor was closed; load a new one")
        return self._launcher

    def start(self, deliver: Callable[[StepResult], None]) -> None:
        """Start the two threads. ``deliver`` is called on the completion thread, once per plan, in order.

        Raises:
            EngineClosedError: it was closed, or started before.
        """
        if self._threads is not None:
            raise EngineClosedError("this executor was started before; load a new one")
        launch = self.launcher.launch
        completion = CompletionThread(deliver, self._lose, "asyncsched-cuda-completion")
        self._threads = ComputeThread(launch, completion.put, "asyncsched-cuda"), completion

    def submit(self, plan: StepPlan) -> None:
        """Queue one plan and return at once. Loop thread only.

        Raises:
            EngineClosedError: not started, or closed.
        """
        if self._threads is None:
            raise EngineClosedError("the executor is not running")
        self._threads[0].submit(plan)

    def close(self) -> None:
        """Wait for the launched steps, drop the queued ones, join the threads, free the memory. Idempotent; blocks."""
        if self._threads is not None:
            for thread in self._threads:
                thread.close()
        self._launcher = None

    def _lose(self, error: BaseException) -> None:
        if self._threads is not None:
            self._threads[0].lose(error)
