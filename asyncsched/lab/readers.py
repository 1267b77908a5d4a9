"""Reading workload traces: published ones and an engine's own event log."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from ..errors import TraceError
from .readers_formats import FORMATS, Format
from .readers_log import log_requests
from .trace import Trace, TraceRequest

FormatName = Literal["auto", "azure", "burstgpt", "mooncake", "llmservingsim", "events"]


def read_trace(path: str | os.PathLike[str], format: FormatName = "auto", *, seed: int = 0) -> Trace:
    """Read a trace from a file.

    ==================  ==========================================================================
    ``azure``           Azure LLM inference traces, csv (Patel et al., Splitwise, ISCA 2024)
    ``burstgpt``        BurstGPT, csv (Wang et al., 2024)
    ``mooncake``        Mooncake, JSON lines (Qin et al., FAST 2025): prompts share 512-token blocks
    ``llmservingsim``   LLMServingSim 2 workloads, JSON lines: prompts share 16-token blocks
    ``events``          what ``record_events`` wrote: prompts share the engine's pages
    ==================  ==========================================================================

    Arrivals are counted from the first. Requests without prompt or output tokens are left out. Where stamps
    are so coarse that two requests or more share one on average, arrivals are spread at random over the time
    to the next stamp, in the file's order (as a Poisson process would, given their number). ``Trace.notes``
    tells of both.

    Args:
        path: The file.
        format: One of the above; ``"auto"`` tells by the first line.
        seed: For spreading arrivals.

    Raises:
        TraceError: the file cannot be read, is none of these, holds no requests, or has a broken line.
    """
    with _opened(path) as file:
        names = _field_names(file)
        if format == "auto":
            format = _recognised(names, path)
        if format == "events":
            requests, notes = log_requests(path)
        elif format in FORMATS:
            requests, notes = _read(file, FORMATS[format], names, path)
            if FORMATS[format].coarse:
                requests = _spread(requests, notes, seed)
        else:
            raise TraceError(f"format={format!r}: use auto, events, {', '.join(FORMATS)}")
    if not requests:
        raise TraceError(f"{path} holds no requests with prompt and output tokens")
    first = min(request.at for request in requests)
    return Trace(Path(path).stem, [replace(request, at=request.at - first) for request in requests], tuple(notes))


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """The file as text; what goes wrong while it is read becomes a ``TraceError``."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as exc:
        raise TraceError(f"{path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise TraceError(
            f"{path} is not a text file ({exc.reason} at byte {exc.start}); unpack it if it is compressed"
        ) from exc


def _field_names(file: TextIO) -> frozenset[str]:
    """Names in the first line, of columns or of JSON fields. Leaves the file at its beginning."""
    line = next((line for line in file if line.strip()), "").strip()
    file.seek(0)
    if line.startswith("{"):
        try:
            return frozenset(json.loads(line))
        except ValueError:
            return frozenset()
    return frozenset(line.split(","))


def _recognised(names: frozenset[str], path: str | os.PathLike[str]) -> FormatName:
    if "event" in names:
        return "events"
    for format in FORMATS.values():
        if names >= format.fields:
            return format.name
    raise TraceError(
        f"{path}, line 1: the first line fits no known trace; known are event logs (JSON lines), "
        + ", ".join(f"{format.name} ({format.looks})" for format in FORMATS.values())
    )


def _read(
    file: TextIO, format: Format, names: frozenset[str], path: str | os.PathLike[str]
) -> tuple[list[TraceRequest], list[str]]:
    """Every request, and how many rows were left out."""
    if not names >= format.fields:
        raise TraceError(f"{path}, line 1: no {format.name} trace, which has {format.looks}")
    requests = []
    empty = 0
    for line, record in (_rows if format.table else _objects)(file, path):
        try:
            request = format.request(record)
        except (KeyError, TypeError, ValueError) as exc:
            what = f"there is no field {exc}" if isinstance(exc, KeyError) else exc
            raise TraceError(f"{path}, line {line}: {what}; correct or delete the line") from exc
        if request is None:
            empty += 1
        else:
            requests.append(request)
    notes = [f"{empty} of {empty + len(requests)} rows without prompt or output tokens left out"] if empty else []
    return requests, notes


def _rows(file: Iterable[str], path: object) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise TraceError(
                    f"{path}, line {reader.line_num}: another number of columns than the first line has; "
                    "correct or delete the line"
                )
            yield reader.line_num, row
    except csv.Error as exc:
        raise TraceError(f"{path}, line {reader.reader.line_num}: {exc}; correct or delete the line") from exc


def _objects(file: Iterable[str], path: object) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as exc:
            raise TraceError(f"{path}, line {number}: no JSON ({exc}); correct or delete the line") from exc
        if not isinstance(record, dict):
            raise TraceError(f"{path}, line {number}: not a JSON object; correct or delete the line")
        yield number, record


def _spread(requests: list[TraceRequest], notes: list[str], seed: int) -> list[TraceRequest]:
    """Arrivals spread over the ticks of a coarse clock, if it is one."""
    requests = sorted(requests, key=lambda request: request.at)
    stamps = np.array([request.at for request in requests])
    distinct = np.unique(stamps)
    if len(distinct) < 2 or len(stamps) < 2 * len(distinct):
        return requests
    tick = float(np.median(np.diff(distinct)))
    notes.append(
        f"stamps come in ticks of {tick:g} s with {len(stamps) / len(distinct):.1f} requests each: spread over the tick"
    )
    arrivals = np.sort(stamps + tick * np.random.default_rng(seed).random(len(stamps)))
    return [replace(request, at=float(at)) for request, at in zip(requests, arrivals, strict=True)]
