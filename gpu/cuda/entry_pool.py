"""Which stretch of the pool of list entries belongs to which row."""

from __future__ import annotations

_LEAST = 64


class EntryPool:
    """Places in a pool that grows and never moves what lives in it. Host arithmetic only. Compute thread only.

    A row gets a power of two of entries, and what a row gave back serves the next one of its size.

    Attributes:
        capacity: Entries the pool must have by now.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self._used = 0
        self._owned: dict[int, tuple[int, int]] = {}
        self._free: dict[int, list[int]] = {}

    def take(self, row: int, room: int) -> int:
        """The first of at least ``room`` entries for a row, which gives back what it had."""
        self.release(row)
        size = max(_LEAST, 1 << (room - 1).bit_length())
        free = self._free.get(size)
        if free:
            start = free.pop()
        else:
            start = self._used
            self._used += size
            while self.capacity < self._used:
                self.capacity *= 2
        self._owned[row] = (start, size)
        return start

    def release(self, row: int) -> None:
        """Take back what the row had, if anything."""
        owned = self._owned.pop(row, None)
        if owned is not None:
            start, size = owned
            self._free.setdefault(size, []).append(start)
