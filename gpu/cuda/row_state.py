"""The running rows as the GPU keeps them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...contract import ExecutorLimits, IntArray, StepPlan
from .deltas import DeltaPacker, PackedDeltas
from .kernels.row_update import scatter_words
from .row_record import ENTRY_WORDS, RECORD_WORDS


class RowState:
    """Block table, lengths, last tokens and sampling state of every row, on one device. Compute thread only.

    All of it lies in one array, so that whatever a plan changes is one copy and one kernel. Every
    tensor here keeps its address for good: CUDA graphs may hold them. The pool of list entries may
    move when it grows, and graphs read its address from ``pool_address``. What is applied and what
    reads must be on one stream.

    Args:
        limits: Rows, pages and lengths.
        device: Where the tensors live.
        upload: Copies words there without waiting; they may change afterwards. By default a plain copy.

    Attributes:
        block_table: int32 ``[max_rows, pages per row]``.
        length: int32 ``[max_rows]``: tokens whose keys and values are in the pool, at the beginning
            of a step for rows that decode in it, after the step for rows with a chunk in it.
        last_token: int32 ``[max_rows]``: the token sampled last.
        active: int32 ``[max_rows]``: 1 where a row decodes.
        records: int32 ``[max_rows, 24]``: sampling state, see ``row_record.RECORD``.
        pool_address: int64 ``[1]``: where the entries are (``row_record.ENTRY``).
    """

    def __init__(
        self, limits: ExecutorLimits, device: torch.device, upload: Callable[[IntArray], torch.Tensor] | None = None
    ) -> None:
        self.limits = limits
        self._upload = upload or (lambda words: torch.tensor(words, device=device))
        self._packer = DeltaPacker(limits)
        layout = self._packer.layout
        self._words = torch.zeros(layout.words, dtype=torch.int32, device=device)

        def field(start: int, *shape: int) -> torch.Tensor:
            size = torch.Size(shape).numel()
            return self._words[start : start + size].view(shape)

        self.block_table = field(layout.table, layout.rows, layout.columns).fill_(-1)
        self.length = field(layout.lengths, layout.rows)
        self.last_token = field(layout.last_token, layout.rows)
        self.active = field(layout.active, layout.rows)
        self.records = field(layout.records, layout.rows, RECORD_WORDS)
        self._entries = torch.zeros(self._packer.capacity, ENTRY_WORDS, dtype=torch.int32, device=device)
        self.pool_address = torch.tensor([self._entries.data_ptr()], dtype=torch.int64, device=device)

    def pack(self, plan: StepPlan) -> PackedDeltas:
        """A plan's changes as words, to be applied in the order in which they are packed.

        Raises:
            ValueError: see ``DeltaPacker.pack``.
        """
        return self._packer.pack(plan)

    def apply(self, packed: PackedDeltas) -> None:
        """Queue the changes on the current stream; nothing waits for the device."""
        if packed.words.size == 0:
            return
        self._grow(packed.capacity)
        words = self._upload(packed.words)
        scatter_words(self._words, words, packed.scattered)
        first = 2 * packed.scattered
        for start, count in packed.lists:
            end = first + count * ENTRY_WORDS
            self._entries[start : start + count] = words[first:end].view(count, ENTRY_WORDS)
            first = end

    def _grow(self, capacity: int) -> None:
        if self._entries.shape[0] >= capacity:
            return
        larger = self._entries.new_zeros(capacity, ENTRY_WORDS)
        larger[: self._entries.shape[0]] = self._entries
        self._entries = larger
        self.pool_address.fill_(larger.data_ptr())
