"""When requests come and how long they are: drawn from a gamma process, or read from a trace."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to be sent.

    Attributes:
        at: Seconds from the start of the run.
        input_len: Prompt tokens.
        output_len: Tokens to generate.
    """

    at: float
    input_len: int
    output_len: int


def gamma_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times in seconds, with gamma-distributed gaps of mean ``1 / rate``.

    As in vLLM's serving benchmark the times are stretched so that the last request comes at exactly
    ``count / rate``, which takes the luck of the draw out of the offered load.

    Args:
        count: How many.
        rate: Requests per second; infinite is all at once.
        burstiness: Shape of the distribution: 1 is a Poisson process, less is burstier, more is more
            even, infinite is a constant gap.
        seed: The same seed gives the same times, and for another rate the same ones stretched.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = np.random.default_rng([seed, 0]).gamma(burstiness, 1 / burstiness, count)
    times = np.cumsum(gaps)
    stretched: list[float] = (times / times[-1] * (count / rate)).tolist()
    return stretched


def uniform_lengths(count: int, mean: int, range_ratio: float, rng: np.random.Generator) -> list[int]:
    """Whole numbers between ``mean × (1 - range_ratio)`` and ``mean × (1 + range_ratio)``, at least 1, all equally likely."""
    low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
    lengths: list[int] = np.maximum(1, rng.integers(low, high, count, endpoint=True)).tolist()
    return lengths


def synthetic(
    count: int, rate: float, burstiness: float, input_len: int, output_len: int, range_ratio: float, seed: int
) -> list[Arrival]:
    """Arrivals of a gamma process with random lengths; the lengths depend on neither rate nor burstiness."""
    rng = np.random.default_rng([seed, 1])
    inputs = uniform_lengths(count, input_len, range_ratio, rng)
    outputs = uniform_lengths(count, output_len, range_ratio, rng)
    return list(map(Arrival, gamma_times(count, rate, burstiness, seed), inputs, outputs))


def read_trace(path: Path, count: int) -> list[Arrival]:
    """The first ``count`` requests of a trace, in order of arrival, the first of them at 0.

    Args:
        path: A ``.csv`` in the format of the Azure LLM inference traces (columns ``TIMESTAMP``,
            ``ContextTokens``, ``GeneratedTokens``), or a ``.jsonl`` with an object per line
            (``timestamp`` in seconds, ``input_length``, ``output_length``). Requests without prompt
            or without output are left out.
        count: How many at most.

    Raises:
        ValueError: the file is not such a trace, or has no request.
    """
    read = {".csv": _azure_rows, ".jsonl": _json_rows}.get(path.suffix)
    if read is None:
        raise ValueError(f"{path}: a trace is a .csv or a .jsonl file")
    try:
        rows = sorted((row for row in read(path) if row.input_len > 0 and row.output_len > 0), key=lambda row: row.at)
    except KeyError as error:
        raise ValueError(f"{path} has no column {error}") from error
    if not rows:
        raise ValueError(f"{path} has no request with a prompt and an output")
    return [replace(row, at=row.at - rows[0].at) for row in rows[:count]]


def _azure_rows(path: Path) -> Iterator[Arrival]:
    first: datetime | None = None
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines):
            stamp = datetime.fromisoformat(row["TIMESTAMP"])
            first = first or stamp
            yield Arrival((stamp - first).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _json_rows(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            yield Arrival(float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]))


def scaled(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """The same requests, ``factor`` times as fast."""
    return [replace(arrival, at=arrival.at / factor) for arrival in arrivals]


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests per second between the first and the last; infinite if all come at once."""
    seconds = arrivals[-1].at - arrivals[0].at
    return (len(arrivals) - 1) / seconds if seconds > 0 else math.inf
