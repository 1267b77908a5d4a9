"""What the tests of several order policies share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncsched.policy import EngineView, RequestView

from .control_helpers import Simulation, prompt


def leftovers(policy: object) -> dict[str, Any]:
    """What a policy still keeps: its containers, and those of its parts, that are not empty."""
    found: dict[str, Any] = {}
    for name, value in vars(policy).items():
        if isinstance(value, dict | list | set | tuple):
            if value:
                found[name] = value
        elif type(value).__module__.startswith("asyncsched.policies"):
            slots = {slot: getattr(value, slot) for slot in getattr(type(value), "__slots__", ()) if hasattr(value, slot)}
            parts = vars(value) if hasattr(value, "__dict__") else slots
            found |= {f"{name}.{part}": kept for part, kept in parts.items() if isinstance(kept, dict | list | set) and kept}
    for passing in ("_patience._others", "_patience._pulled", "_roster._pulled"):  # one count; cleared by the next order
        found.pop(passing, None)
    return found


def numbers(policy: Any, waiting: Sequence[RequestView], view: EngineView) -> list[int]:
    """The whole order as request numbers."""
    return [request.number for request in policy.order(waiting, view)]


async def busy_life(sim: Simulation) -> None:
    """Requests that end in every way, some of them while they wait."""
    for index in range(6):
        sim.send(prompt(6 + index, index % 3), 3 + index)
    aborted = sim.send(prompt(4, 9), 2)
    await sim.settle()
    sim.engine.abort(aborted.stream.request_id)
    await sim.step(2)
    sim.engine.abort(sim.sent[0].stream.request_id)
    await sim.finish()
