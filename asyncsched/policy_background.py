"""The background coroutines that policies bring."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from .policy import EngineView
from .policy_host import PolicyHost
from .wakeup import Signal


class Background:
    """Runs ``run(view)`` of every policy that has one, until other policies take over. Loop thread only.

    A coroutine that raises is reported as a fault of ``run`` and not started again.
    """

    def __init__(self, host: PolicyHost, view: EngineView) -> None:
        self._host = host
        self._view = view
        self._changed = Signal()

    def restart(self) -> None:
        """The policies have changed: end the coroutines of those that are gone, start the new ones'."""
        self._changed.set()

    async def run(self) -> None:
        """Keep the right coroutines running."""
        scopes: dict[int, tuple[Any, anyio.CancelScope]] = {}
        async with anyio.create_task_group() as tasks:
            while True:
                wanted = {id(policy): policy for policy in self._host.background}
                for key in scopes.keys() - wanted.keys():
                    scopes.pop(key)[1].cancel()
                for key in wanted.keys() - scopes.keys():
                    scope = anyio.CancelScope()
                    scopes[key] = wanted[key], scope  # the reference keeps the id from being used again
                    tasks.start_soon(self._guarded, wanted[key].run, scope)
                await self._changed.wait()

    async def _guarded(self, function: Callable[[EngineView], Awaitable[None]], scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await function(self._view)
            except Exception as exc:
                self._host.guard.report("run", exc)
