"""The page pool: which pages are free, and which are free as soon as a step has completed."""

from __future__ import annotations

from collections import deque

import numpy as np

from .contract import EMPTY_INTS, IntArray


class PagePool:
    """A stack of free pages and a queue of fenced ones. Loop thread only.

    Pages released while steps are in flight go to limbo with ``fence = last submitted step`` and
    return when that step has completed: a running step may still read or write them.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._stack = np.arange(pages - 1, -1, -1, dtype=np.int32)
        self._free = pages
        self._limbo: deque[tuple[int, IntArray]] = deque()
        self._limbo_pages = 0
        self._completed = 0

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return self._free

    @property
    def limbo(self) -> int:
        """Pages that become free when the steps in flight complete."""
        return self._limbo_pages

    def take(self, count: int) -> IntArray:
        """Take ``count`` pages, int32 ``[count]``.

        Raises:
            IndexError: fewer are free; ask ``free`` first.
        """
        if count > self._free:
            raise IndexError(f"{count} pages wanted, {self._free} free")
        if not count:
            return EMPTY_INTS
        self._free -= count
        return self._stack[self._free : self._free + count][::-1].copy()

    def release(self, pages: IntArray, fence: int) -> None:
        """Give pages back; they can be taken again once step ``fence`` has completed."""
        if len(pages):
            self._limbo.append((fence, pages))
            self._limbo_pages += len(pages)
            self.advance(self._completed)

    def advance(self, completed: int) -> None:
        """Return pages whose fence has completed to the free stack."""
        self._completed = completed
        while self._limbo and self._limbo[0][0] <= completed:
            pages = self._limbo.popleft()[1]
            self._stack[self._free : self._free + len(pages)] = pages
            self._free += len(pages)
            self._limbo_pages -= len(pages)

    def free_pages(self) -> IntArray:
        """The free pages, for invariant checks."""
        return self._stack[: self._free].copy()

    def limbo_pages(self) -> IntArray:
        """The fenced pages, for invariant checks."""
        return np.concatenate([pages for _, pages in self._limbo]) if self._limbo else EMPTY_INTS
