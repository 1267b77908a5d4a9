"""What keeps a policy's mistakes away from the engine: they are counted, logged, and the hook is set aside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .errors import InvalidDecisionError
from .logs import get_logger

TOO_OFTEN = 3
"""Slow calls in a row after which a hook is set aside."""

REST = 64
"""Calls for which it is set aside."""


class Guard:
    """Counts and logs faults by hook. Loop thread only.

    Args:
        strict: Raise instead.
        allowance: Seconds a call may take. A call cannot be interrupted; its answer is used, but it
            counts, and after ``TOO_OFTEN`` such calls in a row the next ``REST`` calls are left out.

    Attributes:
        allowance: As given.
        faults: Mistakes so far, by hook.
    """

    def __init__(self, strict: bool, allowance: float) -> None:
        self.strict = strict
        self.faults: dict[str, int] = {}
        self.allowance = allowance
        self._slow: dict[str, int] = {}
        self._resting: dict[str, int] = {}
        self._log = get_logger("policy")

    def forgive(self) -> None:
        """Set nothing aside any more: other policies take over."""
        self._slow.clear()
        self._resting.clear()

    def rests(self, hook: str) -> bool:
        """True if the hook is set aside for this call."""
        if not self._resting:
            return False
        left = self._resting.get(hook, 0)
        if left > 1:
            self._resting[hook] = left - 1
        elif left:
            del self._resting[hook]
        return left > 0

    def timed(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` and see how long it takes. Its exceptions pass through."""
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            self.took(hook, time.perf_counter() - started)

    def took(self, hook: str, seconds: float) -> bool:
        """Note how long a call took; false if that was too long."""
        if seconds <= self.allowance:
            if self._slow:
                self._slow.pop(hook, None)
            return True
        self._slow[hook] = slow = self._slow.get(hook, 0) + 1
        if slow >= TOO_OFTEN:
            del self._slow[hook]
            self._resting[hook] = REST
        self.fault(hook, InvalidDecisionError(f"{hook}() took {seconds:.3f} s; policy_allowance is {self.allowance} s"))
        return False

    def fault(self, hook: str, exc: Exception) -> None:
        """Count and log a mistake.

        Raises:
            Exception: ``exc``, if strict.
        """
        if self.strict:
            raise exc
        self.report(hook, exc)

    def report(self, hook: str, exc: Exception) -> None:
        """Count and log a mistake of what runs beside the engine: never raises."""
        self.faults[hook] = count = self.faults.get(hook, 0) + 1
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th … time: a policy that always fails must not flood the log
            self._log.warning("policy_fault", hook=hook, error=repr(exc), count=count)
