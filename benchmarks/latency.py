"""Latency, throughput and goodput of a run, from what the consumers of its requests saw.

Field names, units and definitions are those of the result file of ``vllm bench serve``: TPOT is
``(e2el - ttft) / (output tokens - 1)``; an ITL is the gap between two chunks, so tokens that reached
the consumer merged in one chunk count as one gap; standard deviations are of the population and
percentiles interpolate. Three things differ: latencies count from the moment a request was due,
``max_concurrent_requests`` is exact instead of the maximum over whole seconds, and a metric that no
request has is ``None`` instead of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Timeline:
    """One request as its consumer saw it; clock readings in seconds.

    Attributes:
        due: When it had to be sent. Latencies count from here: in one process with the engine, a
            busy event loop that sends it late is the engine's delay, too.
        input_tokens: Length of the prompt.
        output_tokens: Tokens received.
        stamps: When each chunk with tokens was received.
        error: Why it failed, if it did.
    """

    due: float
    input_tokens: int
    output_tokens: int = 0
    stamps: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def completed(self) -> bool:
        """True if it did not fail."""
        return self.error is None and bool(self.stamps)

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.stamps[0] - self.due

    @property
    def e2el(self) -> float:
        """End-to-end latency, seconds: until the last token."""
        return self.stamps[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds; ``None`` if there was only one."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Gaps between chunks, seconds."""
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must meet to count as good: most seconds to the first token and per token after it."""

    ttft: float = math.inf
    tpot: float = math.inf

    def met(self, timeline: Timeline) -> bool:
        """True if a completed request met them all; the TPOT of a single token counts as 0."""
        return timeline.ttft <= self.ttft and (timeline.tpot or 0.0) <= self.tpot


def report(timelines: Sequence[Timeline], duration: float, targets: Targets) -> dict[str, Any]:
    """All figures of a run of ``duration`` seconds; only requests that completed count, except in ``failed``."""
    done = [timeline for timeline in timelines if timeline.completed]
    inputs = sum(timeline.input_tokens for timeline in done)
    outputs = sum(timeline.output_tokens for timeline in done)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(map(targets.met, done)) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_concurrent_requests": most_at_once(done),
        **summary("ttft", (timeline.ttft for timeline in done)),
        **summary("tpot", (timeline.tpot for timeline in done if timeline.tpot is not None)),
        **summary("itl", (gap for timeline in done for gap in timeline.itls)),
        **summary("e2el", (timeline.e2el for timeline in done)),
    }


def summary(name: str, seconds: Iterable[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles of one metric, in milliseconds."""
    values = np.fromiter(seconds, np.float64) * 1e3
    names = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", *(f"p{percent}" for percent in PERCENTILES))]
    if not len(values):
        return dict.fromkeys(names)
    numbers = [np.mean(values), np.median(values), np.std(values), *np.percentile(values, PERCENTILES)]
    return dict(zip(names, map(float, numbers), strict=True))


def most_at_once(timelines: Iterable[Timeline]) -> int:
    """Most requests that were under way at one moment."""
    changes = [change for timeline in timelines for change in ((timeline.due, 1), (timeline.stamps[-1], -1))]
    under_way = most = 0
    for _, change in sorted(changes):  # at one moment, ends (-1) come before starts
        under_way += change
        most = max(most, under_way)
    return most
