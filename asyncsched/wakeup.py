"""A flag one task waits on and anyone on the loop may set; setting it twice wakes once."""

from __future__ import annotations

import anyio


class Signal:
    """An auto-reset event. Loop thread only; one waiter."""

    __slots__ = ("_event", "_set")

    def __init__(self) -> None:
        self._set = False
        self._event: anyio.Event | None = None

    def set(self) -> None:
        """Wake the waiter, now or when it next waits."""
        self._set = True
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Return once ``set`` was called since the last return."""
        while not self._set:
            event = self._event = anyio.Event()
            await event.wait()
        self._set = False
