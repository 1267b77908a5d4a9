"""The page pool: nothing before its fence, nothing lost, nothing twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from asyncsched.contract import IntArray
from asyncsched.pages import PagePool


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def test_pages_are_taken_once() -> None:
    pool = PagePool(5)
    first, second = pool.take(2), pool.take(3)
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3, 4]
    assert first.dtype == np.int32
    assert pool.free == 0


def test_taking_too_many_changes_nothing() -> None:
    pool = PagePool(3)
    pool.take(1)
    with pytest.raises(IndexError, match="3 pages wanted, 2 free"):
        pool.take(3)
    assert pool.free == 2
    assert len(pool.take(2)) == 2


def test_taking_none_is_allowed() -> None:
    pool = PagePool(1)
    pool.take(1)
    assert len(pool.take(0)) == 0
    assert len(PagePool(1).take(0)) == 0


def test_pages_wait_for_their_fence() -> None:
    pool = PagePool(4)
    pool.advance(1)
    held = pool.take(4)
    pool.release(held[:1], 2)
    pool.release(held[1:], 4)
    assert (pool.free, pool.limbo) == (0, 4)
    pool.advance(2)
    assert (pool.free, pool.limbo) == (1, 3)
    pool.advance(3)
    assert (pool.free, pool.limbo) == (1, 3)
    pool.advance(4)
    assert (pool.free, pool.limbo) == (4, 0)


def test_pages_released_while_nothing_is_in_flight_are_free_without_another_step() -> None:
    pool = PagePool(2)
    pool.advance(3)
    pool.release(pool.take(2), 3)
    assert (pool.free, pool.limbo) == (2, 0)


def test_what_was_taken_is_the_callers() -> None:
    """A block table must not change when the pool's stack does."""
    pool = PagePool(4)
    held = pool.take(4)
    kept = held.tolist()
    pool.release(held[2:], 0)
    pool.advance(0)
    pool.take(2)
    pool.release(ints(kept[1], kept[0]), 0)
    pool.advance(0)
    assert held.tolist() == kept


class Fences(RuleBasedStateMachine):
    """Any mix of taking, releasing in parts, submitting and completing."""

    @initialize(pages=st.integers(1, 24))
    def start(self, pages: int) -> None:
        self.pool, self.twin = PagePool(pages), PagePool(pages)
        self.free = set(range(pages))
        self.limbo: list[tuple[int, list[int]]] = []
        self.held: list[int] = []
        self.submitted = self.completed = 0

    @rule(share=st.floats(0, 1))
    def take(self, share: float) -> None:
        count = round(share * len(self.free))
        pages = self.pool.take(count).tolist()
        assert len(set(pages)) == count
        assert set(pages) <= self.free
        assert self.twin.take(count).tolist() == pages, "the same calls must give the same pages"
        self.free -= set(pages)
        self.held += pages

    @rule(extra=st.integers(1, 3))
    def take_too_many(self, extra: int) -> None:
        with pytest.raises(IndexError):
            self.pool.take(len(self.free) + extra)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(self.held)))
        last = data.draw(st.integers(first, len(self.held)))
        pages, self.held = self.held[first:last], self.held[:first] + self.held[last:]
        for pool in (self.pool, self.twin):
            pool.release(ints(*pages), self.submitted)
        self.limbo.append((self.submitted, pages))
        self.collect()

    @rule()
    def submit(self) -> None:
        self.submitted += 1

    @precondition(lambda self: self.completed < self.submitted)
    @rule()
    def complete(self) -> None:
        self.completed += 1
        for pool in (self.pool, self.twin):
            pool.advance(self.completed)
        self.collect()

    def collect(self) -> None:
        self.free.update(page for fence, pages in self.limbo if fence <= self.completed for page in pages)
        self.limbo = [(fence, pages) for fence, pages in self.limbo if fence > self.completed]

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        fenced = [page for _, pages in self.limbo for page in pages]
        assert (self.pool.free, self.pool.limbo) == (len(self.free), len(fenced))
        assert sorted(self.pool.free_pages().tolist()) == sorted(self.free)
        assert sorted(self.pool.limbo_pages().tolist()) == sorted(fenced)
        assert sorted([*self.free, *fenced, *self.held]) == list(range(self.pool.total))


def test_fences() -> None:
    brisk = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)
    run_state_machine_as_test(Fences, settings=brisk)
