"""Traces: the formats, what is made of them, and prompts that share what the trace says."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsched import Admitted, LogStarted, TraceError, record_events
from asyncsched.event_log import read_events
from asyncsched.lab.prompts import PromptMaker
from asyncsched.lab.readers import FormatName, read_trace
from asyncsched.lab.trace import Trace, TraceRequest, limited, scaled, with_targets, with_tenants

from .engine_helpers import LIMITS, Rig, limits, turns

DATA = Path(__file__).parent / "data" / "traces"

FILES: dict[str, FormatName] = {
    "azure_code.csv": "azure",
    "burstgpt.csv": "burstgpt",
    "mooncake_conversation.jsonl": "mooncake",
    "mooncake_synthetic.jsonl": "mooncake",
    "llmservingsim.jsonl": "llmservingsim",
}


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in trace.requests]


# Formats


@pytest.mark.parametrize("name", FILES)
def test_the_format_is_told_by_the_content(name: str, tmp_path: Path) -> None:
    """Not by the name; naming it makes no difference."""
    unnamed = tmp_path / "trace"
    unnamed.write_bytes((DATA / name).read_bytes())
    trace = read_trace(unnamed)
    assert trace == read_trace(unnamed, FILES[name])
    assert trace.name == "trace"
    arrivals = [request.at for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    for other in set(FILES.values()) - {FILES[name]}:
        with pytest.raises(TraceError, match=f"line 1: no {other} trace, which has "):
            read_trace(unnamed, other)


def test_azure() -> None:
    """CRLF line ends, and seven digits behind the point."""
    assert b"\r\n" in (DATA / "azure_code.csv").read_bytes()
    trace = read_trace(DATA / "azure_code.csv")
    assert lengths(trace)[:4] == [(4808, 10), (3180, 8), (110, 27), (7433, 14)]
    assert [request.at for request in trace.requests[:3]] == pytest.approx([0.0, 0.052, 0.098189], abs=2e-6)
    assert len(trace.requests) == 12
    assert trace.notes == ()
    assert not any(request.blocks for request in trace.requests)


def test_azure_with_time_zones(tmp_path: Path) -> None:
    """As in the traces of 2024; also with a byte-order mark, and over midnight."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 23:59:59.500000+00:00,3,2\n2024-05-11 00:00:01+00:00,5,4\n"
    )
    assert [(request.at, request.prompt_tokens) for request in read_trace(path).requests] == [(0.0, 3), (1.5, 5)]


def test_burstgpt() -> None:
    """Failures are left out and counted."""
    trace = read_trace(DATA / "burstgpt.csv")
    assert lengths(trace)[:2] == [(472, 18), (1087, 230)]
    assert [request.at for request in trace.requests[:3]] == [0.0, 40.0, 113.0]
    assert len(trace.requests) == 44
    assert trace.notes == ("4 of 48 rows without prompt or output tokens left out",)
    assert trace.requests[2].hints == {"model": "GPT-4", "log_type": "Conversation log"}


