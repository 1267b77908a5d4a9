"""The row table against models that know nothing of arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from asyncsched.rows import STOP_SLOTS, WINDOW, RowTable

BRISK = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)


def test_rows_are_given_out_in_the_order_they_became_free() -> None:
    table = RowTable(3)
    assert [table.take(lease) for lease in (1, 2, 3)] == [0, 1, 2]
    table.release(1, 1)
    table.release(0, 1)
    table.advance(1)
    assert [table.take(4), table.take(5)] == [1, 0]


def test_a_released_row_waits_for_its_fence() -> None:
    table = RowTable(1)
    table.advance(4)
    row = table.take(1)
    table.release(row, 6)
    assert (table.free, table.limbo, table.in_use) == (0, 1, 0)
    table.advance(5)
    assert table.free == 0
    table.advance(6)
    assert (table.free, table.limbo) == (1, 0)


def test_a_row_released_while_nothing_is_in_flight_is_free_without_another_step() -> None:
    table = RowTable(1)
    table.advance(6)
    table.release(table.take(1), 6)
    assert (table.free, table.limbo) == (1, 0)


def test_release_leaves_nothing_to_the_next_holder() -> None:
    table = RowTable(1)
    row = table.take(7)
    table.stop_ids[row, :2] = [3, 4]
    table.listening[row] = table.eager[row] = True
    table.set_decoding(row, True)
    table.release(row, 0)
    table.advance(0)
    assert table.take(8) == row
    assert (table.stop_ids[row] == -1).all()
    assert not table.listening[row]
    assert not table.eager[row]
    assert not table.decoding[row]
    assert len(table.decode_rows()) == 0
    assert table.lease[row] == 8


def test_decode_rows_are_ascending_and_current() -> None:
    table = RowTable(5)
    for row in (3, 0, 4):
        table.set_decoding(row, True)
    assert table.decode_rows().tolist() == [0, 3, 4]
    assert table.decode_rows().dtype == np.int32
    table.set_decoding(3, False)
    table.set_decoding(3, False)
    table.set_decoding(1, True)
    assert table.decode_rows().tolist() == [0, 1, 4]


def test_plan_decode_returns_the_rows_that_need_no_further_step() -> None:
    table = RowTable(4)
    table.remaining[:] = [1, 3, 2, 9]
    table.length[:] = [10, 20, 30, 40]
    rows = np.array([0, 2, 3], np.int32)
    assert table.plan_decode(rows).tolist() == [0]
    assert table.plan_decode(rows[1:]).tolist() == [2]
    assert table.length.tolist() == [11, 20, 32, 42]
    assert table.remaining.tolist() == [0, 3, 0, 7]


@pytest.mark.parametrize("start", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW - 1])
def test_pending_across_the_end_of_the_window(start: int) -> None:
    """A resumed row starts anywhere in the window; nothing is lost where it wraps."""
    table = RowTable(2)
    row = np.array([1], np.int32)
    table.max_new[1] = 10_000
    table.received[1] = start
    flushed: list[int] = []
    for token in range(2 * WINDOW + 5):
        received = table.receive(row, np.array([token], np.int32))[0]
        assert flushed + table.pending(1, start + len(flushed)) == list(range(token + 1))
        if received[0] % WINDOW == 0:
            flushed += table.pending(1, start + len(flushed))
    assert len(flushed) >= WINDOW


class Fences(RuleBasedStateMachine):
    """Rows in, rows out: none before its fence, none lost, none twice."""

    @initialize(rows=st.integers(1, 6))
    def start(self, rows: int) -> None:
        self.table = RowTable(rows)
        self.free = list(range(rows))
        self.limbo: list[tuple[int, int]] = []
        self.held: dict[int, int] = {}
        self.submitted = self.completed = self.leases = 0

    @precondition(lambda self: self.free)
    @rule()
    def take(self) -> None:
        self.leases += 1
        row = self.table.take(self.leases)
        assert row == self.free.pop(0)
        self.held[row] = self.leases

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[row]
        self.limbo.append((self.submitted, row))
        self.table.release(row, self.submitted)
        self.collect()

    @rule()
    def submit(self) -> None:
        self.submitted += 1

    @precondition(lambda self: self.completed < self.submitted)
    @rule()
    def complete(self) -> None:
        self.completed += 1
        self.table.advance(self.completed)
        self.collect()

    def collect(self) -> None:
        self.free += [row for fence, row in self.limbo if fence <= self.completed]
        self.limbo = [(fence, row) for fence, row in self.limbo if fence > self.completed]

    @invariant()
    def counts_agree(self) -> None:
        assert (self.table.free, self.table.limbo, self.table.in_use) == (len(self.free), len(self.limbo), len(self.held))
        assert {row: lease for row, lease in enumerate(self.table.lease.tolist()) if lease} == self.held


def test_fences() -> None:
    run_state_machine_as_test(Fences, settings=BRISK)


@dataclass
class NaiveRow:
    """One row, token by token."""

    max_new: int
    min_new: int
    stop_ids: list[int]
    flushed: list[int]
    window: list[int] = field(default_factory=list)
    planned: int = 0

    def receive(self, token: int) -> tuple[int, bool, bool]:
        self.window.append(token)
        received = len(self.flushed) + len(self.window)
        return received, token in self.stop_ids and received >= self.min_new, received >= self.max_new


ROW = st.tuples(
    st.integers(1, 150),  # max_new
    st.integers(0, 80),  # min_new
    st.lists(st.integers(0, 3), max_size=STOP_SLOTS),  # stop ids
    st.sampled_from([0, 0, 1, 5, WINDOW - 1, WINDOW, WINDOW + 1]),  # generated before it was resumed
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(rows=st.lists(ROW, min_size=1, max_size=5), data=st.data())
def test_receiving_equals_one_row_at_a_time(rows: list[tuple[int, int, list[int], int]], data: st.DataObject) -> None:
    """Counting, stop ids, lengths and windows, with rows ending and others going on."""
    table = RowTable(len(rows))
    model: dict[int, NaiveRow] = {}
    for max_new, min_new, stop_ids, before in rows:
        row = table.take(len(model) + 1)
        table.max_new[row], table.min_new[row], table.received[row] = before + max_new, min_new, before
        table.remaining[row] = max_new
        table.stop_ids[row, : len(stop_ids)] = stop_ids
        table.set_decoding(row, True)
        model[row] = NaiveRow(before + max_new, min_new, stop_ids, [9] * before)
    tokens = data.draw(st.lists(st.integers(0, 12), min_size=17, max_size=40))
    turn = 0
    while model:
        active = table.decode_rows()
        assert active.tolist() == sorted(model)
        last = table.plan_decode(active)
        for one in model.values():
            one.planned += 1
        values = np.array([tokens[(turn * 7 + row * 3) % len(tokens)] for row in active.tolist()], np.int32)
        received, stopped, whole = table.receive(active, values)
        expected = [model[row].receive(token) for row, token in zip(active.tolist(), values.tolist(), strict=True)]
        assert list(zip(received.tolist(), stopped.tolist(), whole.tolist(), strict=True)) == expected
        assert last.tolist() == active[whole].tolist()  # the last planned token is the last received one
        for row, one in list(model.items()):
            assert table.pending(row, len(one.flushed)) == one.window
            if int(table.received[row]) % WINDOW == 0:
                one.flushed, one.window = one.flushed + one.window, []
        for row in active[stopped | whole].tolist():
            del model[row]
            table.release(row, turn)
        turn += 1
