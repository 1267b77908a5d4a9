"""Policies of a test's own, one for each thing that a policy can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asyncsched.contract import StepPlan
from asyncsched.policy import EngineView, PrefillBudget, PrefixView, RequestView, StepReport

from .control_helpers import Sent, Simulation

Waiting = Sequence[RequestView]


class Arrival:
    """Arrival order, in a class of the test's own."""

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return waiting


class Backwards(Arrival):
    """Latest first."""

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return list(waiting)[::-1]


class Urgent(Arrival):
    """Lower priority numbers first; they may take the rows of higher ones, of the latest first."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.orders: list[int] = []

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        self.orders.append(view.step)
        return sorted(waiting, key=lambda request: (request.priority, request.number))

    def preempt_for(self, request: RequestView, running: Waiting, view: EngineView) -> Iterable[RequestView]:
        self.asked.append(request.number)
        return [other for other in reversed(running) if other.priority > request.priority]


class Alone:
    """The whole step for prompts, without the rows that decode."""

    def budget(self, view: EngineView) -> PrefillBudget:
        return PrefillBudget(view.token_budget, view.token_budget, decode=False)


def prompts_of(plan: StepPlan) -> int:
    """Prompt tokens in a plan."""
    return sum(len(chunk.tokens) for chunk in plan.prefill)


def has_row(sim: Simulation, sent: Sent) -> bool:
    """Whether a request holds a row now."""
    return sent.number in [request.number for request in sim.state.running()]


class Budget:
    def budget(self, view: EngineView) -> PrefillBudget:
        return PrefillBudget(9, 9)


class Victims:
    def __init__(self) -> None:
        self.asked = 0

    def victims(self, running: Waiting, pages: int, view: EngineView) -> Iterable[RequestView]:
        self.asked += 1
        return ()


SCARCE: dict[str, Any] = {"reserve": "prompt", "pages": 21, "max_rows": 3, "max_preemptions": 100}


class Told:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.steps = 0
        self.finished: list[int] = []

    def on_submit(self, request: RequestView) -> None:
        self.submitted.append(request.number)

    def on_step(self, report: StepReport) -> None:
        self.steps += 1

    def on_finish(self, request: RequestView) -> None:
        self.finished.append(request.number)


class Everything(Told, Arrival):
    """One object in every slot."""

    def budget(self, view: EngineView) -> PrefillBudget:
        return PrefillBudget(view.token_budget, view.token_budget)

    def victims(self, running: Waiting, pages: int, view: EngineView) -> Iterable[RequestView]:
        return ()

    def key(self, prefix: PrefixView) -> int:
        return prefix.last_used

    def admit(self, request: RequestView, view: EngineView) -> None:
        return None


KINDS = ("policy", "budget_policy", "preemption_policy", "eviction_policy", "admission_policy")