def test_mooncake_blocks() -> None:
    """One id per block of 512 tokens; that of a begun block is not kept."""
    trace = read_trace(DATA / "mooncake_conversation.jsonl")
    rows = [json.loads(line) for line in (DATA / "mooncake_conversation.jsonl").read_text().splitlines()]
    assert lengths(trace) == [(row["input_length"], row["output_length"]) for row in rows]
    for request, row in zip(trace.requests, rows, strict=True):
        assert request.block_size == 512
        assert request.blocks == tuple(row["hash_ids"][: row["input_length"] // 512])
    whole = [request for request in trace.requests if request.blocks]
    assert {request.blocks[0] for request in whole} == {0}, "block 0 is common to all"
    assert len({request.blocks[:2] for request in whole}) > 1


def test_mooncake_arrivals_are_spread_over_the_ticks() -> None:
    rows = [json.loads(line) for line in (DATA / "mooncake_conversation.jsonl").read_text().splitlines()]
    trace = read_trace(DATA / "mooncake_conversation.jsonl")
    assert trace.notes == ("stamps come in ticks of 3 s with 8.0 requests each: spread over the tick",)
    arrivals = [request.at for request in trace.requests]
    assert len(set(arrivals)) == len(arrivals)
    shift = {round((row["timestamp"] / 1000 - at) // 3) for row, at in zip(rows, arrivals, strict=True)}
    assert shift <= {-1, 0}, "each within its tick, which the first arrival shifts"
    assert read_trace(DATA / "mooncake_conversation.jsonl", seed=0) == trace
    other = read_trace(DATA / "mooncake_conversation.jsonl", seed=1)
    assert lengths(other) == lengths(trace)
    assert [request.at for request in other.requests] != arrivals


def test_fine_stamps_are_kept() -> None:
    trace = read_trace(DATA / "mooncake_synthetic.jsonl")
    assert [request.at for request in trace.requests][:5] == [0.0, 0.0, 0.04, 0.277, 0.471]
    assert trace.notes == ()
    assert trace.requests[5].blocks == (), "28 tokens are no whole block"


def test_llmservingsim() -> None:
    trace = read_trace(DATA / "llmservingsim.jsonl")
    assert lengths(trace)[:2] == [(2358, 531), (1034, 769)]
    assert trace.requests[1].at == pytest.approx((347938951 - 46926808) / 1e9)
    assert trace.requests[0].blocks == tuple(range(2358 // 16))
    assert {request.block_size for request in trace.requests} == {16}


def test_requests_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:09,1,1\n2024-01-01 00:00:04,2,2\n")
    assert [(request.at, request.prompt_tokens) for request in read_trace(path).requests] == [(0.0, 2), (5.0, 1)]


# Broken files

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
SIM = '{"arrival_time_ns": 0, "input_toks": 33, "output_toks": 5, "hash_ids": [0, 1]}\n'
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "line 1: the first line fits no known trace"),
        ("a,b,c\n1,2,3\n", "azure .columns ContextTokens, GeneratedTokens, TIMESTAMP."),
        ("{}\n", "mooncake .JSON lines with hash_ids"),
        ("{broken\n", "fits no known trace"),
        ("[1]\n", "fits no known trace"),
        (AZURE.splitlines()[0], "holds no requests"),
        (AZURE + "2023-11-16 18:17:04,ten,10\n", "line 3: ContextTokens='ten' is not a whole number"),
        (AZURE + "2023-11-16 18:17:04,1.5,10\n", "line 3: ContextTokens='1.5' is not a whole number"),
        (AZURE + "2023-11-16 18:17:04,-1,10\n", "line 3: ContextTokens='-1'"),
        (AZURE + "yesterday,1,10\n", "line 3: .*yesterday.*; correct or delete the line"),
        (AZURE + "2023-11-16 18:17:04,1\n", "line 3: another number of columns"),
        (AZURE + "2023-11-16 18:17:04,1,2,3\n", "line 3: another number of columns"),
        (AZURE + "1" * 200_000 + ",1,2\n", "line 3: field larger than field limit"),
        (BURST + "nan,ChatGPT,472,18,490,API log\n", "line 3: Timestamp='nan' is not a time"),
        (BURST + "-5,ChatGPT,472,18,490,API log\n", "line 3: Timestamp='-5' is not a time"),
        (BURST + "soon,ChatGPT,472,18,490,API log\n", "line 3: .*'soon'"),
        (MOONCAKE + "\n{\n", "line 3: no JSON"),
        (MOONCAKE + "[1]\n", "line 2: not a JSON object"),
        (MOONCAKE + '{"timestamp": 0}\n', "line 2: there is no field 'input_length'"),
        (MOONCAKE + MOONCAKE.replace("[0, 1]", "[0]"), "line 2: 1 hash_ids where a prompt of 600 tokens has 2, one per 512"),
        (MOONCAKE + MOONCAKE.replace("[0, 1]", "[0, 1, 2]"), "line 2: 3 hash_ids where"),
        (MOONCAKE + MOONCAKE.replace("[0, 1]", "[0, 1.0]"), "line 2: hash_ids is not a list of whole numbers"),
        (MOONCAKE + MOONCAKE.replace("[0, 1]", "7"), "line 2: hash_ids is not a list"),
        (MOONCAKE + MOONCAKE.replace("[0, 1]", "[-1, 1]"), "line 2: block ids must be whole numbers of 64 bits"),
        (MOONCAKE + MOONCAKE.replace("600", '"600.5"'), "line 2: input_length='600.5'"),
        (MOONCAKE + MOONCAKE.replace("600", "true"), "line 2: input_length=True"),
        (MOONCAKE + MOONCAKE.replace('"timestamp": 0', '"timestamp": null'), "line 2: timestamp=None is not a number"),
        (SIM + SIM.replace("33", "48"), "line 2: 2 hash_ids where a prompt of 48 tokens has 3, one per 16"),
    ],
)
def test_a_broken_file(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.x"
    path.write_text(text)
    with pytest.raises(TraceError, match=match) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "missing")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "x.gz").write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(TraceError, match=r"not a text file .*unpack it"):
        read_trace(tmp_path / "x.gz")
    name: Any = "azur"
    with pytest.raises(TraceError, match="format='azur': use auto, events, azure, "):
        read_trace(DATA / "azure_code.csv", name)


# Requests and what can be done to a trace


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens=0 must be at least 1"),
        ({"output_tokens": 0}, "output_tokens=0 must be at least 1"),
        ({"at": -1.0}, "at=-1.0 must be a number of seconds"),
        ({"at": float("nan")}, "at=nan"),
        ({"deadline": float("inf")}, "deadline=inf"),
        ({"max_tokens": 1}, "max_tokens=1 is below output_tokens=2"),
        ({"blocks": (1, 2), "block_size": 8}, "2 blocks of 8 tokens do not fit a prompt of 10"),
        ({"blocks": (1,)}, "1 blocks of 0 tokens"),
        ({"blocks": (2**64,), "block_size": 8}, "64 bits"),
    ],
)
def test_an_impossible_request(fields: dict[str, Any], match: str) -> None:
    valid = {"at": 0.0, "prompt_tokens": 10, "output_tokens": 2}
    TraceRequest(**valid)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=match):
        TraceRequest(**{**valid, **fields})


