"""Running one set of policies on a trace: the engine itself, virtual time, a modelled device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import numpy as np
from anyio.abc import TaskGroup

from ..backend import Backend
from ..contract import ExecutorLimits
from ..cost import CostModel
from ..engine import Engine
from ..errors import AsyncschedError, ConfigError
from ..statistics import Statistics
from .executor import END, ModelledExecutor
from .prompts import PromptMaker
from .recorder import Recorder, RequestRecord, Timeline
from .trace import Trace, TraceRequest
from .virtual_time import VirtualTimeLoop

VOCABULARY = 32_000

_ELSEWHERE = {
    "max_rows": "use Setup(max_rows=…), on the command line --rows",
    "page_size": "use Setup(page_size=…), on the command line --page-size",
    "backend": "the simulator brings its own",
}
"""Engine options that the simulator sets, and what to use instead."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The simulated server.

    Attributes:
        cost: Seconds per step.
        pages, page_size, max_rows, max_model_len: The device.
        options: Further options of the engine: policies, ``token_budget``, ``depth``, ``reserve`` …
        max_tokens: Output limit that callers set, where the trace does not say. They do not know how long an answer will be, so
            ``"longest"`` takes the longest output of the trace for everyone, and outputs end by a stop
            token; with ``"exact"`` they end by length, as in benchmarks that ignore the end of sequence.
        hint_error: Callers attach ``hints["output_tokens"]``, off by a factor ``exp(hint_error × normal)``;
            ``None`` attaches no hint.
        seed: For prompts and hints.

    Raises:
        ConfigError: ``options`` has something that is said elsewhere.
    """

    cost: CostModel
    pages: int = 4096
    page_size: int = 16
    max_rows: int = 256
    max_model_len: int = 131_072
    options: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | Literal["longest", "exact"] = "longest"
    hint_error: float | None = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, instead in _ELSEWHERE.items():
            if name in self.options:
                raise ConfigError(f"{name} is no option of the engine here; {instead}")


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What came of one run.

    Attributes:
        name: Of the set of policies.
        requests: One record per request of the trace, in order of arrival.
        timeline: Samples of the run.
        gaps: Seconds between two tokens of a request, over all requests (inter-token latencies).
        statistics: The engine's own, at the end.
        seconds: Virtual time from the first arrival to the last token.
        wall_seconds: Real time it took.
    """

    name: str
    requests: list[RequestRecord]
    timeline: Timeline
    gaps: np.ndarray[Any, np.dtype[np.float64]]
    statistics: Statistics
    seconds: float
    wall_seconds: float


def simulate(
    trace: Trace, setup: Setup, name: str = "", progress: Callable[[int], None] = lambda ended: None
) -> SimulationResult:
    """Serve the trace once; returns when every request has ended.

    Must not be called from within an event loop.

    Args:
        trace: What arrives.
        setup: Where it arrives.
        name: For the result.
        progress: Told how many requests have ended, whenever one does.

    Raises:
        ConfigError, PolicyError: the setup is impossible.
    """
    started = time.perf_counter()
    run = _Simulation(trace, setup, progress)
    anyio.run(run.main, backend_options={"loop_factory": VirtualTimeLoop})
    assert run.statistics is not None
    ends = [record.finished for record in run.recorder.requests if record.finished is not None]
    return SimulationResult(
        name,
        run.recorder.requests,
        run.recorder.timeline(),
        run.recorder.gaps(),
        run.statistics,
        max(ends, default=0.0),
        time.perf_counter() - started,
    )


class _Simulation:
    """Submits the trace's requests when they are due and writes down how they fare."""

    def __init__(self, trace: Trace, setup: Setup, progress: Callable[[int], None]) -> None:
        self.statistics: Statistics | None = None
        self.recorder = Recorder(trace, setup.max_rows)
        self._trace = trace
        self._setup = setup
        self._progress = progress
        self._ended = 0
        self._prompts = PromptMaker(VOCABULARY, setup.seed)
        self._noise = np.random.default_rng(setup.seed)
        self._longest = max((request.output_tokens for request in trace.requests), default=1)

    async def main(self) -> None:
        """The application."""
        setup = self._setup
        limits = ExecutorLimits(setup.max_rows, setup.pages, setup.page_size, setup.max_model_len, VOCABULARY)
        backend = Backend(ModelledExecutor(limits, setup.cost, self.recorder), None, "simulated")
        # Real time must not decide anything here: a busy machine would change the result.
        options = {"cost_model": setup.cost, "slow_step_seconds": 1e6, "policy_allowance": 1e6, **setup.options}
        async with Engine(backend=backend, max_rows=setup.max_rows, page_size=setup.page_size, **options) as engine:
            start = anyio.current_time()
            self.recorder.watch(engine, start)
            first = self._trace.requests[0].at if self._trace.requests else 0.0
            async with anyio.create_task_group() as tasks:
                for index, request in enumerate(self._trace.requests):
                    await anyio.sleep_until(start + request.at - first)
                    self._submit(engine, index, request, tasks)
            self.statistics = engine.statistics()

    def _submit(self, engine: Engine, index: int, request: TraceRequest, tasks: TaskGroup) -> None:
        tasks.start_soon(self._serve, engine, index, request)

    async def _serve(self, engine: Engine, index: int, request: TraceRequest) -> None:
        """One caller."""
        output = request.output_tokens
        limit = self._limit(request.max_tokens, output)
        try:
            stream = engine.stream(
                self._prompts.prompt(request, index),
                max_tokens=limit,
                seed=output,  # how the device knows where the output ends
                stop_token_ids=(END,) if limit > output else (),
                request_id=str(index),
                **self._about(request, output),
            )
            await stream.wait()
        except AsyncschedError as exc:
            self.recorder.failed(index, exc)
        else:
            self.recorder.finished(index, stream)
        self._ended += 1
        self._progress(self._ended)

    def _limit(self, known: int | None, output: int) -> int:
        limit = self._setup.max_tokens
        if known is not None:
            return max(output, known)
        return output if limit == "exact" else max(output, self._longest if limit == "longest" else limit)

    def _about(self, request: TraceRequest, output: int) -> dict[str, Any]:
        hints = dict(request.hints)
        if self._setup.hint_error is not None:
            hints["output_tokens"] = max(1, round(output * float(np.exp(self._setup.hint_error * self._noise.normal()))))
        return {
            "priority": request.priority,
            "tenant": request.tenant,
            "deadline": request.deadline,
            "ttft_target": request.ttft_target,
            "tpot_target": request.tpot_target,
            "program_id": request.program_id,
            "hints": hints,
        }
