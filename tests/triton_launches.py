"""Every elementwise, sampling and row-state kernel in every type, to be compiled for devices that are not there."""

from __future__ import annotations

import numpy as np
import torch

from asyncsched.contract import ExecutorLimits, RowJoin, StepPlan
from asyncsched.gpu.cuda.kernels.activation import silu_mul
from asyncsched.gpu.cuda.kernels.norm import add_rms_norm, head_rms_norm, rms_norm
from asyncsched.gpu.cuda.kernels.sampling import Sampled, SamplingWorkspace, sample
from asyncsched.gpu.cuda.row_state import RowState
from asyncsched.sampling_params import SamplingParams

from .triton_helpers import DEVICE

_VOCAB = 151_936


def device_launches() -> None:
    """See ``triton_helpers.compile_for``."""
    device = torch.device(DEVICE)
    limits = ExecutorLimits(max_rows=2, pages=4, page_size=16, max_model_len=64, vocab_size=_VOCAB)
    state = RowState(limits, device)
    join = RowJoin(0, 1, np.arange(2, dtype=np.int32), 0, SamplingParams(), 0)
    state.apply(state.pack(StepPlan(1, joins=(join,))))
    workspace = SamplingWorkspace(2, _VOCAB, device)
    rows = torch.arange(2, dtype=torch.int32, device=device)
    out = Sampled(rows.clone(), rows.clone())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        sample(zeros(2, _VOCAB), rows, state, workspace, out, decoding=2)
        sample(zeros(2, _VOCAB), rows, state, workspace, out, decoding=2, greedy=True)
        rms_norm(zeros(2, 4096), zeros(4096), 1e-6)
        add_rms_norm(zeros(2, 576), zeros(2, 576), zeros(576), 1e-6)
        head_rms_norm(zeros(2, 24 * 80), zeros(80), zeros(80), 16, 4, 1e-6)
        silu_mul(zeros(2, 3000))
