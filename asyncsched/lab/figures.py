"""The figures of a comparison, in the order in which they are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .measures import Measures
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a comparison.

    Attributes:
        name: With its unit.
        get: From the measures.
        form: How it is formatted.
        better: Which way is better; 0 if neither is.
        needs: Shown only if the trace has several tenants, or targets.
        last: The last of a group.
    """

    name: str
    get: Callable[[Measures], float]
    form: str
    better: Literal[-1, 0, 1]
    needs: Literal["", "tenants", "targets"] = ""
    last: bool = False


def _spread(name: str, attribute: str, unit: str, scale: float, form: str) -> list[Figure]:
    def part(which: str) -> Callable[[Measures], float]:
        return lambda measures: scale * float(getattr(getattr(measures, attribute), which))

    return [
        Figure(f"{name} {which}, {unit}", part(which), form, -1, last=which == "p99") for which in ("mean", "p50", "p90", "p99")
    ]


FIGURES: tuple[Figure, ...] = (
    *_spread("TTFT", "ttft", "s", 1.0, ".2f"),
    *_spread("TPOT", "tpot", "ms", 1e3, ".1f"),
    *_spread("ITL", "itl", "ms", 1e3, ".1f"),
    *_spread("E2E", "e2e", "s", 1.0, ".2f"),
    Figure("requests/s", lambda m: m.request_rate, ".2f", 1),
    Figure("output tokens/s", lambda m: m.output_rate, ".0f", 1),
    Figure("goodput, requests/s", lambda m: m.good_rate, ".2f", 1, "targets"),
    Figure("kept their targets, %", lambda m: 100 * m.good_share, ".1f", 1, "targets", last=True),
    Figure("prompt tokens from cache, %", lambda m: 100 * m.hit_rate, ".1f", 1),
    Figure("completed", lambda m: m.completed, ".0f", 1),
    Figure("refused or failed", lambda m: m.refused, ".0f", -1),
    Figure("preemptions", lambda m: m.preemptions, ".0f", -1),
    Figure("longest wait, s", lambda m: m.longest_wait, ".1f", -1, last=True),
    Figure("fairness between tenants", lambda m: m.fairness, ".3f", 1, "tenants"),
    Figure("worst service gap, tokens", lambda m: m.worst_gap, ".0f", -1, "tenants", last=True),
    Figure("virtual time, s", lambda m: m.seconds, ".0f", 0),
    Figure("real time, s", lambda m: m.wall_seconds, ".1f", 0),
)


def figures_for(trace: Trace) -> list[Figure]:
    """Those that say something about this trace."""
    has = {""}
    if len({request.tenant for request in trace.requests}) > 1:
        has.add("tenants")
    if any((r.ttft_target, r.tpot_target, r.deadline) != (None, None, None) for r in trace.requests):
        has.add("targets")
    return [figure for figure in FIGURES if figure.needs in has]


def is_best(figure: Figure, value: float, values: Sequence[float]) -> bool:
    """True if no run does better, as far as the format shows, and some do worse."""
    texts = {format(known, figure.form) for known in values if not math.isnan(known)}
    if not figure.better or len(texts) < 2 or math.isnan(value):
        return False
    best = (max if figure.better > 0 else min)(known for known in values if not math.isnan(known))
    return format(value, figure.form) == format(best, figure.form)
