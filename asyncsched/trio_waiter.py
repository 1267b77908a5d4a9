"""A single wait in trio; imported only where trio runs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import outcome
import trio


class TrioWaiter:
    """What ``asyncio.Future`` is to asyncio: implements ``wakeup.Waiter``. Loop thread only."""

    __slots__ = ("_done", "_task", "_value")

    def __init__(self) -> None:
        self._done = False
        self._task: trio.lowlevel.Task | None = None
        self._value: Any = None

    def done(self) -> bool:
        """True once it has a value, or its task was cancelled."""
        return self._done

    def set_result(self, value: Any, /) -> None:
        """End the wait; not when it is ``done``."""
        self._done, self._value = True, value
        if self._task is not None:
            trio.lowlevel.reschedule(self._task, outcome.Value(value))

    def __await__(self) -> Generator[Any, None, Any]:
        """The value."""
        return self._wait().__await__()

    async def _wait(self) -> Any:
        if self._done:
            return self._value
        self._task = trio.lowlevel.current_task()
        return await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._done = True
        return trio.lowlevel.Abort.SUCCEEDED
