"""Runs plans on the CPU: one compute thread, numba kernels and oneDNN products."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..contract import (
    EMPTY_INTS,
    ExecutorLimits,
    IntArray,
    PrefillChunk,
    RowJoin,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from ..errors import EngineClosedError
from ..sampling_params import SamplingParams
from .compute_thread import ComputeThread
from .device_state import DeviceState
from .models.base import CausalModel, KVPool
from .pool import allocate_pools
from .prompt_scores import PromptSampler, PromptScores, select, wanted_positions


class SampleOutput(Protocol):
    """What a sampler returns for ``n`` rows."""

    @property
    def tokens(self) -> IntArray:
        """int32 ``[n]``."""
        ...

    @property
    def logprobs(self) -> dict[int, TokenLogprobs] | None:
        """By row, for rows that asked."""
        ...

    @property
    def failed(self) -> dict[int, str] | None:
        """By row: why it has no usable token."""
        ...


class RowSampler(PromptSampler, Protocol):
    """Chooses tokens; keeps the sampling state of every row."""

    def join(self, join: RowJoin) -> None:
        """A request takes a row."""
        ...

    def leave(self, row: int) -> None:
        """The row's state is no longer needed."""
        ...

    def sample(self, logits: Tensor, rows: IntArray) -> SampleOutput:
        """One token for each of ``rows``, ``logits[i]`` for ``rows[i]``."""
        ...


class CpuExecutor:
    """The ``Executor`` of the CPU backend.

    Args:
        model: Computes packed steps.
        sampler: Chooses tokens.
        limits: Rows, pages and lengths; the pools are allocated here.
        meanwhile: Called once in a thread of its own when the executor starts, to make ready what the
            first request may not need yet; ``close`` waits for it.

    Raises:
        NotEnoughMemoryError: the pools cannot be allocated.
    """

    def __init__(
        self, model: CausalModel, sampler: RowSampler, limits: ExecutorLimits, meanwhile: Callable[[], None] | None = None
    ) -> None:
        self._limits = limits
        self._model: CausalModel | None = model
        self._sampler = sampler
        self._scores = PromptScores(sampler)
        self._state = DeviceState(limits)
        self._pools: list[KVPool] = allocate_pools(model.cache_shapes, limits.pages, limits.page_size, model.dtype)
        self._thread: ComputeThread[StepResult] | None = None
        self._meanwhile = None if meanwhile is None else Thread(target=meanwhile, name="asyncsched-warm-up", daemon=True)
        self._closed = False

    @property
    def limits(self) -> ExecutorLimits:
        """Capacities, constant."""
        return self._limits

    def start(self, deliver: Callable[[StepResult], None]) -> None:
        """Start the compute thread. ``deliver`` is called on it, once per plan, in order.

        Raises:
            EngineClosedError: it was closed, or started before.
        """
        if self._closed or self._thread is not None:
            raise EngineClosedError("this executor was started or closed before; load a new one")
        self._thread = ComputeThread(self.run, deliver, "asyncsched-cpu")
        if self._meanwhile is not None:
            self._meanwhile.start()

    def submit(self, plan: StepPlan) -> None:
        """Queue one plan and return at once. Loop thread only.

        Raises:
            EngineClosedError: not started, or closed.
        """
        if self._thread is None:
            raise EngineClosedError("the executor is not running")
        self._thread.submit(plan)

    def close(self) -> None:
        """Finish the running plan, drop the queued ones, join the thread, free the memory. Idempotent; blocks."""
        self._closed = True
        if self._thread is not None:
            self._thread.close()
            if self._meanwhile is not None:
                self._meanwhile.join()
        self._pools = []
        self._model = None

    def warm_up(self) -> None:
        """Run a greedy prefill and decode step, so that no request waits for these kernels to be compiled.

        Before ``start`` only.
        """
        page = np.zeros(1, np.int32)
        prompt = np.zeros(min(2, self._limits.page_size), np.int32)
        join = RowJoin(row=0, number=0, pages=page, cached=0, params=SamplingParams(temperature=0.0), seed=0)
        plans = [StepPlan(0, joins=(join,), prefill=(PrefillChunk(0, 0, prompt, True),))]
        if self._limits.page_size > prompt.size and self._limits.max_model_len > prompt.size:
            plans.append(StepPlan(0, decode=True))
        try:
            for plan in plans:
                self.run(plan)
        finally:
            self.run(StepPlan(0, leaves=(0,)))

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one plan. Compute thread only.

        Raises:
            Exception: whatever the model or the sampler raised. The deltas are applied all the same,
                and the rows have advanced as if nothing had happened: steps in flight behind this one
                name them still, and what those compute from the gap is dropped.
        """
        launched = time.monotonic()
        with torch.inference_mode():
            self._apply(plan)
            packed = self._state.pack(plan)
            if packed is None:
                return StepResult(plan.step, EMPTY_INTS, EMPTY_INTS, launched_at=launched, completed_at=time.monotonic())
            self._state.advance(plan, packed)
            assert self._model is not None
            scored = self._scores.chunks(plan, packed.decoding)
            wanted = wanted_positions(packed.sampled_at, scored)
            logits = self._model.forward(torch.from_numpy(packed.tokens), packed.layout, self._pools, torch.from_numpy(wanted))
            prompt_logprobs = self._scores.score(scored, wanted, logits) if scored else None
            tokens, logprobs, failed = EMPTY_INTS, None, None
            if packed.rows.size:
                chosen = self._sampler.sample(select(logits, wanted, packed.sampled_at), packed.rows)
                tokens, logprobs, failed = chosen.tokens, chosen.logprobs, chosen.failed
                self._state.last_token[packed.rows] = tokens
        return StepResult(
            plan.step,
            packed.rows,
            tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            launched_at=launched,
            completed_at=time.monotonic(),
        )

    def _apply(self, plan: StepPlan) -> None:
        self._state.apply(plan)
        for row in plan.leaves:
            self._sampler.leave(row)
            self._scores.forget(row)
        for join in plan.joins:
            self._scores.forget(join.row)
            self._sampler.join(join)
