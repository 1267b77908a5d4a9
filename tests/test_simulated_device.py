"""The simulated device notices every breach of the contract, so that a test which uses it cannot miss one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncsched.contract import NO_PAGES, ExecutorLimits, IntArray, PageAppends, PrefillChunk, RowJoin, StepPlan, StepResult
from asyncsched.sampling_params import SamplingParams
from asyncsched.testing import SimulatedDevice, SimulatedExecutor, SimulationError, expected_tokens

LIMITS = ExecutorLimits(max_rows=4, pages=8, page_size=4, max_model_len=16, vocab_size=50)
PARAMS = SamplingParams()


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def join(row: int, *pages: int, cached: int = 0, seed: int = 0, number: int = 1, generated: int = 0) -> RowJoin:
    return RowJoin(row, number, ints(*pages), cached, PARAMS, seed, generated=generated)


def chunk(row: int, tokens: Sequence[int], start: int = 0, *, sample: bool = True) -> PrefillChunk:
    return PrefillChunk(row, start, ints(*tokens), sample)


def appends(*entries: tuple[int, int, int]) -> PageAppends:
    rows, indices, pages = zip(*entries, strict=True)
    return PageAppends(ints(*rows), ints(*indices), ints(*pages))


class Bench:
    """A device and the number of its next step."""

    def __init__(self, **options: Any) -> None:
        self.device = SimulatedDevice(LIMITS, **options)
        self.next = 1

    def run(
        self,
        *prefill: PrefillChunk,
        joins: Sequence[RowJoin] = (),
        leaves: Sequence[int] = (),
        pages: PageAppends = NO_PAGES,
        decode: bool = False,
    ) -> list[tuple[int, int]]:
        """One step; returns ``(row, token)`` in the order of the result."""
        plan = StepPlan(self.next, tuple(joins), tuple(leaves), pages, prefill, decode)
        self.next += 1
        self.device.apply_deltas(plan)
        rows, tokens = self.device.compute(plan)
        return list(zip(rows.tolist(), tokens.tolist(), strict=True))


def running(*prompt: int, pages: Sequence[int] = (0, 1), row: int = 0, **options: Any) -> Bench:
    """A device on which one row decodes."""
    bench = Bench(**options)
    bench.run(chunk(row, prompt), joins=[join(row, *pages)])
    return bench


# What it computes


def test_prefill_and_decode_give_the_oracles_tokens() -> None:
    bench = Bench()
    output = bench.run(chunk(2, [1, 2, 3, 4, 5]), joins=[join(2, 6, 3, 1, seed=9)])
    for _ in range(4):
        output += bench.run(decode=True)
    assert output == [(2, token) for token in expected_tokens([1, 2, 3, 4, 5], 9, 5, 50)]


def test_chunks_and_page_appends_change_nothing() -> None:
    bench = Bench()
    assert bench.run(chunk(0, [1, 2, 3], sample=False), joins=[join(0, 5)]) == []
    output = bench.run(chunk(0, [4, 5], start=3), pages=appends((0, 1, 2)))
    for _ in range(3):
        output += bench.run(decode=True)
    output += bench.run(decode=True, pages=appends((0, 2, 7)))
    assert [token for _, token in output] == expected_tokens([1, 2, 3, 4, 5], 0, 5, 50)


def test_rows_that_decode_come_first_and_ascending() -> None:
    bench = Bench()
    bench.run(chunk(3, [1]), chunk(1, [2]), joins=[join(3, 0), join(1, 1)])
    rows = bench.run(chunk(2, [3]), chunk(0, [4]), joins=[join(2, 2), join(0, 3)], decode=True)
    assert [row for row, _ in rows] == [1, 3, 2, 0]


def test_a_step_without_decode_leaves_active_rows_alone() -> None:
    bench = running(1, 2)
    assert [row for row, _ in bench.run(chunk(1, [3]), joins=[join(1, 4)])] == [1]
    assert dict(bench.run(decode=True))[0] == expected_tokens([1, 2], 0, 2, 50)[1]


def test_cached_pages_stand_for_their_tokens() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    bench = running(*prompt)
    cold = expected_tokens(prompt, 5, 1, 50)
    assert bench.run(chunk(1, [5, 6], start=4), joins=[join(1, 0, 2, cached=4, seed=5)]) == [(1, cold[0])]


def test_requests_of_one_step_may_share_pages() -> None:
    bench = Bench()
    prompt = [1, 2, 3, 4, 5, 6]
    rows = bench.run(chunk(0, prompt), chunk(1, [5, 6], start=4), joins=[join(0, 0, 1), join(1, 0, 2, cached=4)])
    assert [token for _, token in rows] == expected_tokens(prompt, 0, 1, 50) * 2


def test_a_resumed_request_goes_on_where_it_was() -> None:
    """The second join computes prompt and output again and samples the fourth token."""
    whole = expected_tokens([1, 2], 7, 4, 50)
    bench = Bench()
    assert bench.run(chunk(0, [1, 2, *whole[:3]]), joins=[join(0, 0, 1, seed=7, generated=3)]) == [(0, whole[3])]


# What it refuses


def test_steps_are_numbered_without_gaps() -> None:
    bench = running(1)
    bench.next += 1
    with pytest.raises(SimulationError, match="step 3 follows step 1"):
        bench.run(decode=True)


def test_a_step_is_not_run_twice() -> None:
    bench = running(1)
    bench.next = 1
    with pytest.raises(SimulationError, match="step 1 follows step 1"):
        bench.run(decode=True)


def test_a_row_is_joined_by_one_request_at_a_time() -> None:
    bench = running(1)
    with pytest.raises(SimulationError, match="joins row 0, which is taken"):
        bench.run(chunk(0, [2]), joins=[join(0, 4, number=2)])


def test_a_row_may_leave_and_be_joined_in_one_step() -> None:
    bench = running(1)
    assert len(bench.run(chunk(0, [2]), leaves=[0], joins=[join(0, 4, number=2)])) == 1


def test_only_joined_rows_leave() -> None:
    bench = running(1)
    with pytest.raises(SimulationError, match="row 1 leaves but never joined"):
        bench.run(decode=True, leaves=[1])


def test_a_row_leaves_once() -> None:
    bench = running(1)
    bench.run(chunk(1, [1]), joins=[join(1, 2)], leaves=[0])
    with pytest.raises(SimulationError, match="row 0 leaves"):
        bench.run(decode=True, leaves=[0])


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_that_do_not_exist(row: int) -> None:
    with pytest.raises(SimulationError):
        running(1, row=row)
    bench = running(1)
    with pytest.raises(SimulationError):
        bench.run(decode=True, leaves=[row])
    bench = running(1)
    with pytest.raises(SimulationError):
        bench.run(chunk(row, [1]))
    bench = running(1)
    with pytest.raises(SimulationError):
        bench.run(decode=True, pages=appends((row, 0, 1)))


def test_only_whole_pages_are_cached() -> None:
    bench = running(1, 2, 3, 4, 5)
    with pytest.raises(SimulationError, match="whole number of pages"):
        bench.run(chunk(1, [4, 5], start=3), joins=[join(1, 0, 2, cached=3)])


@pytest.mark.parametrize("page", [-1, 8])
def test_pages_that_do_not_exist(page: int) -> None:
    with pytest.raises(SimulationError, match="do not exist"):
        Bench().run(chunk(0, [1]), joins=[join(0, 0, page)])
    bench = running(1)
    with pytest.raises(SimulationError):
        bench.run(decode=True, pages=appends((0, 2, page)))


def test_a_page_appears_once_in_a_block_table() -> None:
    with pytest.raises(SimulationError, match="twice"):
        Bench().run(chunk(0, [1]), joins=[join(0, 3, 3)])
    bench = running(1)
    with pytest.raises(SimulationError):
        bench.run(decode=True, pages=appends((0, 2, 1)))


def test_a_block_table_is_no_longer_than_the_model() -> None:
    with pytest.raises(SimulationError):
        Bench().run(chunk(0, [1]), joins=[join(0, 0, 1, 2, 3, 4)])
    bench = running(1)
    with pytest.raises(SimulationError):
        bench.run(decode=True, pages=appends((0, 4, 5)))


def test_pages_are_appended_to_joined_rows() -> None:
    bench = running(1)
    with pytest.raises(SimulationError, match="not joined"):
        bench.run(decode=True, pages=appends((1, 0, 5)))


def test_a_plan_computes_something() -> None:
    bench = running(1)
    with pytest.raises(SimulationError, match="nothing to compute"):
        bench.run()
    bench = running(1)
    with pytest.raises(SimulationError, match="nothing to compute"):
        bench.run(leaves=[0], decode=True)


def test_the_token_budget_counts_prompts_and_decode_rows() -> None:
    bench = running(1, token_budget=4)
    bench.run(chunk(1, [1, 2, 3]), joins=[join(1, 2)], decode=True)
    with pytest.raises(SimulationError, match="5 tokens are over the budget of 4"):
        bench.run(chunk(2, [1, 2, 3]), joins=[join(2, 3)], decode=True)


def test_a_prompt_over_the_budget_is_allowed_alone() -> None:
    running(1, 2, 3, 4, 5, token_budget=3)
    bench = running(1, token_budget=3)
    with pytest.raises(SimulationError, match="over the budget"):
        bench.run(chunk(1, [1, 2, 3, 4]), joins=[join(1, 2)], decode=True)


def test_chunks_are_for_rows_that_prefill() -> None:
    bench = running(1)
    with pytest.raises(SimulationError, match="not prefilling"):
        bench.run(chunk(0, [2], start=1))
    bench = running(1)
    with pytest.raises(SimulationError, match="not prefilling"):
        bench.run(chunk(1, [2]))


@pytest.mark.parametrize("start", [0, 1, 3])
def test_chunks_continue_their_row(start: int) -> None:
    bench = Bench()
    bench.run(chunk(0, [1, 2], sample=False), joins=[join(0, 0)])
    with pytest.raises(SimulationError, match=f"starts at {start}, not 2"):
        bench.run(chunk(0, [3], start=start))


def test_the_first_chunk_starts_after_what_is_cached() -> None:
    bench = running(1, 2, 3, 4, 5)
    with pytest.raises(SimulationError, match="starts at 0, not 4"):
        bench.run(chunk(1, [1, 2, 3, 4, 5]), joins=[join(1, 0, 2, cached=4)])


@pytest.mark.parametrize("tokens", [[], [50], [-1], [3, 50]])
def test_impossible_tokens(tokens: list[int]) -> None:
    with pytest.raises(SimulationError, match="impossible tokens"):
        Bench().run(chunk(0, tokens), chunk(1, [1]), joins=[join(0, 0), join(1, 1)])


def test_every_position_needs_a_page() -> None:
    with pytest.raises(SimulationError, match="no page"):
        Bench().run(chunk(0, [1, 2, 3, 4, 5]), joins=[join(0, 0)])
    bench = running(1, 2, 3, 4, pages=[0])
    with pytest.raises(SimulationError, match="no page"):
        bench.run(decode=True)


def test_no_row_grows_beyond_the_models_length() -> None:
    with pytest.raises(SimulationError):
        running(*[1] * 17, pages=[0, 1, 2, 3])
    bench = running(*[1] * 16, pages=[0, 1, 2, 3])
    with pytest.raises(SimulationError):
        bench.run(decode=True)


def test_cached_pages_must_have_been_written() -> None:
    with pytest.raises(SimulationError, match="nothing wrote"):
        Bench().run(chunk(0, [5], start=4), joins=[join(0, 0, 1, cached=4)])
    bench = running(1, 2, 3)  # the page is not full
    with pytest.raises(SimulationError, match="nothing wrote"):
        bench.run(chunk(1, [5], start=4), joins=[join(1, 0, 2, cached=4)])


def test_another_tenants_leftovers_are_not_read() -> None:
    """A page that has changed hands counts as empty until its new owner writes it."""
    bench = running(1, 2, 3, 4, 5)
    bench.run(chunk(1, [9]), leaves=[0], joins=[join(1, 2, 0)])
    with pytest.raises(SimulationError, match="nothing wrote"):
        bench.run(chunk(2, [5], start=4), joins=[join(2, 0, 3, cached=4)])


def test_a_wrong_prefix_shows_in_the_tokens() -> None:
    bench = running(1, 2, 3, 4, 5)
    ((_, token),) = bench.run(chunk(1, [5], start=4), joins=[join(1, 0, 2, cached=4)])
    assert token == expected_tokens([1, 2, 3, 4, 5], 0, 1, 50)[0]
    assert token != expected_tokens([1, 2, 3, 9, 5], 0, 1, 50)[0]


def test_a_page_in_use_is_not_given_to_another_row() -> None:
    """Its owner may never read the damaged slots itself: the theft must show at once."""
    bench = running(1, 2, 3, 4, 5)
    with pytest.raises(SimulationError):
        bench.run(chunk(1, [7, 8]), joins=[join(1, 0, number=2)])
    bench = running(1, 2, 3, 4, 5)
    with pytest.raises(SimulationError):
        bench.run(chunk(1, [7, 8, 9, 7, 8]), joins=[join(1, 3, 1, number=2)])
    bench = running(1, 2, 3, 4, 5)
    bench.run(chunk(1, [7, 8], sample=False), joins=[join(1, 3, number=2)])
    with pytest.raises(SimulationError):
        bench.run(decode=True, pages=appends((1, 1, 0)))


def test_one_page_is_not_given_to_two_newcomers() -> None:
    with pytest.raises(SimulationError):
        Bench().run(chunk(0, [1, 2]), chunk(1, [3, 4]), joins=[join(0, 5), join(1, 5, number=2)])


def test_shared_pages_are_not_written() -> None:
    """The second row treats the first one's half-full last page as its own."""
    bench = running(1, 2, 3, 4, 5, 6)
    bench.run(chunk(1, [9], start=4), joins=[join(1, 0, 2, cached=4, number=2)])
    bench.device.table[1, 1] = 1
    with pytest.raises(SimulationError, match="overwrite shared pages"):
        bench.run(decode=True)


