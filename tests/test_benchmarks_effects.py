"""The comparisons of policies on real traces: they can be run, and say what they found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncsched.cost import LinearCost
from asyncsched.lab import Setup, Trace, TraceRequest, simulate
from asyncsched.lab.measures import Measures, measure
from asyncsched.lab.readers import read_trace
from asyncsched.policy_set import HOOKS, PolicySet
from benchmarks.effects import COLUMNS, compare, excerpt, find, lines
from benchmarks.effects_cases import COMPARISONS, FIRST_TOKEN, Comparison, Promise, deadlines, first_token_targets

pytestmark = pytest.mark.source_tree

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data" / "traces"
REQUESTS = [TraceRequest(0.5 * index, 40, 4) for index in range(30)]


def measures() -> Measures:
    """Of one request."""
    return measure(simulate(Trace("one", [TraceRequest(0.0, 10, 3)]), Setup(LinearCost(1.0, 0.1, 0.0, 0.01))))


def small(**changes: Any) -> Comparison:
    """Two orders on the first requests of a conversation."""
    promise = Promise("lpm is as good", lambda runs: runs["lpm"].e2e.mean <= 1.01 * runs["fcfs"].e2e.mean)
    never = Promise("lpm takes no time", lambda runs: runs["lpm"].e2e.mean == 0.0)
    sets = {"fcfs": {"policy": "fcfs"}, "lpm": {"policy": "lpm"}}
    columns = ("cached %", "E2E s", "max wait s")
    comparison = Comparison("small", "some.jsonl", 2, 5, 0.5, 8, 2000, 64, sets, (promise, never), columns)
    return replace(comparison, **changes)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_every_comparison_can_be_run(comparison: Comparison) -> None:
    """Its policies exist, its promises are about its runs, its columns are known."""
    default = {**dict.fromkeys(HOOKS), "policy": "fcfs", "eviction_policy": "lru"}
    for options in comparison.runs.values():
        PolicySet.load({kind: options.get(kind, default[kind]) for kind in HOOKS})
    same = dict.fromkeys(comparison.runs, measures())
    assert all(promise.holds(same) in (True, False) for promise in comparison.promises)
    assert not all(promise.holds(same) for promise in comparison.promises), "if policies did not differ, something would fail"
    assert len({promise.text for promise in comparison.promises}) == len(comparison.promises)
    assert set(comparison.columns) <= set(COLUMNS)
    wanted = comparison.change(Trace("some", REQUESTS))
    assert [request.prompt_tokens for request in wanted.requests] == [40] * 30


def test_names_are_unique() -> None:
    assert len({comparison.name for comparison in COMPARISONS}) == len(COMPARISONS)


def test_an_excerpt() -> None:
    found = excerpt(Trace("some", REQUESTS), small(change=first_token_targets))
    assert [request.at for request in found.requests] == [2.0, 3.0, 4.0, 5.0, 6.0], "requests 3 to 7, at half the rate"
    assert all(request.ttft_target in FIRST_TOKEN for request in found.requests)


def test_targets_are_drawn_alike_every_time() -> None:
    trace = Trace("some", REQUESTS)
    for change in (first_token_targets, deadlines):
        assert change(trace) == change(trace)
    targets = {request.ttft_target for request in first_token_targets(trace).requests}
    assert targets == set(FIRST_TOKEN)
    due = [request.deadline for request in deadlines(trace).requests]
    assert None not in due
    assert len(set(due)) == 4


def test_a_comparison_tells_figures_and_promises() -> None:
    comparison = small()
    record = compare(read_trace(DATA / "mooncake_conversation.jsonl"), comparison)
    assert record["promises"] == {"lpm is as good": True, "lpm takes no time": False}
    assert set(record["runs"]) == {"fcfs", "lpm"}
    assert record["runs"]["fcfs"]["E2E s"] > 1.0
    assert json.loads(json.dumps(record)) == record
    text = list(lines(record))
    assert text[0] == "small: some.jsonl, requests 3–7, arrivals × 0.5; 8 rows, 2000 pages of 64 tokens"
    assert text[1].split() == ["cached", "%", "E2E", "s", "max", "wait", "s"]
    assert text[2].split()[0] == "fcfs"
    assert text[2].split()[2] == f"{record['runs']['fcfs']['E2E s']:.2f}"
    assert text[4:6] == ["  yes lpm is as good", "  NO  lpm takes no time"]


def test_the_traces_are_found(tmp_path: Path) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    path = tmp_path / "deep" / "down" / "some.jsonl"
    path.write_text("")
    assert find(tmp_path, "some.jsonl") == path
    with pytest.raises(FileNotFoundError, match=r"other\.jsonl is not in"):
        find(tmp_path, "other.jsonl")


def test_the_command(tmp_path: Path) -> None:
    """As JSON, on a file that holds fewer requests than the excerpt has."""
    row = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    rows = [{**row, "timestamp": 500 * index} for index in range(20)]
    (tmp_path / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "benchmarks.effects", str(tmp_path), "--only", "eviction-conversation", "--json"]
    (record,) = map(
        json.loads, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    )
    assert record["comparison"] == "eviction-conversation"
    assert [runs["cached %"] for runs in record["runs"].values()] == pytest.approx([81.1] * 5, abs=0.2)