def sample(count: int = 100) -> Trace:
    return Trace("sample", [TraceRequest(float(i), 10 + i, 5) for i in range(count)], ("a note",))


def test_scaled() -> None:
    trace = sample()
    faster = scaled(trace, 4)
    assert [request.at for request in faster.requests] == [i / 4 for i in range(100)]
    assert lengths(faster) == lengths(trace)
    assert faster.notes == ("a note", "arrivals 4 times as fast")
    assert trace == sample(), "the original is left alone"
    for rate in (0, -1, float("nan"), float("inf")):
        with pytest.raises(TraceError, match="must be a positive number"):
            scaled(trace, rate)


def test_limited() -> None:
    trace = sample()
    assert limited(trace, count=3).requests == trace.requests[:3]
    assert limited(trace, seconds=3).requests == trace.requests[:3]
    assert limited(trace, count=9, seconds=3.5).requests == trace.requests[:4]
    assert limited(trace, count=3).notes == ("a note", "first 3 of 100 requests")
    assert limited(trace, count=1000, seconds=1000) == trace
    assert limited(trace) == trace
    for bounds in ({"count": 0}, {"count": -1}, {"seconds": 0}):
        with pytest.raises(TraceError, match="leave no request of sample"):
            limited(trace, **bounds)


def test_with_targets() -> None:
    trace = with_targets(sample(), ttft=0.5, deadline=9.0)
    assert {(r.ttft_target, r.tpot_target, r.deadline) for r in trace.requests} == {(0.5, None, 9.0)}
    trace = with_targets(trace, tpot=0.1)
    assert {(r.ttft_target, r.tpot_target, r.deadline) for r in trace.requests} == {(0.5, 0.1, 9.0)}
    with pytest.raises(TraceError, match="ttft_target=-1"):
        with_targets(trace, ttft=-1)


def test_with_tenants() -> None:
    trace = with_tenants(sample(2000), {"flood": 9, "polite": 1}, seed=3)
    counts = Counter(request.tenant for request in trace.requests)
    assert set(counts) == {"flood", "polite"}
    assert 150 < counts["polite"] < 250
    assert trace == with_tenants(sample(2000), {"flood": 9, "polite": 1}, seed=3)
    assert trace != with_tenants(sample(2000), {"flood": 9, "polite": 1}, seed=4)
    wrong: list[dict[str, float]] = [{}, {"a": 0}, {"a": -1, "b": 2}, {"a": float("nan")}]
    for shares in wrong:
        with pytest.raises(TraceError, match="positive"):
            with_tenants(trace, shares)


# Prompts

IDS = st.integers(0, 2**64 - 1)
BLOCKS = st.lists(st.one_of(st.integers(0, 3), IDS), max_size=6).map(tuple)


def request(blocks: tuple[int, ...], size: int, tail: int) -> TraceRequest:
    return TraceRequest(0.0, max(1, len(blocks) * size + tail), 1, blocks, size)


