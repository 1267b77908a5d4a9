"""Which kernels compute the attention of prompts: our own, or those of flashinfer where it is installed and quicker."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...contract import EMPTY_INTS, ExecutorLimits, PrefillChunk, RowJoin, StepPlan
from ...logs import get_logger
from ...sampling_params import SamplingParams
from .device import Device
from .kernels.decode_attention import DecodeScratch
from .kernels.prefill_attention import prefill_attention
from .layout import DeviceLayout, StepInputs
from .row_state import RowState

_WORKSPACE = 128 << 20  # bytes; what flashinfer's documentation recommends
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TRIAL = (512, 2048)  # tokens that are cached, and tokens to compute
_PAGE = 16
_ROUNDS = 5


class PrefillAttention(Protocol):
    """Attention of the chunks of a step."""

    def __call__(
        self, q: Tensor, layout: DeviceLayout, k_pool: Tensor, v_pool: Tensor, out: Tensor, *, scale: float, window: int
    ) -> None:
        """Write ``out [tokens, heads * head_dim]`` for ``q [tokens, heads, head_dim]``. Compute thread only."""
        ...


def triton_prefill(
    q: Tensor, layout: DeviceLayout, k_pool: Tensor, v_pool: Tensor, out: Tensor, *, scale: float, window: int
) -> None:
    """``PrefillAttention`` of our own: see ``kernels.prefill_attention``."""
    chunks = layout.chunks
    assert chunks is not None
    places = (layout.state.block_table, chunks.rows, chunks.starts, chunks.cu_seqlens)
    prefill_attention(q, k_pool, v_pool, *places, out, scale=scale, window=window)


class FlashInferPrefill:
    """``PrefillAttention`` of flashinfer (Ye et al., MLSys 2025), planned once per step and window.

    Args:
        flashinfer: The module.
        device: Where its workspace lives.
    """

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        self._layout: DeviceLayout | None = None
        self._planned: dict[tuple[int, float], Any] = {}

    def __call__(
        self, q: Tensor, layout: DeviceLayout, k_pool: Tensor, v_pool: Tensor, out: Tensor, *, scale: float, window: int
    ) -> None:
        """See ``PrefillAttention``."""
        if layout is not self._layout:
            self._layout, self._planned = layout, {}
        planned = self._planned.get((window, scale))
        if planned is None:
            planned = self._planned[window, scale] = self._plan(q, layout, k_pool, scale, window)
        out.copy_(planned.run(q.contiguous(), (k_pool, v_pool)).view(out.shape))

    def _plan(self, q: Tensor, layout: DeviceLayout, k_pool: Tensor, scale: float, window: int) -> Any:
        chunks = layout.chunks
        assert chunks is not None
        _, kv_heads, size, head_dim = k_pool.shape
        pages = [-(-end // size) for end in chunks.ends]
        indices = torch.cat([layout.state.block_table[row, :count] for row, count in zip(chunks.host_rows, pages, strict=True)])
        sums = torch.tensor([0, *np.cumsum(pages).tolist()], dtype=torch.int32)
        last = torch.tensor([(end - 1) % size + 1 for end in chunks.ends], dtype=torch.int32)
        # A new one for every step: a plan is copied from pinned memory that the wrapper keeps, and the step before
        # may not have read its own yet.
        wrapper = self._wrapper(self._workspace, "HND")
        wrapper.plan(
            chunks.cu_seqlens,
            sums.to(q.device),
            indices,
            last.to(q.device),
            q.shape[1],
            kv_heads,
            head_dim,
            size,
            causal=True,
            sm_scale=scale,
            window_left=window - 1 if window else -1,
            q_data_type=q.dtype,
            kv_data_type=k_pool.dtype,
        )
        return wrapper


def choose_prefill(
    device: Device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    tokens: tuple[int, int] = _TRIAL,
    seconds: Callable[[Device, Callable[[], object]], float] | None = None,
) -> PrefillAttention:
    """The quicker of ours and flashinfer's on a trial prompt, if both agree; ours if in doubt. The loading thread.

    Args:
        device: Where to try.
        heads, kv_heads, head_dim, dtype: Of the model.
        tokens: Of the trial prompt: how many are cached, and how many are computed.
        seconds: Times what it is given; ``device_seconds`` by default.
    """
    log = get_logger("attention")
    if dtype not in _TOLERANCE:
        return triton_prefill
    try:
        flashinfer = import_module("flashinfer")
    except ImportError:
        return triton_prefill
    try:
        other = FlashInferPrefill(flashinfer, device.torch_device)
        trial = _Trial(device, heads, kv_heads, head_dim, dtype, *tokens)
        ours, theirs = trial.run(triton_prefill), trial.run(other)
        error = float((ours.float() - theirs.float()).abs().max())
        if not error <= _TOLERANCE[dtype]:
            log.warning("flashinfer disagrees and is not used", error=error)
            return triton_prefill
        timed = seconds or device_seconds
        own, their = timed(device, lambda: trial.run(triton_prefill)), timed(device, lambda: trial.run(other))
    except Exception as reason:
        log.warning("flashinfer does not run here and is not used", reason=repr(reason))
        return triton_prefill
    chosen: PrefillAttention = other if their < own else triton_prefill
    log.info("attention of prompts", chosen="flashinfer" if chosen is other else "triton", ratio=round(their / own, 2))
    return chosen


def device_seconds(device: Device, work: Callable[[], object]) -> float:
    """The least time of several runs, from events."""
    found = []
    for _ in range(_ROUNDS):
        began = device.mark()
        work()
        ended = device.mark()
        ended.synchronize()
        found.append(began.elapsed_time(ended))
    return min(found)


class _Trial:
    """One prompt whose beginning is cached."""

    def __init__(
        self, device: Device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, cached: int, size: int
    ) -> None:
        end = cached + size
        pages = np.arange(-(-end // _PAGE), dtype=np.int32)[::-1].copy()
        limits = ExecutorLimits(1, pages.size, _PAGE, end + 1, 2)
        state = RowState(limits, device.torch_device, device.upload)
        state.apply(state.pack(StepPlan(1, joins=(RowJoin(0, 1, pages, cached, SamplingParams(), 0),))))
        chunk = PrefillChunk(0, cached, np.zeros(size, np.int32), True)
        inputs = StepInputs.of(EMPTY_INTS, [chunk], np.empty(0, np.int64), EMPTY_INTS, device.upload)
        scratch = DecodeScratch.allocate(1, heads, head_dim, device.torch_device)
        self._layout = DeviceLayout(state, inputs.rows, 1, scratch, inputs.chunks)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device=device.torch_device)

        self._pools = random(pages.size, kv_heads, _PAGE, head_dim), random(pages.size, kv_heads, _PAGE, head_dim)
        self._q = random(size, heads, head_dim)
        self._scale = head_dim**-0.5

    def run(self, attention: PrefillAttention) -> Tensor:
        """Compute it once; each run plans anew, as a step does."""
        layout = DeviceLayout(self._layout.state, self._layout.rows, 1, self._layout.scratch, self._layout.chunks)
        out = torch.empty(len(self._q), self._q[0].numel(), dtype=self._q.dtype, device=self._q.device)
        attention(self._q, layout, *self._pools, out, scale=self._scale, window=0)
        return out
