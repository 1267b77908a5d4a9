"""What a simulation is judged by: latencies, throughput, goodput, fairness, starvation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .recorder import Floats, RequestRecord, Timeline
from .simulator import SimulationResult


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in five numbers, in the unit of what was measured; NaN if there was nothing."""

    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float] | Floats) -> Spread:
        """Of these values."""
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.float64)
        if not len(array):
            return cls(*[float("nan")] * 5)
        p50, p90, p99 = np.percentile(array, (50, 90, 99))
        return cls(float(array.mean()), float(p50), float(p90), float(p99), float(array.max()))


def kept_targets(record: RequestRecord) -> bool:
    """True if the request finished, and within its own deadline and targets."""
    asked = record.request
    limits = ((record.ttft, asked.ttft_target), (record.tpot, asked.tpot_target), (record.e2e, asked.deadline))
    within = all(limit is None or seconds is None or seconds <= limit for seconds, limit in limits)
    return record.finished is not None and within


@dataclass(frozen=True, slots=True)
class Measures:
    """One run in numbers. Times in seconds, rates per second of virtual time.

    Attributes:
        completed, refused: Requests that finished, and that were refused or failed.
        ttft, tpot, itl, e2e: Latencies of those that finished (``itl``: of every two tokens in a row).
        wait: From arrival to admission.
        request_rate, output_rate: Requests and output tokens.
        good_rate: Requests that kept their targets.
        good_share: The same, of all that arrived (0 … 1).
        hit_rate: Prompt tokens found in the cache (0 … 1).
        preemptions: Rows taken away.
        fairness: Jain's index over the tokens that tenants were served while all of them had requests
            waiting (1 is even; NaN if that never happened).
        worst_gap: Largest difference, in tokens, between what two tenants were served over a time in which
            both had requests waiting throughout (what VTC bounds; Sheng et al., OSDI 2024).
        longest_wait: Of any request that finished, in seconds: where starvation shows.
        seconds, wall_seconds: Virtual and real time of the run.
    """

    completed: int
    refused: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    wait: Spread
    request_rate: float
    output_rate: float
    good_rate: float
    good_share: float
    hit_rate: float
    preemptions: int
    fairness: float
    worst_gap: float
    longest_wait: float
    seconds: float
    wall_seconds: float


def measure(result: SimulationResult) -> Measures:
    """Judge a run."""
    records = result.requests
    done = [record for record in records if record.finished is not None]
    good = sum(kept_targets(record) for record in done)
    seconds = result.seconds or float("nan")
    wait = Spread.of(record.admitted - record.arrived for record in done if record.admitted is not None)
    return Measures(
        completed=len(done),
        refused=len(records) - len(done),
        ttft=Spread.of(record.ttft for record in done if record.ttft is not None),
        tpot=Spread.of(record.tpot for record in done if record.tpot is not None),
        itl=Spread.of(result.gaps),
        e2e=Spread.of(record.e2e for record in done if record.e2e is not None),
        wait=wait,
        request_rate=len(done) / seconds,
        output_rate=sum(record.output_tokens for record in done) / seconds,
        good_rate=good / seconds,
        good_share=good / len(records) if records else float("nan"),
        hit_rate=result.statistics.hit_rate,
        preemptions=result.statistics.preemptions,
        fairness=jain(contested_service(result.timeline)),
        worst_gap=worst_gap(result.timeline),
        longest_wait=wait.maximum,
        seconds=result.seconds,
        wall_seconds=result.wall_seconds,
    )


def contested_service(timeline: Timeline) -> list[float]:
    """Tokens served to each tenant over the times in which every tenant had a backlog."""
    if not timeline.service or len(timeline.at) < 2:
        return []
    contested = np.all([backlog > 0 for backlog in timeline.backlog.values()], axis=0)
    whole = contested[:-1] & contested[1:]
    return [float(np.diff(served)[whole].sum()) for served in timeline.service.values()]


def jain(shares: list[float]) -> float:
    """Jain's fairness index: 1 if all are equal, 1/n if one has everything (Jain, Chiu, Hawe, 1984)."""
    array = np.array(shares, np.float64)
    squares = float((array**2).sum())
    return float(array.sum() ** 2 / (len(array) * squares)) if squares else float("nan")


def worst_gap(timeline: Timeline) -> float:
    """Largest service gap between two tenants over any stretch in which both had a backlog; 0 with one tenant."""
    worst = 0.0
    tenants = sorted(timeline.service)
    for index, one in enumerate(tenants):
        for other in tenants[index + 1 :]:
            both = (timeline.backlog[one] > 0) & (timeline.backlog[other] > 0)
            lead = timeline.service[one] - timeline.service[other]
            for stretch in _stretches(both):
                worst = max(worst, float(np.ptp(lead[stretch])))
    return worst


def _stretches(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[slice]:
    """Runs of true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [slice(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]
