"""Positions and slots of a packed step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched.gpu.kernels import StepLayout

TABLE = np.arange(40, dtype=np.int32).reshape(5, 8)[::-1].copy()


@given(
    page_size=st.sampled_from([1, 2, 16, 32]),
    rows=st.lists(st.integers(0, 4), max_size=5),
    data=st.data(),
)
def test_every_token_has_its_position_and_slot(page_size: int, rows: list[int], data: st.DataObject) -> None:
    most = 8 * page_size
    starts = [data.draw(st.integers(0, most - 1)) for _ in rows]
    lengths = [data.draw(st.integers(0, min(10, most - start))) for start in starts]
    layout = StepLayout.build(TABLE, np.array(rows, np.int32), np.array(lengths), np.array(starts), page_size)
    places = [(r, p) for r, start, n in zip(rows, starts, lengths, strict=True) for p in range(start, start + n)]
    assert layout.tokens == len(places)
    assert layout.positions.tolist() == [p for _, p in places]
    assert layout.slots.tolist() == [TABLE[r, p // page_size] * page_size + p % page_size for r, p in places]
    assert layout.seg_first.tolist() == [sum(lengths[:i]) for i in range(len(rows))]
    assert layout.end == max((s + n for s, n in zip(starts, lengths, strict=True)), default=0)
    assert layout.slots.dtype == np.int64


@pytest.mark.parametrize(
    ("row", "length", "start"),
    [(5, 1, 0), (-1, 1, 0), (0, 1, 32), (0, 33, 0), (0, -1, 4), (0, 1, -1)],
)
def test_segments_outside_the_table_are_refused(row: int, length: int, start: int) -> None:
    with pytest.raises(ValueError, match="outside the block table"):
        StepLayout.build(TABLE, np.array([row]), np.array([length]), np.array([start]), 4)


def test_malformed_arrays_are_refused() -> None:
    one = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="int32 matrix"):
        StepLayout.build(TABLE.astype(np.int64), one, one, one, 4)
    with pytest.raises(ValueError, match="int32 matrix"):
        StepLayout.build(TABLE.T, one, one, one, 4)
    with pytest.raises(ValueError, match="one entry per segment"):
        StepLayout.build(TABLE, one, np.zeros(2, np.int32), one, 4)
