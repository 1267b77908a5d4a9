"""Timelines: what a recording holds, and that it holds up nothing."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

import asyncsched
from asyncsched.errors import EngineError
from asyncsched.events import Admitted, Event, Finished, Preempted, Submitted
from asyncsched.testing import ByteTokenizer, ThreadedExecutor
from asyncsched.timeline import request_spans

from .engine_helpers import Rig


def engine(**options: Any) -> asyncsched.Engine:
    tokenizer = ByteTokenizer()
    limits = asyncsched.ExecutorLimits(4, 64, 4, 64, tokenizer.vocab_size)
    backend = asyncsched.Backend(ThreadedExecutor(limits, 0.002), tokenizer, "simulated")
    return asyncsched.Engine(backend=backend, **options)


def tracks(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {
        (record["pid"], record["tid"]): record["args"]["name"]
        for record in document["traceEvents"]
        if record["ph"] == "M" and record["name"] == "thread_name"
    }


def spans(document: dict[str, Any], track: str) -> list[dict[str, Any]]:
    wanted = [key for key, name in tracks(document).items() if name == track]
    return [each for each in document["traceEvents"] if each["ph"] == "X" and (each["pid"], each["tid"]) in wanted]


@pytest.mark.parametrize("own_loop", [False, True], ids=["shared", "own_loop"])
def test_a_recording(tmp_path: Path, own_loop: bool) -> None:
    file = tmp_path / "out.json"

    async def main() -> None:
        async with engine(own_loop=own_loop) as running:
            before = time.time_ns()
            async with running.trace(file):
                await running.generate(["one", "two", "three"], max_tokens=5, temperature=0, ignore_eos=True)
                assert running._running().control.state.recorder is not None
            assert running._running().control.state.recorder is None
            document = json.loads(file.read_text())
            assert before <= document["baseTimeNanoseconds"] <= time.time_ns()
            await running.generate("after", max_tokens=2)  # nobody records any more

    anyio.run(main)
    document = json.loads(file.read_text())
    assert document["droppedEvents"] == 0
    device = spans(document, "device")
    assert device[0]["name"] == "step 1: 14 prompt"  # a first token is added to every text
    assert all("3 rows" in span["name"] for span in device[1:])
    assert [span["ts"] for span in device] == sorted(span["ts"] for span in device)
    assert all(span["dur"] >= 1900 for span in device)
    for before, after in pairwise(device):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01  # a device runs one step at a time
    assert len(spans(document, "finish")) >= len(device)
    assert len(spans(document, "planner")) >= len(device)
    assert len(spans(document, "admission")) == 3
    counters = {each["name"] for each in document["traceEvents"] if each["ph"] == "C"}
    assert counters == {"requests", "pages", "steps in flight"}
    requests = [name for (process, _), name in tracks(document).items() if process == 2]
    assert len(requests) == 3
    for name in requests:
        waiting, running = spans(document, name)
        assert (waiting["name"], running["name"]) == ("waiting", "running")
        assert running["args"]["output tokens"] == 5
        assert waiting["ts"] + waiting["dur"] == pytest.approx(running["ts"], abs=0.01)


async def test_virtual_time_and_other_loops(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    async with rig.engine.trace(path):
        await rig.engine.generate([1, 2, 3], max_tokens=3, temperature=0)
    document = json.loads(await anyio.Path(path).read_text())
    assert all(each.get("dur", 0) >= 0 <= each.get("ts", 0) for each in document["traceEvents"])
    assert len(spans(document, "device")) == 3


async def test_one_recording_at_a_time(rig: Rig, tmp_path: Path) -> None:
    async with rig.engine.trace(tmp_path / "first.json"):
        with pytest.raises(EngineError, match="recorded already"):
            async with rig.engine.trace(tmp_path / "second.json"):
                pass
        await rig.engine.generate([1, 2, 3], max_tokens=3, temperature=0)
    assert len(spans(json.loads(await anyio.Path(tmp_path / "first.json").read_text()), "device")) == 3
    assert not await anyio.Path(tmp_path / "second.json").exists()


async def test_the_file_cannot_be_written(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        async with rig.engine.trace(tmp_path / "missing" / "out.json"):
            pass
    assert (await rig.engine.generate([1, 2, 3], max_tokens=2, temperature=0)).finish_reason == "length"


def test_phases_of_requests() -> None:
    def submitted(at: float, number: int) -> Submitted:
        return Submitted(at, f"request-{number}", number, 7, 9, at, "anna", 0, None, None, None, None, ())

    events: list[Event] = [
        Finished(1.5, "before", 1, "stop", 4),  # it began before the recording did
        submitted(2.0, 2),
        Admitted(3.0, "request-2", 2, 0, 4),
        Preempted(4.0, "request-2", 2, 2),
        submitted(5.0, 3),
        Admitted(6.0, "request-2", 2, 1, 0),
        Finished(7.0, "request-2", 2, "length", 9),
    ]
    found = {name: spans for _, name, spans in request_spans(events, 10.0, 11.0, 20.0)}
    assert [(name, start, end) for name, start, end, _ in found["before"]] == [("running", 11.0, 11.5)]
    assert [(name, start, end) for name, start, end, _ in found["request-2"]] == [
        ("waiting", 12.0, 13.0),
        ("running", 13.0, 14.0),
        ("waiting", 14.0, 16.0),
        ("running", 16.0, 17.0),
    ]
    assert found["request-2"][0][3]["tenant"] == "anna"
    assert [(name, start, end) for name, start, end, _ in found["request-3"]] == [("waiting", 15.0, 20.0)]
