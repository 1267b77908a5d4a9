"""An engine's event log as a trace."""

from __future__ import annotations

import os
from collections import Counter

from ..errors import TraceError
from ..event_log import EventsLost, LogStarted, read_events
from ..events import Finished, Submitted
from .trace import TraceRequest


def log_requests(path: str | os.PathLike[str]) -> tuple[list[TraceRequest], list[str]]:
    """The requests that ended with an answer, at the time of day they arrived, and notes on the others.

    An aborted request counts as one with a shorter answer: the engine computed it so far. Prefixes are
    related within one recording only, as every engine hashes with a key of its own.

    Raises:
        TraceError: the file cannot be read or is not an event log.
    """
    requests: list[TraceRequest] = []
    left_out: Counter[str] = Counter()
    lost = recordings = 0
    open_requests: dict[int, Submitted] = {}
    start: LogStarted | None = None
    for record in read_events(path):
        if isinstance(record, LogStarted):
            left_out["not finished"] += len(open_requests)
            open_requests = {}
            start = record
            recordings += 1
        elif isinstance(record, Submitted):
            open_requests[record.number] = record
        elif isinstance(record, Finished):
            submitted = open_requests.pop(record.number, None)
            if submitted is None:
                left_out["submitted before the recording"] += 1
            elif record.finish_reason == "error":
                left_out["failed"] += 1
            elif not record.output_tokens:
                left_out["without output"] += 1
            else:
                assert start is not None
                try:
                    requests.append(_request(submitted, record, start))
                except (TraceError, TypeError) as exc:
                    raise TraceError(f"{path}: request {submitted.request_id}: {exc}") from exc
        elif isinstance(record, EventsLost):
            lost += record.count
    left_out["not finished"] += len(open_requests)
    notes = [f"{count} requests {why} left out" for why, count in left_out.items() if count]
    if lost:
        notes.append(f"{lost} events were lost while recording: requests may be missing")
    if recordings > 1:
        notes.append(f"{recordings} recordings, which share no prefixes")
    return requests, notes


def _request(submitted: Submitted, finished: Finished, start: LogStarted) -> TraceRequest:
    return TraceRequest(
        start.unix_time + submitted.arrived_at - start.at,
        submitted.prompt_tokens,
        finished.output_tokens,
        submitted.prefix,
        start.page_size,
        submitted.max_tokens,
        submitted.tenant,
        submitted.priority,
        submitted.deadline,
        submitted.ttft_target,
        submitted.tpot_target,
        submitted.program_id,
    )
