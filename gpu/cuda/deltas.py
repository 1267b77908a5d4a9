"""A plan's changes as plain words, so that one copy and one kernel bring them to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...contract import EMPTY_INTS, ExecutorLimits, IntArray, PageAppends, RowJoin, StepPlan
from .entry_pool import EntryPool
from .row_record import LISTED, RECORD_WORDS, encode_join

_ALIGNMENT = 64  # words: every field starts on a line of its own


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where each field of the row state lies in one array of int32 words.

    Attributes:
        rows: Rows there are.
        columns: Pages per row of the block table.
        table, lengths, last_token, active, records: First word of each field.
        words: Length of the array.
    """

    rows: int
    columns: int
    table: int
    lengths: int
    last_token: int
    active: int
    records: int
    words: int

    @classmethod
    def of(cls, limits: ExecutorLimits) -> StateLayout:
        """The layout for an executor's limits."""
        rows, columns = limits.max_rows, -(-limits.max_model_len // limits.page_size)
        ends = np.cumsum([-(-n // _ALIGNMENT) * _ALIGNMENT for n in (rows * columns, rows, rows, rows, rows * RECORD_WORDS)])
        starts = [0, *(int(end) for end in ends)]
        return cls(rows, columns, *starts)


@dataclass(frozen=True, slots=True)
class PackedDeltas:
    """One plan's changes.

    Attributes:
        words: int32 ``[2 * scattered + entry words]``: the indices of the state's words that
            change, their new values, and the entries of joining rows one list behind the other.
        scattered: How many of the state's words change; no index occurs twice.
        lists: Where each list of entries goes in the pool: first entry and how many.
        capacity: Entries the pool must have room for.
    """

    words: IntArray
    scattered: int
    lists: tuple[tuple[int, int], ...]
    capacity: int


class DeltaPacker:
    """Turns plans into words. Touches no device. Compute thread only, every plan once and in order.

    Args:
        limits: Rows, pages and lengths.
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self.layout = StateLayout.of(limits)
        self._limits = limits
        self._pool = EntryPool()

    @property
    def capacity(self) -> int:
        """Entries the pool must have room for."""
        return self._pool.capacity

    def pack(self, plan: StepPlan) -> PackedDeltas:
        """The plan's leaves, joins and pages, and where its chunks leave their rows.

        A row's length and active flag are those after its chunk, from the beginning of the step:
        what computes the step is told about chunks separately. The last write of a word wins.

        Raises:
            ValueError: a row, page or block-table entry that does not exist, or a join whose pages
                do not cover its cached tokens. Nothing was packed.
        """
        self._check(plan)
        layout = self.layout
        writes = _Writes()
        entries: list[NDArray[Any]] = []
        lists: list[tuple[int, int]] = []
        for row in plan.leaves:
            self._pool.release(row)
            writes.add([layout.active + row], [0])
        for join in plan.joins:
            row = join.row
            writes.add(layout.table + row * layout.columns + np.arange(join.pages.size), join.pages)
            writes.add([layout.lengths + row, layout.active + row], [join.cached, 0])
            record, own = encode_join(join, self._limits.vocab_size, self._limits.max_model_len)
            self._pool.release(row)
            if record["needs"][0] & LISTED:
                start = self._pool.take(row, int(record["list_room"][0]))
                record["list_start"] = start
                lists.append((start, own.size))
                entries.append(own)
            writes.add(layout.records + row * RECORD_WORDS + np.arange(RECORD_WORDS), record.view(np.int32))
        if plan.pages.rows.size:
            at = plan.pages.rows.astype(np.int64) * layout.columns + plan.pages.indices
            writes.add(layout.table + at, plan.pages.pages)
        for chunk in plan.prefill:
            writes.add([layout.lengths + chunk.row], [chunk.start + chunk.tokens.size])
            if chunk.sample:
                writes.add([layout.active + chunk.row], [1])
        indices, values = writes.distinct()
        words = np.concatenate([indices, values, *(own.view(np.int32) for own in entries)])
        return PackedDeltas(words, indices.size, tuple(lists), self._pool.capacity)

    def _check(self, plan: StepPlan) -> None:
        # What lies outside would be written outside the device's arrays.
        rows = [*plan.leaves, *(join.row for join in plan.joins), *(chunk.row for chunk in plan.prefill)]
        if rows and not 0 <= min(rows) <= max(rows) < self.layout.rows:
            raise ValueError(f"step {plan.step}: rows {min(rows)} … {max(rows)} are not among {self.layout.rows} rows")
        for join in plan.joins:
            self._check_join(join)
        self._check_appends(plan.pages)

    def _check_join(self, join: RowJoin) -> None:
        self._check_pages(join.pages)
        if join.pages.size > self.layout.columns:
            raise ValueError(f"row {join.row} joins with {join.pages.size} pages; a row has {self.layout.columns} at most")
        if join.cached > join.pages.size * self._limits.page_size:
            raise ValueError(f"row {join.row} joins with {join.cached} cached tokens on {join.pages.size} pages")

    def _check_appends(self, appends: PageAppends) -> None:
        self._check_pages(appends.pages)
        for name, values, end in (("row", appends.rows, self.layout.rows), ("index", appends.indices, self.layout.columns)):
            if values.size and not 0 <= int(values.min()) <= int(values.max()) < end:
                raise ValueError(f"page appends name {name} {int(values.min())} … {int(values.max())}; there are {end}")

    def _check_pages(self, pages: IntArray) -> None:
        if pages.size and not 0 <= int(pages.min()) <= int(pages.max()) < self._limits.pages:
            found = f"{int(pages.min())} … {int(pages.max())}"
            raise ValueError(f"page ids {found} are not in a pool of {self._limits.pages} pages")


class _Writes:
    """Words to write, in order."""

    def __init__(self) -> None:
        self._indices: list[Any] = []
        self._values: list[Any] = []

    def add(self, indices: Any, values: Any) -> None:
        self._indices.append(indices)
        self._values.append(values)

    def distinct(self) -> tuple[IntArray, IntArray]:
        """Ascending indices and the value written last to each: the device writes in no order."""
        if not self._indices:
            return EMPTY_INTS, EMPTY_INTS
        indices = np.concatenate(self._indices)
        _, last = np.unique(indices[::-1], return_index=True)
        kept = indices.size - 1 - last
        return indices[kept].astype(np.int32), np.concatenate(self._values)[kept].astype(np.int32)
