"""The row table: bookkeeping of every running request as a struct of arrays.

One decode step touches all running requests, so nothing here is done request by request: each
column is a numpy array over rows and a step is a handful of array operations.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from .contract import IntArray

WINDOW = 64
"""Tokens a row collects before they are moved to its request in one go."""

STOP_SLOTS = 8
"""Stop ids per row that are compared in the vectorised check; requests with more use the slow path."""


class RowTable:
    """Rows ``0 … max_rows − 1`` with their columns and the free list. Loop thread only.

    A released row is kept back until the step ``fence`` has completed, since steps in flight may
    still name it.

    Attributes:
        lease: int64, who holds the row; 0 is nobody. Never reused, so that a late result cannot be
            taken for a newcomer's.
        number, tenant: int64 and int32, whose request it is, and its tenant's id while it holds the row.
        length: int32, tokens whose keys and values are computed or planned.
        capacity: int32, tokens the row's pages can hold.
        remaining: int32, output tokens not planned yet.
        received: int32, output tokens whose values have arrived.
        max_new: int32, output tokens after which the request ends.
        min_new: int32, stop ids do not count before this many output tokens.
        stop_ids: int32 ``[max_rows, STOP_SLOTS]``, −1 where unused.
        joined: bool, the device knows the row; it must be told before it forgets it.
        decoding: bool, one token per decode step.
        listening: bool, a consumer waits for the row's next token.
        eager: bool, every token needs the request's own attention (stop strings, log-probabilities).
        window: int32 ``[max_rows, WINDOW]``, tokens that arrived last.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.lease = np.zeros(max_rows, np.int64)
        self.number = np.zeros(max_rows, np.int64)
        self.tenant = np.zeros(max_rows, np.int32)
        self.length = np.zeros(max_rows, np.int32)
        self.capacity = np.zeros(max_rows, np.int32)
        self.remaining = np.zeros(max_rows, np.int32)
        self.received = np.zeros(max_rows, np.int32)
        self.max_new = np.zeros(max_rows, np.int32)
        self.min_new = np.zeros(max_rows, np.int32)
        self.stop_ids = np.full((max_rows, STOP_SLOTS), -1, np.int32)
        self.joined = np.zeros(max_rows, np.bool_)
        self.decoding = np.zeros(max_rows, np.bool_)
        self.listening = np.zeros(max_rows, np.bool_)
        self.eager = np.zeros(max_rows, np.bool_)
        self.window = np.zeros((max_rows, WINDOW), np.int32)
        self._free = deque(range(max_rows))
        self._limbo: deque[tuple[int, int]] = deque()
        self._completed = 0
        self._decode_rows: IntArray | None = None

    @property
    def free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    @property
    def limbo(self) -> int:
        """Rows released but named by a step in flight."""
        return len(self._limbo)

    @property
    def in_use(self) -> int:
        """Rows held by a request."""
        return int(np.count_nonzero(self.lease))

    def take(self, lease: int) -> int:
        """Give out the row that has been free longest."""
        row = self._free.popleft()
        self.lease[row] = lease
        return row

    def release(self, row: int, fence: int) -> None:
        """Take the row from its owner; it can be taken again once step ``fence`` has completed."""
        self.lease[row] = 0
        self.listening[row] = False
        self.eager[row] = False
        self.stop_ids[row] = -1
        self.set_decoding(row, False)
        self._limbo.append((fence, row))
        self.advance(self._completed)

    def advance(self, completed: int) -> None:
        """Return rows whose fence has completed to the free list."""
        self._completed = completed
        while self._limbo and self._limbo[0][0] <= completed:
            self._free.append(self._limbo.popleft()[1])

    def set_decoding(self, row: int, value: bool) -> None:
        """Add the row to, or remove it from, the set of rows that decode."""
        if self.decoding[row] != value:
            self.decoding[row] = value
            self._decode_rows = None

    def decode_rows(self) -> IntArray:
        """Rows that decode, ascending, int32 ``[n]``. Do not write to it."""
        if self._decode_rows is None:
            self._decode_rows = np.flatnonzero(self.decoding).astype(np.int32)
        return self._decode_rows

    def plan_decode(self, rows: IntArray) -> IntArray:
        """Count one more planned token for ``rows``; returns those that need no further step."""
        self.length[rows] += 1
        left = self.remaining[rows] - 1
        self.remaining[rows] = left
        done: IntArray = rows[left == 0]
        return done

    def receive(self, rows: IntArray, tokens: IntArray) -> tuple[IntArray, NDArray[np.bool_], NDArray[np.bool_]]:
        """Store one arrived token for each of ``rows``.

        Returns:
            Output tokens received so far; whether the token is a stop id that counts; whether the
            output has reached its length. Each ``[n]``.
        """
        before = self.received[rows]
        self.window[rows, before % WINDOW] = tokens
        received = before + 1
        self.received[rows] = received
        stopped = (self.stop_ids[rows] == tokens[:, None]).any(axis=1)
        if stopped.any():
            stopped &= received >= self.min_new[rows]
        return received, stopped, received >= self.max_new[rows]

    def pending(self, row: int, flushed: int) -> list[int]:
        """Tokens of the row's window after the first ``flushed`` output tokens."""
        first = flushed % WINDOW
        tokens: list[int] = self.window[row, first : first + int(self.received[row]) - flushed].tolist()
        return tokens
