"""Least slack first."""

from __future__ import annotations

from dataclasses import dataclass

from ._due_times import DueOrder


@dataclass(eq=False)
class LeastSlack(DueOrder):
    """The request that can wait least goes first: slack is the time left until it is due, less the time it will take.

    Like ``edf``, but a long request is started earlier than a short one with the same deadline. The
    time it will take is the cost model's forecast for the part of its prompt that is not cached, and
    for a ``deadline`` its expected output at the present step time. Least laxity first (Mok, MIT 1983)
    is optimal on one machine as ``edf`` is, and as bad under overload, so a request without slack left
    goes behind all others. Those that have waited ``age_steps`` steps get every fourth admission.

    Not while the cost model has seen nothing (it is ``edf`` then), nor if output lengths are anybody's
    guess: they decide the order. Without deadlines and targets it is ``fcfs``.

    Args:
        feasibility: Put requests that have no slack left last.
        age_steps: Steps after which a waiting request counts as starved.
    """

    api_version = 1
    name = "least-slack"

    def _urgency(self, number: int) -> float:
        return self._times.start[number]  # slack is this less the present time, so the order is the same
