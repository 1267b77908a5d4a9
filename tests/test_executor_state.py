"""Deltas on the device's mirror of the rows, and the packed step made from them."""

from __future__ import annotations

import numpy as np
import pytest

from asyncsched.contract import ExecutorLimits, StepPlan
from asyncsched.gpu.device_state import DeviceState, PackedStep

from .models_helpers import appends, chunk, ints, join

LIMITS = ExecutorLimits(max_rows=4, pages=20, page_size=4, max_model_len=30, vocab_size=100)


def step(state: DeviceState, plan: StepPlan, tokens: list[int] | None = None) -> PackedStep | None:
    """Apply, pack and, with ``tokens``, advance and remember them."""
    state.apply(plan)
    packed = state.pack(plan)
    if packed is not None and tokens is not None:
        state.advance(plan, packed)
        state.last_token[packed.rows] = ints(*tokens)
    return packed


def test_a_row_from_join_to_leave() -> None:
    state = DeviceState(LIMITS)
    assert state.table.shape == (4, 8)
    packed = step(state, StepPlan(1, joins=(join(2, [7, 8]),), prefill=(chunk(2, 0, [10, 11, 12], sample=False),)), [])
    assert packed is not None
    assert packed.tokens.tolist() == [10, 11, 12]
    assert packed.rows.size == packed.sampled_at.size == 0
    assert packed.layout.slots.tolist() == [28, 29, 30]
    assert not state.active.any()

    packed = step(state, StepPlan(2, prefill=(chunk(2, 3, [13, 14]),), decode=True), [50])
    assert packed is not None
    assert packed.layout.positions.tolist() == [3, 4]
    assert packed.layout.slots.tolist() == [31, 32]
    assert packed.rows.tolist() == [2]
    assert packed.sampled_at.tolist() == [1]
    assert packed.decoding == 0
    assert state.active.tolist() == [False, False, True, False]

    packed = step(state, StepPlan(3, decode=True), [51])
    assert packed is not None
    assert packed.tokens.tolist() == [50], "the token sampled last is the next input"
    assert packed.layout.slots.tolist() == [33]
    assert state.lengths[2] == 6

    assert step(state, StepPlan(4, leaves=(2,), decode=True)) is None


def test_sampled_rows_are_the_active_ones_ascending_then_chunks_in_plan_order() -> None:
    state = DeviceState(LIMITS)
    step(state, StepPlan(1, joins=(join(3, [0]), join(1, [1])), prefill=(chunk(3, 0, [5]), chunk(1, 0, [6, 7]))), [30, 31])
    plan = StepPlan(
        2,
        joins=(join(2, [2]), join(0, [3])),
        prefill=(chunk(2, 0, [8, 9]), chunk(0, 0, [4, 4], sample=False)),
        decode=True,
    )
    packed = step(state, plan, [40, 41, 42])
    assert packed is not None
    assert packed.tokens.tolist() == [31, 30, 8, 9, 4, 4]
    assert packed.rows.tolist() == [1, 3, 2]
    assert packed.sampled_at.tolist() == [0, 1, 3]
    assert packed.decoding == 2
    assert packed.layout.seg_row.tolist() == [1, 3, 2, 0]
    assert packed.layout.positions.tolist() == [2, 1, 0, 1, 0, 1]
    assert state.active.tolist() == [False, True, True, True]
    assert state.lengths.tolist() == [2, 3, 2, 2]


def test_leaves_come_before_joins_and_joins_before_pages() -> None:
    state = DeviceState(LIMITS)
    step(state, StepPlan(1, joins=(join(0, [1, 2]),), prefill=(chunk(0, 0, [5, 6, 7, 8, 9]),)), [20])
    # The row changes hands within one plan, and its new owner gets a page at once.
    plan = StepPlan(2, leaves=(0,), joins=(join(0, [4], cached=4),), pages=appends((0, 1, 6)), decode=True)
    assert step(state, plan) is None
    assert state.table[0].tolist() == [4, 6, -1, -1, -1, -1, -1, -1]
    packed = step(state, StepPlan(3, prefill=(chunk(0, 4, [3]),)), [21])
    assert packed is not None
    assert packed.layout.slots.tolist() == [24]


def test_decode_only_when_asked() -> None:
    state = DeviceState(LIMITS)
    step(state, StepPlan(1, joins=(join(0, [1]), join(1, [2])), prefill=(chunk(0, 0, [5]),)), [20])
    packed = step(state, StepPlan(2, prefill=(chunk(1, 0, [6]),)), [21])
    assert packed is not None
    assert packed.rows.tolist() == [1]
    assert state.lengths.tolist() == [1, 1, 0, 0]


def test_a_step_that_is_not_committed_can_be_followed_by_others() -> None:
    state = DeviceState(LIMITS)
    step(state, StepPlan(1, joins=(join(0, [1]), join(1, [2])), prefill=(chunk(0, 0, [5]),)), [20])
    step(state, StepPlan(2, prefill=(chunk(1, 0, [6]),), decode=True))  # raised on the device: no commit
    packed = step(state, StepPlan(3, leaves=(1,), decode=True), [21])
    assert packed is not None
    assert packed.tokens.tolist() == [20]
    assert packed.layout.positions.tolist() == [1]


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1, joins=(join(0, [20]),)),
        StepPlan(1, joins=(join(0, [-1]),)),
        StepPlan(1, pages=appends((0, 0, 20))),
        StepPlan(1, joins=(join(0, [1], cached=8),)),
    ],
)
def test_pages_outside_the_pool_never_reach_a_kernel(plan: StepPlan) -> None:
    with pytest.raises(ValueError, match=r"pool|cached"):
        DeviceState(LIMITS).apply(plan)


def test_a_token_without_a_page_is_refused() -> None:
    state = DeviceState(LIMITS)
    with pytest.raises(ValueError, match="row 3 has no page"):
        step(state, StepPlan(1, joins=(join(2, [1]), join(3, [2])), prefill=(chunk(2, 0, [1]), chunk(3, 0, [1] * 5))))
    state.lengths[2] = 32  # over the end of the block table
    state.active[2] = True
    with pytest.raises((ValueError, IndexError)):
        state.pack(StepPlan(2, decode=True))


def test_empty_plans_compute_nothing() -> None:
    state = DeviceState(LIMITS)
    assert step(state, StepPlan(1)) is None
    assert step(state, StepPlan(2, decode=True)) is None
    assert state.table.dtype == state.lengths.dtype == state.last_token.dtype == np.int32
