"""The device's mirror of the running rows, and the packed step made from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..contract import EMPTY_INTS, ExecutorLimits, IntArray, RowJoin, StepPlan
from .kernels.layout import StepLayout


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The tokens of one step, all segments one behind the other, no padding.

    Attributes:
        tokens: Input token ids, int64 ``[N]``: one per active row, ascending, then the chunks in plan order.
        layout: Which segment is whose, and where its keys and values go.
        rows: Rows that get a token, int32 ``[n]``: active rows ascending, then the rows of chunks
            with ``sample`` in plan order.
        sampled_at: Packed position whose logits decide each of ``rows``, int64 ``[n]``.
        decoding: How many of ``rows`` were active (the first ones).
    """

    tokens: NDArray[np.int64]
    layout: StepLayout
    rows: IntArray
    sampled_at: NDArray[np.int64]
    decoding: int


class DeviceState:
    """Block table, lengths, last tokens and active flags by row. Compute thread only.

    The token a row sampled last is kept here and read by the next step: it never passes through
    the event loop. Work per step is O(changes) in Python, the rest is vectorised over rows.

    Attributes:
        table: Block table, int32 ``[max_rows, pages per row]``, -1 where no page was given.
        lengths: Tokens whose keys and values are in the pool, int32 ``[max_rows]``.
        last_token: Token sampled last, int32 ``[max_rows]``.
        active: Rows that decode, bool ``[max_rows]``.
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self._pages = limits.pages
        self._page_size = limits.page_size
        columns = -(-limits.max_model_len // limits.page_size)
        self.table = np.full((limits.max_rows, columns), -1, np.int32)
        self.lengths = np.zeros(limits.max_rows, np.int32)
        self.last_token = np.zeros(limits.max_rows, np.int32)
        self.active = np.zeros(limits.max_rows, np.bool_)

    def apply(self, plan: StepPlan) -> None:
        """Apply the deltas in the contract's order: leaves, joins, pages.

        Raises:
            ValueError: a page id outside the pool, or a join whose pages do not cover its cached tokens.
        """
        for row in plan.leaves:
            self.active[row] = False
        for join in plan.joins:
            self._join(join)
        appended = plan.pages
        if appended.rows.size:
            self._check(appended.pages)
            self.table[appended.rows, appended.indices] = appended.pages

    def pack(self, plan: StepPlan) -> PackedStep | None:
        """Lay out the tokens of one step whose deltas are applied; ``None`` if it computes nothing.

        Raises:
            ValueError: a token has no page to be stored in.
        """
        decoding = np.flatnonzero(self.active).astype(np.int32) if plan.decode else EMPTY_INTS
        chunks = plan.prefill
        if not decoding.size and not chunks:
            return None
        count = decoding.size
        seg_row = np.empty(count + len(chunks), np.int32)
        seg_len = np.ones_like(seg_row)
        seg_start = np.empty_like(seg_row)
        seg_row[:count] = decoding
        seg_start[:count] = self.lengths[decoding]
        for index, chunk in enumerate(chunks, count):
            seg_row[index] = chunk.row
            seg_len[index] = chunk.tokens.size
            seg_start[index] = chunk.start
        layout = StepLayout.build(self.table, seg_row, seg_len, seg_start, self._page_size)
        if layout.slots.size and int(layout.slots.min()) < 0:
            row = int(np.repeat(seg_row, seg_len)[int(layout.slots.argmin())])
            raise ValueError(f"step {plan.step}: row {row} has no page for a token it computes")
        tokens = np.concatenate([self.last_token[decoding], *(chunk.tokens for chunk in chunks)], dtype=np.int64)
        sampled = np.ones(seg_row.size, np.bool_)
        sampled[count:] = [chunk.sample for chunk in chunks]
        ends = np.cumsum(seg_len, dtype=np.int64) - 1
        return PackedStep(tokens, layout, seg_row[sampled], ends[sampled], count)

    def advance(self, plan: StepPlan, packed: PackedStep) -> None:
        """Move the rows on by what the step computes, before it is computed: whether it succeeds is not the rows' business."""
        self.lengths[packed.rows[: packed.decoding]] += 1
        for chunk in plan.prefill:
            self.lengths[chunk.row] = chunk.start + chunk.tokens.size
        self.active[packed.rows] = True

    def _join(self, join: RowJoin) -> None:
        self._check(join.pages)
        row = join.row
        if join.cached > join.pages.size * self._page_size:
            raise ValueError(f"row {row} joins with {join.cached} cached tokens on {join.pages.size} pages")
        self.table[row] = -1
        self.table[row, : join.pages.size] = join.pages
        self.lengths[row] = join.cached
        self.active[row] = False

    def _check(self, pages: IntArray) -> None:
        # An id outside the pool would make the kernels write outside their arrays.
        if pages.size and (int(pages.min()) < 0 or int(pages.max()) >= self._pages):
            raise ValueError(f"page ids {int(pages.min())} … {int(pages.max())} are not in a pool of {self._pages} pages")
