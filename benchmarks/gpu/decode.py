"""A decode step of Llama-3.1-8B's shape against the time its bytes take: weights and cache, each read once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from asyncsched import PrefillChunk, RowJoin, SamplingParams, StepPlan

from .arithmetic import decode_bytes
from .lab import LLAMA_8B, Lab
from .loaded import Loaded
from .records import Record

TARGETS = (1.25, 1.3, 1.4)
"""Step time over the floor, for the sizes of ``Sizes.decode_rows``."""
_WARM_UP = 3  # steps; a graph may be captured in the first


def run(lab: Lab) -> None:
    """Measure every number of rows."""
    loaded, sizes = lab.model(LLAMA_8B), lab.sizes
    bandwidth = lab.copy_bandwidth()
    loaded.reusable.fill_with_noise()
    for rows, target in zip(sizes.decode_rows, TARGETS, strict=False):
        seconds, context = step_seconds(loaded, rows, sizes.decode_context, sizes.decode_steps)
        needed = decode_bytes(loaded.shape, rows, context, loaded.itemsize)
        floor = needed / bandwidth
        details = {
            "step_ms": seconds * 1e3,
            "floor_ms": floor * 1e3,
            "bytes": needed,
            "mean_context": context,
            "tokens_per_s": rows / seconds,
        }
        figure = f"8B decode step ÷ memory floor, {rows} rows × {sizes.decode_context}"
        lab.emit(Record("decode", figure, seconds / floor, target, at_most=True, details=details))


def step_seconds(loaded: Loaded, rows: int, context: int, steps: int) -> tuple[float, float]:
    """Median device seconds of a decode step, and the mean number of positions that a row attended to in those measured.

    The rows' contexts are whatever is in the pool; every row has pages of its own.
    """
    results = loaded.reusable.launch(decode_plans(loaded, rows, context, steps))
    measured = results[1 + _WARM_UP :]
    seconds = statistics.median(result.completed_at - result.launched_at for result in measured)
    # The first plan leaves context + 1 tokens, and decode step i attends to i + 1 more.
    mean = statistics.fmean(context + 1 + step for step in range(1 + _WARM_UP, 1 + steps))
    return seconds, mean


def decode_plans(loaded: Loaded, rows: int, context: int, steps: int) -> Iterator[StepPlan]:
    """One plan in which the rows join with their contexts, then ``steps`` plans of decoding alone."""
    size = loaded.reusable.limits.page_size
    each = -(-(context + 1 + steps) // size)
    pages = np.random.default_rng(0).permutation(loaded.reusable.limits.pages).astype(np.int32)
    params = SamplingParams(temperature=0.0)
    joins = tuple(RowJoin(row, row, pages[row * each : (row + 1) * each], context, params, seed=0) for row in range(rows))
    token = np.ones(1, np.int32)
    yield StepPlan(0, joins=joins, prefill=tuple(PrefillChunk(row, context, token, True) for row in range(rows)))
    for step in range(1, steps + 1):
        yield StepPlan(step, decode=True)
