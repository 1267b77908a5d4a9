"""Launching plans on a GPU, one step behind the other, without waiting for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from ...contract import EMPTY_INTS, ExecutorLimits, IntArray, PrefillChunk, RowJoin, StepPlan
from ...sampling_params import MAX_LOGPROBS, SamplingParams
from ..models.base import CausalModel, KVPool
from ..prompt_scores import select, wanted_positions
from .device import Device, DeviceClock
from .graphs import DecodeGraphs
from .kernels.decode_attention import DecodeScratch, decode_splits
from .kernels.logprobs import token_logprobs
from .kernels.sampling import Sampled, SamplingWorkspace, sample
from .layout import DeviceLayout, StepInputs, aligned
from .reports import Reports
from .row_state import RowState
from .step import LaunchedStep, PromptLogprobs

_CONTEXT = 16_384  # tokens of context per row that decode attention is divided for


class Launcher:
    """The model, the pools and the state of the rows on one device, and what it takes to compute a plan there.

    The loading thread until the executor starts, then the compute thread.

    The state of the rows lives on the device; a plan brings its changes there with one copy and one
    kernel. A step of decoding rows alone is one CUDA graph, sampling included; any other one is
    launched kernel by kernel. What a step reads of the host is copied first into memory of its own,
    what it samples is copied out behind it: no step in flight shares a buffer with the next plan.
    Everything on the device runs in order on one stream, so the state needs no further fence.

    Args:
        model: Computes packed steps; its weights are on the device.
        limits: Rows, pages and lengths.
        device: The device.
        pools: One per layer, ``[pages, kv_heads, page_size, head_dim]`` twice.
        graphs: Use CUDA graphs where the model can.
    """

    def __init__(
        self, model: CausalModel, limits: ExecutorLimits, device: Device, pools: Sequence[KVPool], *, graphs: bool = True
    ) -> None:
        self._limits = limits
        self._model = model
        self._device = device
        self._pools = list(pools)
        shapes = model.cache_shapes
        self._kv_heads = max(shape.kv_heads for shape in shapes)
        with torch.inference_mode(), device.computing():
            self._state = RowState(limits, device.torch_device, device.upload)
            self._workspace = SamplingWorkspace(limits.max_rows, limits.vocab_size, device.torch_device)
            self._rows = torch.full((limits.max_rows,), -1, dtype=torch.int32, device=device.torch_device)
            self._out = torch.zeros(2, limits.max_rows, dtype=torch.int32, device=device.torch_device)
            self._positions = torch.arange(limits.max_rows, dtype=torch.int32, device=device.torch_device)
            parts = max(rows * self._splits(rows) for rows in range(1, limits.max_rows + 1))
            head_dim = max(shape.head_dim for shape in shapes)
            self._scratch = DecodeScratch.allocate(parts, model.heads, head_dim, device.torch_device)
            self._clock = DeviceClock(device.mark())
        self._graphs = DecodeGraphs(device, self._launch_decode, limits.max_rows) if graphs and model.graphable else None
        self._reports = Reports()
        self._active = np.zeros(limits.max_rows, np.bool_)
        self._decoding: IntArray = EMPTY_INTS
        self._sent: IntArray | None = None  # what ``_rows`` holds

    @property
    def limits(self) -> ExecutorLimits:
        """Capacities, constant."""
        return self._limits

    def computing(self) -> AbstractContextManager[Any]:
        """Within: what this thread launches goes to the stream that steps run on."""
        return self._device.computing()

    @property
    def pools(self) -> Sequence[KVPool]:
        """Keys and values by layer."""
        return self._pools

    def warm_up(self, tokens: int) -> None:
        """Compute a prompt of so many tokens and decode once, so that kernels are compiled and memory is taken.

        All of it lands in page 0.
        """
        limits = self._limits
        tokens = min(tokens, limits.max_model_len - 1)
        pages = np.zeros(-(-(tokens + 1) // limits.page_size), np.int32)
        params = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, logprobs=1)
        join = RowJoin(row=0, number=0, pages=pages, cached=0, params=params, seed=0)
        chunk = PrefillChunk(0, 0, np.zeros(tokens, np.int32), True)
        try:
            for plan in (StepPlan(0, joins=(join,), prefill=(chunk,)), StepPlan(0, decode=True)):
                self.launch(plan).finish()
        finally:
            self.launch(StepPlan(0, leaves=(0,))).finish()

    @property
    def graph_sizes(self) -> list[int]:
        """Padded numbers of rows whose graphs ``capture`` makes."""
        return self._graphs.first if self._graphs is not None else []

    def capture(self, captured: Callable[[int], None] = lambda rows: None) -> None:
        """Capture the graphs worth having before the first request, telling of each."""
        for size in self.graph_sizes:
            assert self._graphs is not None
            self._prepare(self._graphs, size)
            captured(size)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch one plan.

        Raises:
            DeviceLostError: the device can run nothing more.
            Exception: whatever the model raised. The deltas are applied all the same, and the rows have
                advanced as if nothing had happened.
        """
        try:
            with record_function(f"step {plan.step}"), torch.inference_mode(), self._device.computing():
                return self._launch(plan)
        except Exception as error:
            lost = self._device.lost(error)
            if lost is None:
                raise
            raise lost from error

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        device, started = self._device, time.monotonic()
        began = device.mark()
        self._apply(plan)
        decoding = self._decoding if plan.decode else EMPTY_INTS
        joining = np.array([chunk.row for chunk in plan.prefill if chunk.sample], np.int32)
        rows = np.concatenate([decoding, joining]) if joining.size else decoding
        if joining.size:
            self._set_active(joining, True)
        wanted = self._reports.wanted(rows)
        size = self._graphs.padded(decoding.size) if self._graphs is not None and decoding.size else None
        results, prompt_logprobs = [self._out[:, :0]], None
        if size is not None and not plan.prefill and not wanted:
            results = [self._replay(size, decoding)]
        elif decoding.size or plan.prefill:
            results, prompt_logprobs = self._compute(plan, decoding, rows, bool(wanted))
        ended = device.mark()
        arrival = device.fetch(results)
        launching = started, time.monotonic()
        return LaunchedStep(plan.step, rows, began, ended, arrival, wanted, prompt_logprobs, launching, device, self._clock)

    def _apply(self, plan: StepPlan) -> None:
        if not (plan.leaves or plan.joins or plan.prefill or plan.pages.rows.size):
            return
        self._state.apply(self._state.pack(plan))
        if plan.leaves or plan.joins:
            self._reports.apply(plan)
            self._set_active(np.array([*plan.leaves, *(join.row for join in plan.joins)], np.int32), False)

    def _set_active(self, rows: IntArray, active: bool) -> None:
        self._active[rows] = active
        self._decoding = np.flatnonzero(self._active).astype(np.int32)

    def _replay(self, size: int, decoding: IntArray) -> Tensor:
        """One graph; tokens and status in memory of their own."""
        assert self._graphs is not None
        with self._moving_on(decoding):
            self._prepare(self._graphs, size)
            if self._sent is not decoding:
                padded: IntArray = np.full(self._limits.max_rows, -1, np.int32)
                padded[: decoding.size] = decoding
                self._rows.copy_(self._device.upload(padded))
                self._sent = decoding
            self._graphs.replay(size)
        return self._out[:, :size].clone()

    def _prepare(self, graphs: DecodeGraphs, size: int) -> None:
        if not graphs.ready(size):
            with torch.inference_mode(), self._device.computing():
                self._rows.fill_(-1)
                self._sent = None
                graphs.capture(size)

    def _launch_decode(self, size: int) -> None:
        """What a graph holds: one token for each of the first ``size`` entries of ``_rows`` that is not padding."""
        rows = self._rows[:size]
        layout = DeviceLayout(self._state, rows, self._splits(size), self._scratch)
        tokens = self._state.last_token.index_select(0, rows.clamp(min=0))
        logits = self._model.forward(tokens, layout, self._pools, self._positions[:size])
        out = Sampled(self._out[0, :size], self._out[1, :size])
        sample(logits, rows, self._state, self._workspace, out, decoding=size)

    def _compute(
        self, plan: StepPlan, decoding: IntArray, rows: IntArray, report: bool
    ) -> tuple[list[Tensor], PromptLogprobs | None]:
        """Kernel by kernel: the step's results on the device, and what is known of prompts."""
        chunks, count = plan.prefill, decoding.size
        scored = self._reports.chunks(plan, count)
        ends = count - 1 + np.cumsum([chunk.tokens.size for chunk in chunks], dtype=np.int64)
        sampled_at = np.concatenate([np.arange(count), ends[np.array([chunk.sample for chunk in chunks], np.bool_)]])
        wanted = wanted_positions(sampled_at, scored)
        with self._moving_on(decoding):
            inputs = StepInputs.of(decoding, chunks, wanted, rows, self._device.upload)
            logits = self._forward(inputs)
            prompt_logprobs = self._reports.score(scored, wanted, logits) if scored else None
            logits = select(logits, wanted, sampled_at)
        results = torch.zeros(2, aligned(rows.size), dtype=torch.int32, device=logits.device)[:, : rows.size]
        if rows.size:
            out = Sampled(results[0], results[1])
            sample(logits, inputs.sampled, self._state, self._workspace, out, decoding=count)
        if not report:
            return [results], prompt_logprobs
        found = token_logprobs(logits, results[0], MAX_LOGPROBS)
        return [results, found.logprobs, found.ranks, found.top_ids, found.top_logprobs], prompt_logprobs

    def _forward(self, inputs: StepInputs) -> Tensor:
        layout = DeviceLayout(self._state, inputs.rows, self._splits(len(inputs.rows)), self._scratch, inputs.chunks)
        tokens = torch.cat([self._state.last_token.index_select(0, inputs.rows), inputs.tokens])
        return self._model.forward(tokens, layout, self._pools, inputs.wanted)

    @contextmanager
    def _moving_on(self, decoding: IntArray) -> Iterator[None]:
        """Within: what comes before sampling. If it fails the rows move on all the same, as sampling would have done."""
        try:
            yield
        except Exception:
            with suppress(Exception):  # if the device is lost, nothing moves any more
                ones = torch.ones(decoding.size, dtype=torch.int32, device=self._device.torch_device)
                self._state.length.index_add_(0, self._device.upload(decoding), ones)
            raise

    def _splits(self, rows: int) -> int:
        # Not by the longest context there may be: a launch of many short rows would pay for it.
        context = min(self._limits.max_model_len, _CONTEXT)
        return decode_splits(rows, self._kv_heads, context, self._device.multiprocessors) if rows else 1