def test_what_has_left_may_be_overwritten() -> None:
    bench = running(1, 2, 3, 4, 5)
    assert len(bench.run(chunk(1, [7, 8]), leaves=[0], joins=[join(1, 0, number=2)])) == 1


# The executor around it


def run_executor(plans: Sequence[StepPlan], **options: Any) -> list[StepResult]:
    executor = SimulatedExecutor(LIMITS, **options)
    return [executor.run(plan, 1.0, 2.0) for plan in plans]


FIRST = StepPlan(1, (join(0, 0, 1),), prefill=(chunk(0, [1, 2]),))


def test_a_breach_is_fatal() -> None:
    (result,) = run_executor([StepPlan(2, prefill=FIRST.prefill)])
    assert isinstance(result.error, SimulationError)
    assert result.fatal
    assert len(result.rows) == len(result.tokens) == 0


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1, (join(9, 0),), prefill=(chunk(9, [1]),)),
        StepPlan(1, (join(0, 0),), prefill=(chunk(0, [1] * 40),)),
        StepPlan(1, (join(0, 0, 1, 2, 3, 4, 5),), prefill=(chunk(0, [1]),)),
        StepPlan(1, (join(0, 0),), pages=appends((0, 99, 1)), prefill=(chunk(0, [1]),)),
        StepPlan(1, (join(0, 0),), leaves=(77,), prefill=(chunk(0, [1]),)),
    ],
    ids=["row", "position", "table", "append", "leave"],
)
def test_indices_out_of_range_are_fatal_too(plan: StepPlan) -> None:
    """They are breaches like any other, not a step that happened to fail."""
    (result,) = run_executor([plan])
    assert result.error is not None
    assert result.fatal


def test_a_fault_fails_one_step_and_its_deltas_hold() -> None:
    boom = RuntimeError("boom")
    second = StepPlan(2, (join(1, 2),), leaves=(0,), prefill=(chunk(1, [3]),))
    third = StepPlan(3, leaves=(1,), joins=(join(0, 4),), prefill=(chunk(0, [5]),))
    results = run_executor([FIRST, second, third], faults={2: boom})
    assert [result.error for result in results] == [None, boom, None]
    assert not results[1].fatal
    assert results[2].rows.tolist() == [0]


def test_a_lost_device_says_so() -> None:
    results = run_executor([FIRST, StepPlan(2, decode=True)], lost_at=2)
    assert [result.fatal for result in results] == [False, True]


def test_results_carry_their_stamps() -> None:
    (result,) = run_executor([FIRST])
    assert (result.step, result.launched_at, result.completed_at) == (1, 1.0, 2.0)
