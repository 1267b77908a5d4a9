"""Whether the engine makes progress, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .state import ControlState

Status = Literal["idle", "ok", "stalled", "paused", "draining", "dead", "closed"]


@dataclass(frozen=True, slots=True)
class Health:
    """The engine's condition at one moment.

    Attributes:
        status: ``idle`` (nothing to do), ``ok`` (working), ``stalled`` (a step takes longer than
            ``slow_step_seconds``), ``paused``, ``draining``, ``dead`` or ``closed``.
        steps: Steps completed; progress is this number growing.
        in_flight: Steps submitted and not completed.
        oldest_step_seconds: How long the oldest of them has been in flight; 0 if there is none.
        running, waiting: Requests with a row, and without.
        blocked: Why the first waiting request is not admitted: ``rows``, ``pages``, ``token budget``,
            ``policy``, ``paused``, or empty.
        reason: Why the engine is dead.
    """

    status: Status
    steps: int = 0
    in_flight: int = 0
    oldest_step_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    blocked: str = ""
    reason: str = ""

    @property
    def alive(self) -> bool:
        """True while requests can be served."""
        return self.status not in ("dead", "closed")


def examine(
    state: ControlState, *, blocked: str, lobby: int, slow: float, draining: bool, dead: BaseException | None
) -> Health:
    """Read the state."""
    try:
        oldest = state.clock() - state.in_flight[0].submitted_at
    except IndexError:  # none is in flight, or it has just completed: with own_loop another thread reads this
        oldest = 0.0
    running, waiting = state.rows.in_use, len(state.waiting) + lobby
    status: Status
    if dead is not None:
        status = "dead"
    elif oldest > slow:
        status = "stalled"
    elif state.mode != "running":
        status = "paused"
    elif draining:
        status = "draining"
    else:
        status = "ok" if running or waiting else "idle"
    if state.mode != "running" and waiting:
        blocked = "paused"
    return Health(
        status=status,
        steps=state.completed,
        in_flight=state.outstanding,
        oldest_step_seconds=oldest,
        running=running,
        waiting=waiting,
        blocked=blocked if state.waiting else "",
        reason="" if dead is None else str(dead),
    )
