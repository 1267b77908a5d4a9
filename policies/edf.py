"""Earliest deadline first."""

from __future__ import annotations

from dataclasses import dataclass

from ._due_times import DueOrder


@dataclass(eq=False)
class EDF(DueOrder):
    """The request that is due first goes first; what cannot be in time any more goes last.

    Due is the ``deadline``, or, while there is no token, the ``ttft_target`` if that comes first;
    requests with neither follow by arrival. Earliest deadline first meets every deadline on one
    machine if any order does (Liu and Layland, JACM 1973), but under overload it makes everyone late,
    since it serves those first that are hopeless; so requests that would be late by the forecast of
    the cost model go behind all others. Those that have waited ``age_steps`` steps get every fourth
    admission.

    Not for requests of very different lengths: ``least-slack`` starts a long one earlier than a short
    one with the same deadline. Without deadlines and targets it is ``fcfs``.

    Args:
        feasibility: Put requests that are forecast to be late last.
        age_steps: Steps after which a waiting request counts as starved.
    """

    api_version = 1
    name = "edf"

    def _urgency(self, number: int) -> float:
        return self._times.due[number]
