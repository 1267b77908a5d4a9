"""The way back from other threads into the event loop: one wake-up, however many results.

A thread appends to a deque and schedules a drain only if none is pending, so that a step costs at
most one wake-up of the loop. asyncio and trio each have one call that may be made from a foreign
thread without waiting; anyio offers none, hence the two small cases here.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from anyio.lowlevel import current_token

from .errors import WrongLoopError
from .wakeup import Waiter

T = TypeVar("T")


class LoopBinding:
    """The event loop and thread an engine lives in. Made inside the running loop.

    Attributes:
        thread: The thread's identifier.
        clock: The loop's time in seconds; unlike ``anyio.current_time`` also usable in loop callbacks,
            which run in no task.
        new_waiter: Makes what one task of this loop can wait on, once.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        home = current_token().native_token
        self._home = home
        self.clock: Callable[[], float]
        if isinstance(home, asyncio.AbstractEventLoop):
            self.clock = home.time
            self.new_waiter: Callable[[], Waiter] = home.create_future
            # In the engine's own context: a poster's would say which library *its* loop is of, for one.
            self._call: Callable[[Callable[[], object]], object] = partial(home.call_soon_threadsafe, context=copy_context())
            self._current: Callable[[], object] = asyncio.get_running_loop
        else:
            import trio

            from .trio_waiter import TrioWaiter

            assert isinstance(home, trio.lowlevel.TrioToken)
            self.clock = trio.current_time
            self.new_waiter = TrioWaiter
            self._call = home.run_sync_soon
            self._current = trio.lowlevel.current_trio_token

    def check(self) -> None:
        """Refuse calls from elsewhere.

        Raises:
            WrongLoopError: the caller is in another thread or another event loop.
        """
        if threading.get_ident() != self.thread:
            raise WrongLoopError(
                "called from another thread than the engine's event loop; from threads and synchronous programs use "
                "asyncsched.BlockingEngine, or anyio.from_thread.run(...) in a worker thread"
            )
        try:
            current = self._current()
        except RuntimeError:  # no loop runs in this thread
            current = None
        if current is not self._home:
            raise WrongLoopError(
                "called from another event loop than the one the engine was started in; start one engine per loop "
                "(async with Engine(...)) instead of keeping one across asyncio.run() calls"
            )

    def call_soon(self, function: Callable[[], object]) -> bool:
        """Run ``function`` in the loop soon. Any thread. False if the loop is gone."""
        try:
            self._call(function)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return False
        return True

    def spawn(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> object:
        """Start a task that outlives the caller's scopes. Keep the returned reference."""
        if isinstance(self._home, asyncio.AbstractEventLoop):
            return self._home.create_task(main(), name=name)
        import trio

        return trio.lowlevel.spawn_system_task(main, name=name)


class Inbox(Generic[T]):
    """Items posted by any thread, handed over in order on the loop.

    Args:
        binding: The loop to wake.
        handle: Called on the loop for each item.
    """

    def __init__(self, binding: LoopBinding, handle: Callable[[T], object]) -> None:
        self._binding = binding
        self._handle = handle
        self._items: deque[T] = deque()
        self._turn = deque([True])  # whoever pops it schedules the drain; a lock would block the poster

    def post(self, item: T) -> None:
        """Hand ``item`` to the loop. Any thread; never blocks, and does not raise when the loop is gone."""
        self._items.append(item)
        try:
            self._turn.pop()
        except IndexError:  # a drain is on its way
            return
        self._binding.call_soon(self._drain)

    def _drain(self) -> None:
        self._turn.append(True)  # first: an item posted from now on schedules its own drain
        while self._items:
            self._handle(self._items.popleft())
