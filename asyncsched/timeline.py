"""What ran when: a file for Perfetto or chrome://tracing, from which the overlap can be seen."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from .errors import EngineError
from .events import Admitted, Event, Finished, Preempted, Submitted
from .recorder import CAPACITY, Recorder

if TYPE_CHECKING:
    from .own_loop import OwnLoopRun
    from .run import Run

_CONTROL, _REQUESTS = 1, 2
_TASKS = ("admission", "planner", "eviction", "finish")
_TRACKS = {name: number for number, name in enumerate((*_TASKS, "compute thread", "device"), 1)}


class Trace:
    """A recording of a running engine; an async context manager that writes the file when it ends.

    The file is JSON in Chrome's trace event format: open it at https://ui.perfetto.dev or chrome://tracing.
    One process has a track for each control task, the compute thread and the device, and counters of
    requests, pages and steps in flight; another has one track per request. Its times begin at
    ``baseTimeNanoseconds``, as in the traces of ``torch.profiler``; steps have the same names there.

    Args:
        run: Of the running engine.
        path: Written at the end, replaced if it exists.
    """

    def __init__(self, run: Run | OwnLoopRun, path: str | os.PathLike[str]) -> None:
        self._run = run
        self._path = Path(path)
        self._recorder = Recorder()

    async def __aenter__(self) -> Trace:
        """Begin.

        Raises:
            EngineError: another recording is under way.
        """
        self._state = self._run.control.state
        if self._state.recorder is not None:
            raise EngineError("a timeline of this engine is being recorded already; wait until that ends")
        self._events = self._run.listen(CAPACITY)
        # Events are stamped by the loop's clock, which under a test may be no real one.
        own_loop = self._run.control is not self._run
        self._offset = time.monotonic() - (time.monotonic() if own_loop else anyio.current_time())
        self._began, self._unix = time.monotonic(), time.time_ns()
        self._state.recorder = self._recorder
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        self._state.recorder = None
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()  # events of a loop of its own are handed over in turns of this one
            self._events.close()
            events = await self._events.batch()
            await anyio.to_thread.run_sync(self._write, events, time.monotonic())

    def _write(self, events: list[Event], ended: float) -> None:
        """Worker thread."""
        records = trace_records(self._recorder, events, self._offset, self._began, ended)
        dropped = self._events.dropped
        document = {
            "baseTimeNanoseconds": self._unix,
            "displayTimeUnit": "ms",
            "droppedEvents": dropped,
            "traceEvents": list(records),
        }
        self._path.write_text(json.dumps(document, separators=(",", ":")), "utf-8")


def trace_records(
    recorder: Recorder, events: Iterable[Event], offset: float, began: float, ended: float
) -> Iterator[dict[str, Any]]:
    """The records of a trace file.

    Args:
        recorder: Spans and counts, in ``time.monotonic`` seconds.
        events: Of the engine, in order.
        offset: Seconds from the events' clock to ``time.monotonic``.
        began, ended: Of the recording, in ``time.monotonic`` seconds; what began before is cut off there.
    """

    def stamp(seconds: float) -> float:
        return round((max(seconds, began) - began) * 1e6, 3)

    def complete(process: int, track: int, name: str, start: float, end: float, **details: Any) -> dict[str, Any]:
        at = stamp(start)
        span = {"ph": "X", "pid": process, "tid": track, "name": name, "ts": at, "dur": round(max(stamp(end) - at, 0.0), 3)}
        return {**span, "args": details} if details else span

    yield _name("process_name", _CONTROL, 0, "engine")
    yield _name("process_name", _REQUESTS, 0, "requests")
    for track, number in _TRACKS.items():
        yield _name("thread_name", _CONTROL, number, track)
    for span in recorder.spans:
        yield complete(_CONTROL, _TRACKS[span.track], span.name, span.began, span.ended)
    for counts in recorder.counts:
        at = {"ph": "C", "pid": _CONTROL, "ts": stamp(counts.at)}
        yield {**at, "name": "requests", "args": {"running": counts.running, "waiting": counts.waiting}}
        yield {**at, "name": "pages", "args": {"in use": counts.used_pages, "cached": counts.cached_pages}}
        yield {**at, "name": "steps in flight", "args": {"steps": counts.in_flight}}
    for number, request_id, spans in request_spans(events, offset, began, ended):
        yield _name("thread_name", _REQUESTS, number, request_id)
        for name, start, end, details in spans:
            yield complete(_REQUESTS, number, name, start, end, **details)


RequestSpans = list[tuple[str, float, float, dict[str, Any]]]


def request_spans(
    events: Iterable[Event], offset: float, began: float, ended: float
) -> Iterator[tuple[int, str, RequestSpans]]:
    """Number, id and phases (waiting, running) of every request that an event tells of, in seconds and order."""
    names: dict[int, str] = {}
    found: dict[int, RequestSpans] = {}
    phase: dict[int, tuple[str, float, dict[str, Any]]] = {}

    def enter(event: Any, name: str, details: dict[str, Any]) -> None:
        leave(event, "waiting" if name == "running" else "running", {})
        phase[event.number] = name, event.at + offset, details

    def leave(event: Any, unseen: str, more: dict[str, Any]) -> None:
        names[event.number] = event.request_id
        name, since, details = phase.pop(event.number, (unseen, began, {}))
        if since < event.at + offset:
            found.setdefault(event.number, []).append((name, since, event.at + offset, {**details, **more}))

    for event in events:
        if isinstance(event, Submitted):
            names[event.number] = event.request_id
            details = {"prompt tokens": event.prompt_tokens, "tenant": event.tenant, "priority": event.priority}
            phase[event.number] = "waiting", event.at + offset, details
        elif isinstance(event, Admitted):
            enter(event, "running", {"row": event.row, "cached tokens": event.cached_tokens})
        elif isinstance(event, Preempted):
            enter(event, "waiting", {"preempted after tokens": event.output_tokens})
        elif isinstance(event, Finished):
            leave(event, "running", {"ended by": event.finish_reason, "output tokens": event.output_tokens})
    for number, (name, since, details) in phase.items():
        found.setdefault(number, []).append((name, since, ended, details))
    for number, spans in sorted(found.items()):
        yield number, names[number], spans


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": {"name": name}}
