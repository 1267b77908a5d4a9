"""Eviction ahead of demand: keeps free pages above a watermark, so that planning need not search."""

from __future__ import annotations

from collections.abc import Callable

import anyio.lowlevel

from .config import EngineConfig
from .state import ControlState
from .wakeup import Signal


class Evictor:
    """Evicts from the low to the high watermark when woken. Loop thread only."""

    def __init__(self, state: ControlState, config: EngineConfig, evict: Callable[[int], int], wake: Signal) -> None:
        self._state = state
        self._evict = evict
        self._wake = wake
        self._high_pages = int(config.high_watermark * state.limits.pages)
        self._slice = 256  # pages between two turns of the loop

    async def run(self) -> None:
        """Restore the watermark whenever the planner has seen it crossed."""
        while True:
            await self._wake.wait()
            while (missing := self.missing()) > 0 and self._free(min(missing, self._slice)):
                await anyio.lowlevel.checkpoint()

    def _free(self, pages: int) -> int:
        with self._state.working("eviction", f"{pages} pages"):
            return self._evict(pages)

    def missing(self) -> int:
        """Pages to evict until the high watermark is reached; those in limbo count as free."""
        pool = self._state.pool
        return self._high_pages - pool.free - pool.limbo
