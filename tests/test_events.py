"""The event stream: what observers are told, in which order, and that nobody waits for them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock

from asyncsched import Admitted, Event, EventStream, Finished, StepCompleted, StepFailedError, Submitted

from .engine_helpers import LETTERS, Rig, limits, read, turns

PROMPT = list(range(30, 47))


async def drained(events: EventStream) -> list[Event]:
    """What has been queued so far."""
    events.close()
    return [event async for event in events]


async def test_the_life_of_a_request(rig: Rig) -> None:
    events = rig.engine.events()
    result = await rig.engine.generate(PROMPT, max_tokens=4, request_id="a")
    await rig.settle()
    seen = await drained(events)
    kinds = [type(event).__name__ for event in seen]
    assert kinds == ["Submitted", "Admitted", *["StepCompleted"] * 3, "Finished", "StepCompleted"] or kinds == [
        "Submitted", "Admitted", *["StepCompleted"] * 4, "Finished",
    ]  # fmt: skip
    submitted, admitted = seen[0], seen[1]
    finished = next(event for event in seen if isinstance(event, Finished))
    assert isinstance(submitted, Submitted)
    assert isinstance(admitted, Admitted)
    assert (submitted.request_id, submitted.prompt_tokens) == ("a", 17)
    assert (admitted.request_id, admitted.number, admitted.row, admitted.cached_tokens) == ("a", submitted.number, 0, 0)
    assert (finished.request_id, finished.finish_reason, finished.output_tokens) == ("a", "length", 4)
    assert finished.number == submitted.number
    assert submitted.at <= admitted.at <= finished.at
    assert admitted.at == result.times.admitted
    assert finished.at == result.times.finished


async def test_a_submission_tells_what_was_asked_for(rig: Rig) -> None:
    events = rig.engine.events()
    about: dict[str, Any] = {
        "tenant": "t", "priority": 2, "deadline": 60.0, "ttft_target": 1.0, "tpot_target": 0.5, "program_id": "p",
    }  # fmt: skip
    result = await rig.engine.generate(PROMPT, max_tokens=4, n=2, **about)
    await rig.engine.generate([*PROMPT[:9], 1, 2, 3], max_tokens=None)
    first, second, third = [event for event in await drained(events) if isinstance(event, Submitted)]
    assert {name: getattr(first, name) for name in about} == about
    assert first.max_tokens == 4
    assert first.arrived_at == result.times.arrived
    assert first.arrived_at <= first.at
    assert (second.prefix, second.number) == (first.prefix, first.number + 1)
    assert len(first.prefix) == 4
    assert third.prefix[:2] == first.prefix[:2]
    assert third.prefix[2] != first.prefix[2]
    assert third.max_tokens == 128 - 12
    assert (third.tenant, third.priority, third.deadline, third.program_id) == ("", 0, None, None)


async def test_events_can_be_read_in_batches(held: Rig) -> None:
    events = held.engine.events()
    seen: list[str] = []

    async def observer() -> None:
        while batch := await events.batch():
            seen.extend(type(event).__name__ for event in batch)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observer)
        await turns()
        assert seen == []
        streams = [held.engine.stream(PROMPT, max_tokens=5) for _ in range(3)]
        await turns()
        assert seen == ["Submitted"] * 3 + ["Admitted"] * 3
        for stream in streams:
            stream.close()
        events.close()
    assert seen[6:] == ["Finished"] * 3
    assert await events.batch() == []


async def test_steps_are_told_in_order_and_add_up(rig: Rig) -> None:
    events = rig.engine.events()
    await rig.engine.generate([[i, *PROMPT] for i in range(12)], max_tokens=5)
    await rig.settle()
    steps = [event for event in await drained(events) if isinstance(event, StepCompleted)]
    assert [step.step for step in steps] == list(range(1, len(rig.plans) + 1))
    assert sum(step.prefill_tokens for step in steps) == sum(len(c.tokens) for plan in rig.plans for c in plan.prefill)
    assert sum(step.decode_rows for step in steps) == 12 * 4
    assert all(step.launched_at <= step.completed_at and not step.failed for step in steps)


async def test_cache_hits_are_told(rig: Rig) -> None:
    await rig.engine.generate(PROMPT, max_tokens=1)
    events = rig.engine.events()
    await rig.engine.generate(PROMPT, max_tokens=1, n=2)
    admitted = [event for event in await drained(events) if isinstance(event, Admitted)]
    assert [event.cached_tokens for event in admitted] == [16, 16]
    assert len({event.number for event in admitted}) == 2
    assert len({event.row for event in admitted}) == 2


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
async def test_every_ending_is_told_once(reason: str) -> None:
    faults = {3: RuntimeError("broken")} if reason == "error" else {}
    async with Rig(limits(vocab_size=26), tokenizer=LETTERS, hold=True, faults=faults) as rig:
        events = rig.engine.events()
        stop = LETTERS.decode(range(26))[:1] if reason == "stop" else None
        options: dict[str, Any] = {"stop": list("abcdefghijklmnopqrstuvwxyz")} if stop else {}
        stream = rig.engine.stream([1, 2], max_tokens=6, request_id="r", **options)
        await rig.step()
        if reason == "abort":
            rig.engine.abort("r")
            stream.close()
            stream.close()
        rig.executor.unhold()
        try:
            await read(stream)
        except StepFailedError:
            assert reason == "error"
        await rig.settle()
        seen = await drained(events)
        finished = [event for event in seen if isinstance(event, Finished)]
        assert [(event.request_id, event.finish_reason) for event in finished] == [("r", reason)]
        assert [event.failed for event in seen if isinstance(event, StepCompleted)].count(True) == (reason == "error")
        assert finished[0].output_tokens == stream.usage.completion_tokens


async def test_events_arrive_while_things_happen(held: Rig) -> None:
    seen: list[str] = []

    async def observer() -> None:
        async with held.engine.events() as events:
            async for event in events:
                seen.append(type(event).__name__)  # noqa: PERF401 - looked at while it grows

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observer)
        await turns()
        stream = held.engine.stream(PROMPT, max_tokens=5)
        await turns()
        assert seen == ["Submitted", "Admitted"]
        await held.step()
        assert seen[2:] == ["StepCompleted"]
        stream.close()
        await turns()
        assert seen[3:] == ["Finished"]
        tasks.cancel_scope.cancel()


async def test_an_observer_that_does_not_read_loses_the_oldest(rig: Rig) -> None:
    events = rig.engine.events(capacity=3)
    await rig.engine.generate([[i] for i in range(10)], max_tokens=3)
    await rig.settle()
    total = 10 * 3 + len(rig.plans)
    assert events.dropped == total - 3
    seen = await drained(events)
    assert len(seen) == 3
    assert any(isinstance(event, StepCompleted) and event.step == len(rig.plans) for event in seen)


async def test_observers_do_not_disturb_each_other(rig: Rig) -> None:
    first, second = rig.engine.events(), rig.engine.events(capacity=1)
    await rig.engine.generate([1], max_tokens=2)
    first.close()
    third = rig.engine.events()
    await rig.engine.generate([1], max_tokens=2)
    await rig.settle()
    assert len(await drained(first)) < len(await drained(third)) + 2
    assert len(await drained(second)) == 1
    first.close()


async def test_closing_ends_the_iteration(rig: Rig) -> None:
    events = rig.engine.events()
    ended = False

    async def observer() -> None:
        nonlocal ended
        async for _ in events:
            pass
        ended = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observer)
        await turns()
        assert not ended
        events.close()
    assert ended
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_the_engines_end_ends_the_iteration() -> None:
    rig = Rig()
    async with rig.engine:
        events = rig.engine.events()
        stream = rig.engine.stream([1], max_tokens=50, request_id="open")
        await turns(1)
    seen = [event async for event in events]
    assert [event.finish_reason for event in seen if isinstance(event, Finished)] == ["error"]
    assert stream.finish_reason == "error"


async def test_a_listener_may_close_itself_while_it_is_told(rig: Rig) -> None:
    """Another task closes a stream between two events; no event is lost for the others."""
    streams = [rig.engine.events() for _ in range(4)]

    async def closer() -> None:
        await anext(streams[1])
        streams[1].close()
        streams[2].close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(closer)
        await rig.engine.generate([1], max_tokens=5)
    await rig.settle()
    assert [type(event) for event in await drained(streams[0])] == [type(event) for event in await drained(streams[3])]


async def test_nobody_listens_after_the_last_close(rig: Rig) -> None:
    async with rig.engine.events():
        pass
    events = rig.engine.events()
    events.close()
    await rig.engine.generate([1], max_tokens=5)
    assert await drained(events) == []
    assert events.dropped == 0


def test_events_are_frozen() -> None:
    event = Finished(1.0, "a", 1, "stop", 3)
    with pytest.raises(FrozenInstanceError):
        event.at = 2.0  # type: ignore[misc]
    for kind in (Submitted, Admitted, Finished, StepCompleted):
        assert fields(kind)[0].name == "at"
        assert kind.__doc__


def test_stamps_on_a_virtual_clock() -> None:
    """Two seconds a step: the device's stamps are exact, and the engine's own follow them."""

    async def main() -> None:
        async with Rig(latency=2.0, guard=float("inf"), depth=2) as rig:
            start = anyio.current_time()
            events = rig.engine.events()
            await rig.engine.generate([1, 2], max_tokens=4)
            seen = await drained(events)
            steps = [event for event in seen if isinstance(event, StepCompleted)]
            assert [event.at - start for event in steps] == [2.0, 4.0, 6.0, 8.0][: len(steps)]
            assert [(step.launched_at - start, step.completed_at - start) for step in steps][:3] == [(0, 2), (2, 4), (4, 6)]
            assert [event.at - start for event in seen if isinstance(event, Finished)] == [8.0]

    trio.run(main, clock=MockClock(autojump_threshold=0))
