"""An asyncio event loop whose clock jumps: an hour of waiting takes no time at all."""

from __future__ import annotations

import asyncio
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs timers in their order without waiting for them; starts at time 0.

    Whenever no callback is ready, the clock moves to the next timer. With no timer either it waits
    for real input, such as a worker thread's answer: what goes on in threads then takes no virtual time.
    While timers are due the clock does not wait for threads: when their answers come is left to chance.

    Use it as ``anyio.run(main, backend_options={"loop_factory": VirtualTimeLoop})``.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Move the clock."""
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the loop's clock instead of waiting for a timeout."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Ready files; if there are none the clock jumps by ``timeout``."""
        if timeout is None:
            return super().select()
        events = super().select(0)
        if not events and timeout > 0:
            self._loop.jump(timeout)
        return events
