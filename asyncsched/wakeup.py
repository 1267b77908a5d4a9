"""What tasks wait on: a flag that anyone on the loop may set, and a single wait that ends with a value."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

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


class Waiter(Protocol):
    """One wait of one task; an ``asyncio.Future`` is one. Costs a quarter of an ``anyio.Event``. Loop thread only."""

    def done(self) -> bool:
        """True once it has a value, or its task was cancelled."""
        ...

    def set_result(self, value: Any, /) -> None:
        """End the wait; not when it is ``done``."""
        ...

    def __await__(self) -> Generator[Any, None, Any]:
        """The value."""
        ...
