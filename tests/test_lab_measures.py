"""What simulations are judged by, on records and timelines made by hand."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched.cost import LinearCost
from asyncsched.lab import Setup, SimulationResult, Trace, TraceRequest, simulate
from asyncsched.lab.measures import Spread, contested_service, jain, kept_targets, measure, worst_gap
from asyncsched.lab.recorder import RequestRecord, Timeline

EMPTY = simulate(Trace("none", []), Setup(LinearCost(1.0, 0.0, 0.0, 0.0)))


def record(
    arrived: float = 0.0,
    admitted: float | None = 1.0,
    first: float | None = 2.0,
    finished: float | None = 5.0,
    output: int = 4,
    **asked: Any,
) -> RequestRecord:
    """One that waited 1 s, had its first token after 2, three more in 3 s; ``asked`` are its targets."""
    request = TraceRequest(arrived, 10, max(1, output), **asked)
    return RequestRecord(request, arrived, admitted, first, finished, 0, output, "" if finished is not None else "SomeError")


def result(*records: RequestRecord, **changes: Any) -> SimulationResult:
    return dataclasses.replace(EMPTY, requests=list(records), **changes)


def timeline(service: dict[str, list[float]], backlog: dict[str, list[int]]) -> Timeline:
    """A sample per second."""
    count = len(next(iter(service.values()), []))
    nothing = np.zeros(count, np.int32)
    return Timeline(
        np.arange(count, dtype=np.float64), nothing, nothing, nothing, nothing,
        {tenant: np.array(served, np.float64) for tenant, served in service.items()},
        {tenant: np.array(waiting, np.int32) for tenant, waiting in backlog.items()},
    )  # fmt: skip


# Spread


def test_spread() -> None:
    assert Spread.of(float(value) for value in range(1, 102)) == Spread(51.0, 51.0, 91.0, 100.0, 101.0)
    assert Spread.of(np.array([3.0])) == Spread(3.0, 3.0, 3.0, 3.0, 3.0)
    assert all(math.isnan(value) for value in dataclasses.astuple(Spread.of([])))


# Latencies and targets


def test_latencies_of_a_record() -> None:
    one = record(arrived=10.0, admitted=11.0, first=12.0, finished=15.0)
    assert (one.ttft, one.tpot, one.e2e) == (2.0, 1.0, 5.0)
    assert record(output=1, finished=2.0).tpot is None
    failed = record(first=None, finished=None, output=0)
    assert (failed.ttft, failed.tpot, failed.e2e) == (None, None, None)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, True),
        ({"ttft_target": 2.0}, True),
        ({"ttft_target": 1.9}, False),
        ({"tpot_target": 1.0}, True),
        ({"tpot_target": 0.9}, False),
        ({"deadline": 5.0}, True),
        ({"deadline": 4.9}, False),
        ({"ttft_target": 3.0, "tpot_target": 0.5, "deadline": 9.0}, False),
    ],
    ids=str,
)
def test_kept_targets(asked: dict[str, Any], kept: bool) -> None:
    assert kept_targets(record(**asked)) is kept


def test_a_request_that_failed_has_kept_nothing() -> None:
    assert not kept_targets(record(finished=None))
    assert not kept_targets(record(first=None, finished=None, output=0))


def test_one_token_has_no_time_per_token_to_miss() -> None:
    assert kept_targets(record(output=1, finished=2.0, tpot_target=0.001))


def test_goodput_counts_each_by_its_own_targets() -> None:
    """Of five, three kept what they asked for; two of them asked for nothing or for what another would have missed."""
    records = [
        record(),
        record(arrived=1.0, admitted=2.0, first=3.0, finished=6.0, deadline=5.0),
        record(ttft_target=1.0),
        record(ttft_target=2.5, tpot_target=1.5),
        record(admitted=None, first=None, finished=None, output=0, deadline=60.0),
    ]
    measures = measure(result(*records, seconds=10.0))
    assert (measures.completed, measures.refused) == (4, 1)
    assert measures.request_rate == pytest.approx(0.4)
    assert measures.good_rate == pytest.approx(0.3)
    assert measures.good_share == pytest.approx(0.6), "of all that arrived, refused ones included"
    assert measures.output_rate == pytest.approx(1.6)


def test_latencies_are_of_those_that_finished() -> None:
    records = [
        record(),
        record(arrived=2.0, admitted=6.0, first=10.0, finished=10.0, output=1),
        record(admitted=7.0, first=8.0, finished=None, output=2),
    ]
    measures = measure(result(*records, seconds=10.0, gaps=np.array([1.0, 1.0, 4.0])))
    assert measures.ttft == Spread.of([2.0, 8.0])
    assert measures.tpot == Spread.of([1.0])
    assert measures.e2e == Spread.of([5.0, 8.0])
    assert measures.wait == Spread.of([1.0, 4.0])
    assert measures.longest_wait == 4.0
    assert measures.itl == Spread.of([1.0, 1.0, 4.0])


def test_counts_come_from_the_engine() -> None:
    statistics = dataclasses.replace(EMPTY.statistics, prompt_tokens=200, cached_tokens=50, preemptions=7)
    measures = measure(result(record(), statistics=statistics, seconds=4.0, wall_seconds=0.5))
    assert (measures.hit_rate, measures.preemptions) == (0.25, 7)
    assert (measures.seconds, measures.wall_seconds) == (4.0, 0.5)


def test_nothing_at_all() -> None:
    measures = measure(EMPTY)
    assert (measures.completed, measures.refused, measures.worst_gap, measures.hit_rate) == (0, 0, 0.0, 0.0)
    for value in (measures.request_rate, measures.good_rate, measures.good_share, measures.fairness, measures.longest_wait):
        assert math.isnan(value)


# Fairness


def test_jain() -> None:
    assert jain([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert jain([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([1.0, 3.0]) == pytest.approx(0.8)
    assert math.isnan(jain([0.0, 0.0]))
    assert math.isnan(jain([]))


def test_only_contested_service_counts() -> None:
    """From second 1 to 3 both wait; what they get before, after, and in the interval in which one stops is not compared."""
    line = timeline({"a": [0, 100, 110, 130, 500], "b": [0, 0, 5, 10, 11]}, {"a": [1, 2, 2, 1, 0], "b": [0, 1, 1, 3, 3]})
    assert contested_service(line) == [30.0, 10.0]
    assert measure(result(record(), seconds=5.0, timeline=line)).fairness == pytest.approx(0.8)


def test_no_contest_no_fairness() -> None:
    line = timeline({"a": [0, 100, 110], "b": [0, 0, 5]}, {"a": [1, 0, 1], "b": [0, 1, 0]})
    assert sum(contested_service(line)) == 0.0
    assert math.isnan(jain(contested_service(line)))
    assert contested_service(timeline({"a": [3]}, {"a": [1]})) == []
    assert contested_service(timeline({}, {})) == []


def test_worst_gap() -> None:
    """Two stretches in which both wait: in the first the lead grows from 100 to 120, in the second from 100 to 70."""
    line = timeline(
        {"a": [0, 100, 110, 130, 200, 200, 210], "b": [0, 0, 5, 10, 100, 125, 140]},
        {"a": [1, 2, 2, 1, 1, 1, 1], "b": [0, 1, 1, 3, 0, 0, 0]},
    )
    assert worst_gap(line) == 20.0
    both = dataclasses.replace(line, backlog={"a": line.backlog["a"], "b": np.array([0, 1, 1, 3, 1, 1, 1], np.int32)})
    assert worst_gap(both) == 50.0, "one stretch: from 120 ahead to 70"


def test_worst_gap_of_one_tenant() -> None:
    assert worst_gap(timeline({"": [0, 100, 110]}, {"": [1, 1, 1]})) == 0.0
    assert worst_gap(timeline({}, {})) == 0.0


@given(st.data())
def test_worst_gap_is_that_of_the_definition(data: st.DataObject) -> None:
    """Of any two tenants, over any two samples between which both wait throughout."""
    samples, tenants = data.draw(st.integers(1, 8)), "abc"[: data.draw(st.integers(1, 3))]
    numbers = st.lists(st.integers(0, 9), min_size=samples, max_size=samples)
    service = {tenant: np.cumsum(data.draw(numbers)).astype(float).tolist() for tenant in tenants}
    backlog = {tenant: [number % 3 for number in data.draw(numbers)] for tenant in tenants}
    expected = 0.0
    for one, other in combinations(tenants, 2):
        for first, last in combinations(range(samples), 2):
            if all(backlog[one][first : last + 1]) and all(backlog[other][first : last + 1]):
                mine, theirs = (service[tenant][last] - service[tenant][first] for tenant in (one, other))
                expected = max(expected, abs(mine - theirs))
    assert worst_gap(timeline(service, backlog)) == expected


def test_a_flood_shows() -> None:
    """From the engine itself: in arrival order, who asks nine times as often is served nine times as much."""
    cost = LinearCost(0.01, 0.001, 0.0, 0.001)
    requests = [TraceRequest(0.0, 50, 10, tenant="polite" if index % 10 == 9 else "flood") for index in range(200)]
    measured = {
        policy: measure(simulate(Trace("flood", requests), Setup(cost, max_rows=4, options={"policy": policy})))
        for policy in ("fcfs", "vtc")
    }
    assert measured["fcfs"].fairness == pytest.approx(jain([9.0, 1.0]), abs=0.05)
    assert measured["vtc"].fairness > 0.95
    assert measured["vtc"].worst_gap < 500 < measured["fcfs"].worst_gap
