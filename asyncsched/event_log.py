"""The event log: what an engine did, as JSON lines, for replays, cost models and timelines."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from .errors import TraceError
from .events import Admitted, Event, Finished, Preempted, StepCompleted, Submitted

if TYPE_CHECKING:
    from .engine import Engine

CAPACITY = 100_000
"""Events kept while the disk is busy; beyond that the oldest are lost, which the log says."""

PAUSE = 0.1
"""Seconds between two writes: a write costs a thread hand-over, which every step should not."""


@dataclass(frozen=True, slots=True)
class LogStarted:
    """The first record of a recording: the engine, and the time of day.

    ``at`` is on the clock of the events that follow, ``unix_time`` the same moment in seconds since 1970.
    """

    at: float
    unix_time: float
    model: str
    max_rows: int
    pages: int
    page_size: int
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class EventsLost:
    """So many events before this point are missing, since they could not be written fast enough."""

    count: int


LogRecord = LogStarted | EventsLost | Event

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (LogStarted, EventsLost, Submitted, Admitted, Preempted, Finished, StepCompleted)
}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values()}


async def record_events(
    engine: Engine, path: str | os.PathLike[str], *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Write what happens in a running engine to a file, until cancelled or until the engine is closed.

    Run it in a task: ``await tasks.start(record_events, engine, path)`` returns when it listens. A file that
    exists is continued; each recording begins with a ``LogStarted``. Writing happens in a worker thread. The
    file may be read at any time; it is a moment behind.

    Raises:
        OSError: the file cannot be written.
    """
    events = engine.events(CAPACITY)
    writer = _Writer(Path(path))
    try:
        await writer.write([_started(engine)])
        task_status.started()
        while batch := await events.batch():
            await writer.write(batch, events.dropped)
            await anyio.sleep(PAUSE)
    finally:
        events.close()
        with anyio.CancelScope(shield=True):
            await writer.close(await events.batch(), events.dropped)


def read_events(path: str | os.PathLike[str]) -> Iterator[LogRecord]:
    """The records of an event log, in order. Blocks; reads the file bit by bit.

    A last line that is still being written, or was cut off by a crash, is left out.

    Raises:
        TraceError: the file cannot be read, or is not an event log.
    """
    broken: TraceError | None = None
    started = False
    for where, line in _lines(path):
        record = _decode(line, where)
        if broken is not None and not isinstance(record, LogStarted):
            raise broken
        if isinstance(record, TraceError):
            broken = record
            continue
        if not (started or isinstance(record, LogStarted)):
            raise TraceError(
                f"{where}: an event log begins with LogStarted; this is something else, or its first lines are gone"
            )
        broken, started = None, True
        yield record
    if broken is not None and not started:
        raise broken


def _started(engine: Engine) -> LogStarted:
    # A control plane with a loop of its own stamps events with that loop's clock, which is the system's.
    now = time.monotonic() if engine.config.own_loop else anyio.current_time()
    limits = engine.limits
    return LogStarted(
        now, time.time(), engine.model_name, limits.max_rows, limits.pages, limits.page_size, limits.max_model_len,
        limits.vocab_size,
    )  # fmt: skip


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """The lines that are not blank, each with a name for error messages."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except OSError as exc:
        raise TraceError(f"{path} cannot be read: {exc.strerror}") from exc


def _encode(record: LogRecord) -> str:
    kind = type(record)
    values = {name: getattr(record, name) for name in _FIELDS[kind]}
    return json.dumps({"event": kind.__name__, **values}, separators=(",", ":")) + "\n"


def _decode(line: str, where: str) -> LogRecord | TraceError:
    """A record, or the error to raise if the line was not cut off."""
    try:
        values = json.loads(line)
        name = values.pop("event")
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        return TraceError(f"{where}: not a record of an event log ({exc!r}); delete the line")
    try:
        if "prefix" in values:
            values["prefix"] = tuple(values["prefix"])
        if "prefill" in values:
            values["prefill"] = tuple((start, size) for start, size in values["prefill"])
        record: LogRecord = _KINDS[name](**values)
    except (TypeError, ValueError, KeyError) as exc:
        raise TraceError(
            f"{where}: {name!r} with fields this version does not know ({exc}); read it with the version that wrote it"
        ) from exc
    return record


class _Writer:
    """Appends records to a file, in worker threads.

    A natively cancelled task does not wait for its thread, so two may be at work at once: the first to come
    writes everything that is pending, in order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # never taken on the loop
        self._pending: deque[Sequence[LogRecord]] = deque()
        self._file: BinaryIO | None = None
        self._closed = False
        self._lost = 0
        self._limiter = anyio.CapacityLimiter(2)  # its own: the default one belongs to the application

    async def write(self, records: Sequence[LogRecord], lost: int = 0) -> None:
        """Append and flush. ``lost``: events that were lost before these records, in all so far."""
        self._put(records, lost)
        await anyio.to_thread.run_sync(self._write, limiter=self._limiter)

    async def close(self, records: Sequence[LogRecord], lost: int) -> None:
        """Append the last records and close the file."""
        self._put(records, lost)
        await anyio.to_thread.run_sync(self._close, limiter=self._limiter)

    def _put(self, records: Sequence[LogRecord], lost: int) -> None:
        if lost > self._lost:
            self._pending.append([EventsLost(lost - self._lost)])
            self._lost = lost
        self._pending.append(records)

    def _write(self) -> None:
        """Worker thread."""
        with self._lock:
            if self._closed:
                return
            try:
                if self._file is None:
                    self._file = _opened(self._path)
                while self._pending:
                    self._file.write("".join(map(_encode, self._pending.popleft())).encode())
                self._file.flush()
            except OSError:
                self._end()  # the disk is full, say: one error is enough
                raise

    def _close(self) -> None:
        """Worker thread."""
        self._write()
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._closed = True
        if self._file is not None:
            with suppress(OSError):  # what could not be written has been reported
                self._file.close()


def _opened(path: Path) -> BinaryIO:
    """The file, at its end, on a new line: the last recording may have been cut off."""
    file = path.open("ab+")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file
