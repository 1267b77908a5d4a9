"""Short ways to drive the GPU's sampler and the CPU's side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncsched.contract import ExecutorLimits, RowJoin, StepPlan
from asyncsched.gpu.cuda.kernels.sampling import Sampled, SamplingWorkspace, sample
from asyncsched.gpu.cuda.row_record import RECORD
from asyncsched.gpu.cuda.row_state import RowState
from asyncsched.gpu.sampler import Sampler

from .triton_helpers import DEVICE


class Pair:
    """Two samplers in the same state.

    Args:
        vocab: Logits per row.
        joins: Who takes which row.
        most: Rows there are.
    """

    def __init__(self, vocab: int, *joins: RowJoin, most: int = 16) -> None:
        limits = ExecutorLimits(max_rows=most, pages=64, page_size=16, max_model_len=512, vocab_size=vocab)
        self.state = RowState(limits, torch.device(DEVICE))
        self.workspace = SamplingWorkspace(most, vocab, torch.device(DEVICE))
        self.cpu = Sampler(most, vocab)
        self.join(*joins)

    def join(self, *joins: RowJoin) -> None:
        """Rows join on both sides."""
        self.state.apply(self.state.pack(StepPlan(1, joins=joins)))
        for each in joins:
            self.cpu.join(each)

    def draw(self, logits: torch.Tensor, rows: list[int], *, decoding: int = 0, greedy: bool = False) -> Sampled:
        """One step on the GPU's side; results in host memory, 99 where nothing was written."""
        device_rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        out = Sampled(torch.full_like(device_rows, 99), torch.full_like(device_rows, 99))
        sample(logits.to(DEVICE), device_rows, self.state, self.workspace, out, decoding=decoding, greedy=greedy)
        return Sampled(out.tokens.cpu(), out.status.cpu())

    def same(self, logits: torch.Tensor, rows: list[int], **how: Any) -> list[int]:
        """One step on both sides, which must agree; the tokens."""
        expected = self.cpu.sample(logits, np.asarray(rows, np.int32))
        actual = self.draw(logits, rows, **how)
        failed = [row for row, status in zip(rows, actual.status.tolist(), strict=True) if status]
        assert failed == sorted(expected.failed or {}, key=rows.index)
        assert actual.tokens.tolist() == expected.tokens.tolist()
        tokens: list[int] = actual.tokens.tolist()
        return tokens

    def record(self, row: int) -> NDArray[Any]:
        """The device's record of a row."""
        record: NDArray[Any] = self.state.records.cpu().numpy()[row].view(RECORD)
        return record

    def kept(self, logits: torch.Tensor, i: int) -> set[int]:
        """What top-k and top-p kept in the last step of the i-th row, whose adjusted logits these are."""
        bits = logits.float().contiguous().view(torch.int32).long()
        order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
        keys = (order << 32) + 0x7FFFFFFF - torch.arange(len(bits))
        return set(torch.nonzero(keys >= int(self.workspace.cuts[i])).flatten().tolist())