def common(left: Any, right: Any) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@settings(max_examples=200, deadline=None)
@given(
    BLOCKS,
    BLOCKS,
    st.sampled_from([16, 64, 512]),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([1000, 32000, 2**31]),
)
def test_equal_block_prefixes_are_equal_token_prefixes(
    left: tuple[int, ...], right: tuple[int, ...], size: int, left_tail: int, right_tail: int, vocab: int
) -> None:
    """And no others: what differs does so within the first page of 16 tokens."""
    maker = PromptMaker(vocab, 5)
    first = maker.prompt(request(left, size, left_tail), 0)
    second = maker.prompt(request(right, size, right_tail), 1)
    for prompt, blocks, tail in ((first, left, left_tail), (second, right, right_tail)):
        assert prompt.dtype == np.int32
        assert prompt.shape == (max(1, len(blocks) * size + tail),)
        assert prompt.min() >= 0
        assert prompt.max() < vocab
    shared = common(left, right) * size
    assert (first[:shared] == second[:shared]).all()
    assert common(first[shared:], second[shared:]) < 16


@settings(max_examples=100, deadline=None)
@given(st.sets(IDS, min_size=2, max_size=8), st.sampled_from([16, 512]))
def test_different_blocks_differ_on_every_page(ids: set[int], size: int) -> None:
    maker = PromptMaker(1000)
    blocks = [maker.prompt(request((block,), size, 0), 0).reshape(-1, 16) for block in ids]
    for page in range(size // 16):
        assert len({block[page].tobytes() for block in blocks}) == len(ids)


def test_a_block_does_not_depend_on_where_it_is() -> None:
    maker = PromptMaker(1000)
    first, second = maker.prompt(request((7, 8), 32, 0), 0), maker.prompt(request((8, 7), 32, 0), 1)
    assert (first[:32] == second[32:]).all()
    assert (first[32:] == second[:32]).all()


def test_prompts_are_a_function_of_seed_and_index() -> None:
    one = TraceRequest(0.0, 5000, 1)
    assert (PromptMaker(1000, 1).prompt(one, 4) == PromptMaker(1000, 1).prompt(one, 4)).all()
    used = PromptMaker(1000, 1)
    used.prompt(TraceRequest(0.0, 20_000, 1), 0)
    assert (used.prompt(one, 4) == PromptMaker(1000, 1).prompt(one, 4)).all(), "not of what was made before"
    prompts = [PromptMaker(1000, seed).prompt(one, index) for seed in (1, 2) for index in (0, 4)]
    assert all(common(left, right) < 16 for left, right in itertools.combinations(prompts, 2))
    shared = request((3,), 512, 0)
    assert common(PromptMaker(1000, 1).prompt(shared, 0), PromptMaker(1000, 2).prompt(shared, 0)) < 16


def test_tokens_are_evenly_spread() -> None:
    prompt = PromptMaker(100).prompt(request(tuple(range(2000)), 50, 0), 0)
    counts = np.bincount(prompt, minlength=100)
    squares = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert 50 < squares < 160, "chi square of 99 degrees of freedom"
    pairs = np.bincount(prompt[:-1] * 100 + prompt[1:], minlength=10_000)
    assert abs(float(((pairs - 10.0) ** 2 / 10.0).sum()) - 10_000) < 600, "neighbours are independent"


@pytest.mark.parametrize("vocab", [0, 1, 2**31 + 1])
def test_an_impossible_vocabulary(vocab: int) -> None:
    with pytest.raises(TraceError, match="vocab_size"):
        PromptMaker(vocab)


# Event logs as traces


async def recorded(path: Path, rig: Rig, work: Any) -> None:
    """Record what happens during ``work()``."""
    async with anyio.create_task_group() as tasks:
        await tasks.start(record_events, rig.engine, path)
        await work()
        await rig.settle()
        tasks.cancel_scope.cancel()


async def test_a_log_becomes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    about: dict[str, Any] = {
        "tenant": "a", "priority": 3, "deadline": 60.0, "ttft_target": 1.0, "tpot_target": 0.5, "program_id": "p",
    }  # fmt: skip

    async with Rig() as rig:

        async def work() -> None:
            await rig.engine.generate(list(range(18)), max_tokens=7, **about)
            await rig.engine.generate([*range(9), 99], max_tokens=2, n=2)
            await rig.engine.generate([5], max_tokens=0)

        await recorded(path, rig, work)
    trace = await anyio.to_thread.run_sync(read_trace, path)
    first, second, third = trace.requests
    assert first == TraceRequest(0.0, 18, 7, first.blocks, 4, 7, hints={}, **about)
    assert len(first.blocks) == 4
    assert second == third
    assert (second.prompt_tokens, second.output_tokens, second.tenant) == (10, 2, "")
    assert second.blocks == first.blocks[:2]
    assert second.at > 0.0
    assert trace.notes == ("1 requests without output left out",)


async def test_what_did_not_finish_is_left_out_and_noted(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    async with Rig(hold=True, depth=0, faults={4: RuntimeError("broken")}) as rig:
        before = rig.engine.stream([1], max_tokens=9)
        await turns()
        async with anyio.create_task_group() as tasks:
            await tasks.start(record_events, rig.engine, path)
            aborted = rig.engine.stream([2], max_tokens=9)
            await rig.step(2)
            before.close()
            aborted.close()  # after one token
            await rig.step(1)
            failing = rig.engine.stream([3], max_tokens=9)
            await rig.step(1)
            rig.kept.append(rig.engine.stream([4], max_tokens=9))
            await turns()
            tasks.cancel_scope.cancel()
        assert failing.finish_reason == "error"
    trace = await anyio.to_thread.run_sync(read_trace, path)
    assert lengths(trace) == [(1, 1)]
    assert trace.requests[0].max_tokens == 9
    assert sorted(trace.notes) == [
        "1 requests failed left out",
        "1 requests not finished left out",
        "1 requests submitted before the recording left out",
    ]


def log_line(event: str, **fields: Any) -> str:
    return json.dumps({"event": event, **fields}) + "\n"


def started(unix_time: float) -> str:
    return log_line(
        "LogStarted", at=100.0, unix_time=unix_time, model="m", max_rows=8, pages=64, page_size=4, max_model_len=128,
        vocab_size=1000,
    )  # fmt: skip


def answered(number: int, arrived_at: float, **fields: Any) -> str:
    submitted = {
        "at": arrived_at, "request_id": f"r{number}", "number": number, "prompt_tokens": 9, "max_tokens": 5,
        "arrived_at": arrived_at, "tenant": "", "priority": 0, "deadline": None, "ttft_target": None, "tpot_target": None,
        "program_id": None, "prefix": [1, 2],
    }  # fmt: skip
    end = log_line("Finished", at=arrived_at, request_id="", number=number, finish_reason="stop", output_tokens=3)
    return log_line("Submitted", **{**submitted, **fields}) + end


def test_several_recordings_in_one_file(tmp_path: Path) -> None:
    """Numbers begin anew and clocks differ: the time of day puts them in place."""
    path = tmp_path / "log.jsonl"
    lost = log_line("EventsLost", count=5)
    path.write_text(started(5000.0) + answered(1, 101.0) + started(6000.0) + answered(1, 103.0) + lost)
    trace = read_trace(path)
    assert [request.at for request in trace.requests] == [0.0, 1002.0]
    assert trace.notes == (
        "5 events were lost while recording: requests may be missing",
        "2 recordings, which share no prefixes",
    )


@pytest.mark.parametrize("fields", [{"prompt_tokens": 0}, {"prompt_tokens": "9"}, {"prefix": [1, 2, 3]}, {"max_tokens": 1}])
def test_an_impossible_request_in_a_log(fields: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(started(5000.0) + answered(7, 101.0, **fields))
    with pytest.raises(TraceError, match="request r7: "):
        read_trace(path)


def test_a_log_without_requests(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(started(5000.0))
    with pytest.raises(TraceError, match="holds no requests"):
        read_trace(path)
    with pytest.raises(TraceError, match="not a record of an event log"):
        read_trace(DATA / "azure_code.csv", "events")


async def test_a_replay_hits_the_cache_as_the_original_did(tmp_path: Path) -> None:
    """From a log to a trace to prompts to an engine: the same requests find the same pages."""
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 1000, size) for size in (8, 20, 33)]
    texts = [
        np.concatenate([heads[rng.integers(3)][: rng.integers(1, 40)], rng.integers(0, 1000, rng.integers(1, 9))])
        for _ in range(25)
    ]
    hits = []
    prompts = [text.tolist() for text in texts]
    for name in ("original", "replay"):
        path = tmp_path / name
        async with Rig(limits(pages=512)) as rig:

            async def work(rig: Rig = rig, prompts: list[list[int]] = prompts) -> None:
                for prompt in prompts:
                    await rig.engine.generate(prompt, max_tokens=1)

            await recorded(path, rig, work)
        records = await anyio.to_thread.run_sync(list, read_events(path))
        assert isinstance(records[0], LogStarted)
        hits.append([record.cached_tokens for record in records if isinstance(record, Admitted)])
        trace = await anyio.to_thread.run_sync(read_trace, path)
        maker = PromptMaker(LIMITS.vocab_size, 1)
        prompts = [maker.prompt(request, index).tolist() for index, request in enumerate(trace.requests)]
    assert sum(hits[0]) > 100
    assert hits[1] == hits[0]
