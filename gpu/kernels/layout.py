"""Where the tokens of one packed step live: segments, positions and pool slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


class Addresses(NamedTuple):
    """Memory addresses of a layout's arrays, for the compiled kernels."""

    table: int
    seg_row: int
    seg_first: int
    seg_len: int
    seg_start: int
    positions: int
    slots: int


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """The segments of a packed step. Built once per step, used by every layer.

    A segment is a run of new tokens of one request: one token when decoding, a chunk of the
    prompt when prefilling. The tokens of all segments lie one behind the other.

    Attributes:
        table: The block table, int32 ``[max_rows, max_pages]``: page of tokens
            ``i * page_size …`` of a row.
        seg_row: Table row per segment, int32 ``[S]``.
        seg_first: Packed index of each segment's first token, int32 ``[S]``.
        seg_len: Tokens per segment, int32 ``[S]``.
        seg_start: Absolute position of each segment's first token, int32 ``[S]``; whatever comes
            before it is in the pool.
        positions: Absolute position per token, int32 ``[N]``.
        slots: ``page * page_size + offset`` per token, int64 ``[N]``: where its key and value go.
        page_size: Tokens per page.
        end: One past the highest position of the step, 0 without tokens.
        addresses: Where these arrays are in memory; valid as long as the layout lives.
    """

    table: IntArray
    seg_row: IntArray
    seg_first: IntArray
    seg_len: IntArray
    seg_start: IntArray
    positions: IntArray
    slots: NDArray[np.int64]
    page_size: int
    end: int
    addresses: Addresses

    @classmethod
    def build(cls, table: IntArray, seg_row: IntArray, seg_len: IntArray, seg_start: IntArray, page_size: int) -> StepLayout:
        """Derive positions and slots.

        Args:
            table: Block table, int32, C-contiguous. Kept by reference: it may not change while
                kernels run with this layout.
            seg_row, seg_len, seg_start: Per segment, ``[S]``; ``S`` may be 0.
            page_size: Tokens per page.

        Raises:
            ValueError: the table is not a C-contiguous int32 matrix, the segments do not match, or
                a segment does not fit the table.
        """
        if table.dtype != np.int32 or table.ndim != 2 or not table.flags.c_contiguous:
            raise ValueError("the block table must be a C-contiguous int32 matrix; use np.ascontiguousarray(table, np.int32)")
        rows, lengths, starts = (np.ascontiguousarray(a, np.int32) for a in (seg_row, seg_len, seg_start))
        if not rows.shape == lengths.shape == starts.shape == (len(rows),):
            raise ValueError("seg_row, seg_len and seg_start must be vectors of one length, one entry per segment")
        end = int((starts + lengths).max(initial=0))
        if len(rows):
            fits = rows.min() >= 0 and rows.max() < table.shape[0] and starts.min() >= 0 and lengths.min() >= 0
            if not fits or end > table.shape[1] * page_size:
                raise ValueError("a segment lies outside the block table; check its row, start and length")
        first = np.cumsum(lengths, dtype=np.int32) - lengths
        positions = np.arange(int(lengths.sum()), dtype=np.int32) + np.repeat(starts - first, lengths)
        page, offset = np.divmod(positions, np.int32(page_size))
        slots = table[np.repeat(rows, lengths), page].astype(np.int64) * page_size + offset
        arrays = (table, rows, first, lengths, starts, positions, slots)
        addresses = Addresses(*(a.__array_interface__["data"][0] for a in arrays))
        return cls(*arrays, page_size, end, addresses)

    @property
    def tokens(self) -> int:
        """Tokens in the step."""
        return len(self.positions)
