"""The event log: everything that happened is in the file, nobody waits for it, and no token leaves the engine."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsched import (
    EngineClosedError,
    Event,
    EventsLost,
    Finished,
    LogStarted,
    RequestOptions,
    SamplingParams,
    StepCompleted,
    Submitted,
    TraceError,
    event_log,
    read_events,
    record_events,
)
from asyncsched.event_log import LogRecord
from asyncsched.events import EventBus
from asyncsched.request import Request, Submission
from asyncsched.trio_waiter import TrioWaiter

from .engine_helpers import ASYNCIO, GUARD, Rig, limits, turns, until

PROMPT = list(range(30, 47))


async def records(path: Path) -> list[LogRecord]:
    """What is in the file; read in a thread, as the loop must not block."""
    return await anyio.to_thread.run_sync(lambda: list(read_events(path)))


async def eventually(path: Path, count: int) -> list[LogRecord]:
    """The file's records, once there are so many."""
    with anyio.fail_after(GUARD):
        while len(found := await records(path)) < count:  # noqa: ASYNC110 - a file tells nobody
            await anyio.sleep(0.01)
    return found


async def test_everything_is_written(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    events = rig.engine.events()
    before = time.time()
    async with anyio.create_task_group() as tasks:
        await tasks.start(record_events, rig.engine, path)
        await rig.engine.generate([[i, *PROMPT] for i in range(12)], max_tokens=5)
        await rig.engine.generate(PROMPT, max_tokens=2, tenant="ä\n", program_id='"', deadline=5, ttft_target=0.25, priority=-1)
        await rig.settle()
        now = anyio.current_time()
        tasks.cancel_scope.cancel()
    events.close()
    start, *found = await records(path)
    assert isinstance(start, LogStarted)
    assert (start.model, start.page_size, start.pages, start.max_rows) == ("simulated", 4, 64, 8)
    assert (start.max_model_len, start.vocab_size) == (128, 1000)
    assert before <= start.unix_time <= time.time()
    assert now - GUARD < start.at <= now
    assert found == [event async for event in events]
    assert len({type(record) for record in found}) == 4


async def test_a_log_can_be_read_while_it_is_written(held: Rig, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    async with anyio.create_task_group() as tasks:
        await tasks.start(record_events, held.engine, path)
        assert [type(record) for record in await records(path)] == [LogStarted]
        stream = held.engine.stream(PROMPT, max_tokens=5)
        assert [type(record).__name__ for record in await eventually(path, 3)] == ["LogStarted", "Submitted", "Admitted"]
        await held.step()
        assert isinstance((await eventually(path, 4))[3], StepCompleted)
        stream.close()
        assert isinstance((await eventually(path, 5))[4], Finished)
        tasks.cancel_scope.cancel()


async def test_the_engines_end_ends_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rig = Rig()
    async with anyio.create_task_group() as tasks, rig.engine:
        await tasks.start(record_events, rig.engine, path)
        rig.kept.append(rig.engine.stream([1], max_tokens=50))
        await turns(1)
    found = await records(path)
    assert [record.finish_reason for record in found if isinstance(record, Finished)] == ["error"]
    with pytest.raises(EngineClosedError):
        await record_events(rig.engine, path)


@ASYNCIO
async def test_a_native_cancel_loses_nothing(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    task = asyncio.create_task(record_events(rig.engine, path))
    while not await anyio.Path(path).exists():
        await turns(1)
    await eventually(path, 1)
    events = rig.engine.events()
    await rig.engine.generate([[i] for i in range(5)], max_tokens=3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    events.close()
    found = await records(path)
    assert found[1:] == [event async for event in events][: len(found) - 1]
    assert len([record for record in found if isinstance(record, Finished)]) == 5


async def test_a_file_is_continued(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            await tasks.start(record_events, rig.engine, path)
            await rig.engine.generate([1], max_tokens=1)
            await rig.settle()
            tasks.cancel_scope.cancel()
    kinds = [type(record).__name__ for record in await records(path)]
    assert kinds[: len(kinds) // 2] == kinds[len(kinds) // 2 :]
    assert kinds.count("LogStarted") == 2


async def test_events_that_come_too_fast_are_counted(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "CAPACITY", 3)
    path = tmp_path / "log.jsonl"
    events = rig.engine.events()
    async with anyio.create_task_group() as tasks:
        await tasks.start(record_events, rig.engine, path)
        await rig.engine.generate([[i] for i in range(10)], max_tokens=3)
        await rig.settle()
        await eventually(path, 5)
        tasks.cancel_scope.cancel()
    events.close()
    happened = len([event async for event in events])
    found = await records(path)
    lost = [record.count for record in found if isinstance(record, EventsLost)]
    assert lost
    assert sum(lost) + len(found) - len(lost) - 1 == happened


@pytest.mark.parametrize("own_loop", [False, True])
async def test_the_stamps_are_of_one_clock(own_loop: bool, tmp_path: Path) -> None:
    """Also where the engine's loop is another than the application's, such as asyncio's under trio."""
    path = tmp_path / "log.jsonl"
    async with Rig(own_loop=own_loop, check=False) as rig, anyio.create_task_group() as tasks:
        await tasks.start(record_events, rig.engine, path)
        await rig.engine.generate(PROMPT, max_tokens=2)
        await eventually(path, 6)
        tasks.cancel_scope.cancel()
    found = await records(path)
    assert isinstance(found[0], LogStarted)
    for record in found[1:]:
        assert not isinstance(record, LogStarted | EventsLost)
        assert -0.05 < record.at - found[0].at < GUARD  # uvloop's clock stands still while it works
        if isinstance(record, Submitted):
            assert -0.05 < record.arrived_at - found[0].at <= record.at - found[0].at


# Where it cannot be written


async def test_a_file_that_cannot_be_opened(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        await record_events(rig.engine, tmp_path)
    assert caught.value.__context__ is None
    with pytest.raises(FileNotFoundError):
        await record_events(rig.engine, tmp_path / "missing" / "log.jsonl")
    await rig.serves()


class FullDisk(io.BytesIO):
    """Takes the first write only."""

    writes = 0

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes > 1:
            raise OSError(28, "No space left on device")
        return super().write(data)


async def test_a_full_disk_ends_the_recording_only(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk()
    monkeypatch.setattr(event_log, "_opened", lambda path: disk)
    errors: list[OSError] = []

    async def record() -> None:
        try:
            await record_events(rig.engine, tmp_path / "log.jsonl")
        except OSError as exc:
            errors.append(exc)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(record)
        await until(lambda: disk.writes)
        await rig.engine.generate([1], max_tokens=3)
    assert [error.errno for error in errors] == [28]
    assert errors[0].__context__ is None, "told once"
    assert disk.writes == 2
    assert disk.closed
    await rig.serves()


# Prefixes


async def test_no_token_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    prompt = [123456700 + i for i in range(24)]
    async with Rig(limits(vocab_size=2**31 - 1)) as rig, anyio.create_task_group() as tasks:
        await tasks.start(record_events, rig.engine, path)
        result = await rig.engine.generate(prompt, max_tokens=8)
        await rig.settle()
        tasks.cancel_scope.cancel()
    text = await anyio.Path(path).read_text()
    assert not [token for token in (*prompt, *result.token_ids) if str(token) in text]
    (submitted,) = [record for record in await records(path) if isinstance(record, Submitted)]
    assert len(set(submitted.prefix)) == 6


async def test_nothing_is_hashed_while_nobody_listens(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def prefix(bus: EventBus, request: Request, page_size: int) -> tuple[int, ...]:
        hashed.append(request)
        return ()

    monkeypatch.setattr(EventBus, "prefix", prefix)
    await rig.engine.generate(PROMPT, max_tokens=1)
    assert not hashed
    async with rig.engine.events():
        await rig.engine.generate(PROMPT, max_tokens=1, n=3)
    assert len(hashed) == 1, "once for all completions"


def prefix(bus: EventBus, prompt: Sequence[int], page_size: int = 4, salt: str = "") -> tuple[int, ...]:
    """The prefix of a prompt as an engine would tell it."""
    submission = Submission(1, "a", prompt, SamplingParams(), RequestOptions(cache_salt=salt), 0.0, TrioWaiter)
    request = Request(
        1, submission, 0, np.array(prompt, np.int32), max_new=1, seed=0, stop_ids=(), namespace=salt, shareable=True,
        assembler=None,
    )  # fmt: skip
    return bus.prefix(request, page_size)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@settings(max_examples=300, deadline=None)
@given(TOKENS, TOKENS, st.sampled_from([1, 2, 4]))
def test_prefixes_agree_where_whole_pages_do(left: list[int], right: list[int], page_size: int) -> None:
    bus = EventBus()
    first, second = prefix(bus, left, page_size), prefix(bus, right, page_size)
    assert (len(first), len(second)) == (len(left) // page_size, len(right) // page_size)
    assert common(first, second) == common(left, right) // page_size
    assert not set(first[common(first, second) :]) & set(second[common(first, second) :]), "what follows never meets again"
    assert all(0 <= page < 2**64 for page in (*first, *second))


def test_prefixes_of_what_may_not_be_shared_differ() -> None:
    bus = EventBus()
    plain = prefix(bus, PROMPT)
    assert prefix(bus, PROMPT) == plain
    for other in (prefix(bus, PROMPT, salt="a"), prefix(bus, PROMPT, salt="\ud800"), prefix(EventBus(), PROMPT)):
        assert not set(other) & set(plain)


# Reading

STARTED = LogStarted(5.0, 1.8e9, "m", 8, 64, 4, 128, 1000)
FINISHED = Finished(6.0, "r", 1, "stop", 3)
START_LINE = (
    '{"event": "LogStarted", "at": 5.0, "unix_time": 1.8e9, "model": "m", "max_rows": 8, "pages": 64, "page_size": 4, '
    '"max_model_len": 128, "vocab_size": 1000}\n'
)
END_LINE = '{"event":"Finished","at":6.0,"request_id":"r","number":1,"finish_reason":"stop","output_tokens":3}\n'


@pytest.mark.parametrize("cut", [1, 2, 30, len(END_LINE) - 2])
def test_a_torn_last_line_is_left_out(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(START_LINE + END_LINE + END_LINE[:cut])
    assert list(read_events(path)) == [STARTED, FINISHED]


@pytest.mark.parametrize("torn", [START_LINE[:20], START_LINE + END_LINE[:20], START_LINE + END_LINE[:-1]])
async def test_a_recording_after_a_crash(torn: str, rig: Rig, tmp_path: Path) -> None:
    """It begins on a line of its own."""
    path = tmp_path / "log.jsonl"
    await anyio.Path(path).write_text(torn)
    before = 0 if torn == START_LINE[:20] else len(await records(path))
    async with anyio.create_task_group() as tasks:
        await tasks.start(record_events, rig.engine, path)
        tasks.cancel_scope.cancel()
    found = await records(path)
    assert len(found) == before + 1
    assert isinstance(found[-1], LogStarted)
    assert found[-1].model == "simulated"


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n")
    assert list(read_events(path)) == []


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (START_LINE + "garbage\n" + END_LINE, "line 2: not a record of an event log"),
        (START_LINE + "\n\ngarbage\ngarbage\n", "line 4: not a record"),
        (START_LINE + "[]\n" + END_LINE, "line 2: not a record"),
        (START_LINE + "{}\n" + END_LINE, "line 2: not a record"),
        ("a,b,c\n", "line 1: not a record"),
        (END_LINE, "line 1: an event log begins with LogStarted"),
        (START_LINE + END_LINE.replace("Finished", "Ended"), "line 2: 'Ended' with fields this version does not know"),
        (START_LINE + END_LINE.replace("number", "count"), "line 2: 'Finished' with fields this version does not know"),
        (START_LINE + '{"event": "StepCompleted", "prefill": [1]}\n', "line 2: 'StepCompleted'"),
        (START_LINE + '{"event": ["x"]}\n', "line 2: "),
        ("\x00\xff\n" + END_LINE, "line 1: not a record"),
    ],
)
def test_what_is_no_log(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text, "latin-1")
    with pytest.raises(TraceError, match=match) as caught:
        list(read_events(path))
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        list(read_events(tmp_path / "missing"))


def test_a_line_is_plain_json() -> None:
    """Other programs read it too."""
    event: Event = StepCompleted(1.0, 2, 3, 4, ((0, 16), (8, 2)), 0.5, 0.75, False)
    line = event_log._encode(event)
    assert json.loads(line) == {
        "event": "StepCompleted", "at": 1.0, "step": 2, "decode_rows": 3, "context_tokens": 4, "prefill": [[0, 16], [8, 2]],
        "launched_at": 0.5, "completed_at": 0.75, "failed": False,
    }  # fmt: skip
    assert line.count("\n") == 1
    assert line.isascii()
