"""One tile of attention: up to 24 queries of one key/value head over their whole context.

The phases of a block of 64 positions: find it in the pool, score it, turn scores into weights,
add the weighted values. What is static (the numbers of accumulators) is in *markers*, see
:mod:`tile`; head size, page size and group are ordinary numbers, so that one compilation serves
them all.

Compute thread only, inside compiled functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ._jit import part
from .lanemath import add, between, exp2, larger, largest, mul, splat, sub, tanh, total
from .simd import LANES, load, pointer, store, store_part
from .tile import fma_tile, load_indirect, load_row, load_tile, prefetch_indirect, store_tile, zeros

BLOCK = 64
VECTORS = BLOCK // LANES
BASES = 128  # bytes in front of a thread's memory for the addresses of a block
TILE = 24

_LOWEST = np.float32(-3e38)
_MASKED = np.float32(-np.inf)
_ZERO = np.float32(0.0)


class Shape(NamedTuple):
    """Sizes that are constant in a call: numbers of heads and of query heads per key head, head size and so on."""

    heads: Any
    kv_heads: Any
    group: Any
    dim: Any
    width: Any
    page_size: Any
    window: Any


class Data(NamedTuple):
    """Buffers: the call's tensors and the segment's block table."""

    q: Any
    keys: Any
    values: Any
    out: Any
    table: Any


class Place(NamedTuple):
    """The tile: queries ``first … first + size - 1`` of a segment's (token, head of the group) pairs."""

    token: Any
    start: Any
    first: Any
    size: Any
    head: Any


def scratch_floats(rows: int, dim: int, width: int) -> int:
    """Float32 words of memory that any tile needs."""
    most = -(-TILE // rows) * rows
    return BASES // 4 + most * (dim + BLOCK + LANES + 1 + width) + 2 * LANES


@part
def _locate(
    bases: Any, table: Any, begin: Any, lowest: Any, last: Any, head: Any, kv_heads: Any, dim: Any, page_size: Any
) -> None:
    """Where the vectors of 16 positions from ``begin`` on are, and those to read next.

    Slots of ``bases``: keys, values, keys to come, values to come. Behind the last block comes
    the next head's first. A vector past the last position repeats the one with it.
    """
    for slot in range(0, 4 * VECTORS, 2 * VECTORS):
        for c in range(VECTORS):
            t = begin + c * LANES
            if t > last:
                t = last
            t -= t % LANES
            page = np.int64(table[t // page_size]) * kv_heads + head
            offset = t % page_size
            bases[slot + c] = page * dim * page_size + offset
            bases[slot + VECTORS + c] = (page * page_size + offset) * dim
        begin += BLOCK
        if begin > last:
            begin = lowest
            if head + 1 < kv_heads:
                head += 1


@part
def _stage(
    bases: Any,
    table: Any,
    begin: Any,
    used: Any,
    head: Any,
    kv_heads: Any,
    dim: Any,
    width: Any,
    page_size: Any,
    keys: Any,
    values: Any,
    stage: Any,
) -> None:
    """Copy a block whose pages or heads do not fit vectors of 16: keys ``[dim, 64]``, then values ``[64, width]``."""
    behind = dim * BLOCK
    for t in range(used):
        page = np.int64(table[(begin + t) // page_size]) * kv_heads + head
        offset = (begin + t) % page_size
        for d in range(dim):
            stage[d * BLOCK + t] = keys[(page * dim + d) * page_size + offset]
            stage[behind + t * width + d] = values[(page * page_size + offset) * dim + d]
    for slot in range(0, 4 * VECTORS, 2 * VECTORS):
        for c in range(VECTORS):
            bases[slot + c] = c * LANES
            bases[slot + VECTORS + c] = behind + c * LANES * width


@part
def _score(
    rows: Any,
    columns: Any,
    work: Any,
    queries: Any,
    scores: Any,
    padded: Any,
    dim: Any,
    keys: Any,
    values: Any,
    bases: Any,
    vectors: Any,
    stride: Any,
) -> None:
    """Scores of all queries against one block, while the next block is on its way to the cache."""
    step = len(rows)
    for r in range(0, padded, step):
        for c in range(0, vectors, len(columns)):
            tile = zeros(rows, columns)
            for d in range(dim):
                if r == 0:
                    prefetch_indirect(columns, keys, bases, 2 * VECTORS + c, d * stride)
                    prefetch_indirect(columns, values, bases, 3 * VECTORS + c, d * LANES)
                row = load_indirect(columns, keys, bases, c, d * stride)
                tile = fma_tile(tile, work, queries + r * dim + d * step, 1, row)
            store_tile(rows, columns, tile, work, scores + r * BLOCK + c * LANES, BLOCK)


@part
def _cap(work: Any, scores: Any, padded: Any, cap: Any) -> None:
    """Bend scores that were divided by the cap, in place."""
    for i in range(scores, scores + padded * BLOCK, LANES):
        store(work, i, mul(tanh(load(work, i)), splat(cap)))


@part
def _weigh(
    work: Any, row: Any, sums_at: Any, top_at: Any, output: Any, width: Any, position: Any, window: Any, vectors: Any
) -> None:
    """One query's scores to softmax weights under its running maximum; rescale what was summed under an older one."""
    oldest = position - window + 1 if window > 0 else 0
    before = work[top_at]
    top = splat(before)
    for c in range(0, vectors * LANES, LANES):
        x = between(load(work, row + c), oldest - c, position - c, _MASKED)
        store(work, row + c, x)
        top = larger(x, top)
    now = largest(top)
    sums = load(work, sums_at)
    if now > before:
        work[top_at] = now
        shrink = exp2(splat(before - now))
        sums = mul(sums, shrink)
        for d in range(output, output + width, LANES):
            store(work, d, mul(load(work, d), shrink))
    for c in range(row, row + vectors * LANES, LANES):
        weight = exp2(sub(load(work, c), splat(now)))
        store(work, c, weight)
        sums = add(sums, weight)
    store(work, sums_at, sums)


@part
def _accumulate(
    rows: Any,
    columns: Any,
    work: Any,
    scores: Any,
    outputs: Any,
    padded: Any,
    width: Any,
    values: Any,
    bases: Any,
    used: Any,
    stride: Any,
) -> None:
    """Add the block's values, weighted. Positions from ``used`` on are never read: they may hold anything."""
    for r in range(0, padded, len(rows)):
        for d in range(0, width, LANES * len(columns)):
            target = outputs + r * width + d
            tile = load_tile(rows, columns, work, target, width)
            for c in range(0, used, LANES):
                base = bases[VECTORS + c // LANES] + d
                weights = scores + r * BLOCK + c
                for t in range(LANES if used - c > LANES else used - c):
                    tile = fma_tile(tile, work, weights + t, BLOCK, load_row(columns, values, base + t * stride))
            store_tile(rows, columns, tile, work, target, width)


@part
def attend_tile(
    rows: Any,
    key_columns: Any,
    value_columns: Any,
    place: Any,
    shape: Any,
    data: Any,
    element: Any,
    memory: Any,
    stage_at: Any,
    scale: Any,
    cap: Any,
) -> None:
    """Attention of one tile.

    Args:
        rows, key_columns, value_columns: Markers, see :mod:`tile`.
        place, shape, data: What and where.
        element: Scalar of the pool's type.
        memory: Address of the thread's own memory.
        stage_at: Where in it (bytes) to copy each block to, if pages or heads do not fit vectors
            of 16; else ``None``, and blocks are read in place.
        scale: Multiplies the queries; scores are powers of two.
        cap: Bends scores, ``cap * tanh(score)``; ``None`` does not.
    """
    heads, kv_heads, group, dim, width, page_size, window = shape
    token, start, first, count, head = place
    q, k_pool, v_pool, out, table = data
    bases, work = pointer(memory, np.int64(0)), pointer(memory + BASES, np.float32(0.0))
    step = len(rows)
    padded = (count + step - 1) // step * step
    queries = 0
    scores = (padded * dim + LANES - 1) // LANES * LANES
    sums = scores + padded * BLOCK
    tops = sums + padded * LANES
    outputs = tops + (padded + LANES - 1) // LANES * LANES
    for j in range(padded):
        flat = first + j
        source = ((token + flat // group) * heads + head * group + flat % group) * dim
        target = j // step * step * dim + j % step
        for d in range(dim):
            work[target + d * step] = q[source + d] * scale if j < count else _ZERO
        work[tops + j] = _LOWEST
    for i in range(sums, tops, LANES):
        store(work, i, splat(_ZERO))
    for i in range(outputs, outputs + padded * width, LANES):
        store(work, i, splat(_ZERO))
    last = start + (first + count - 1) // group
    oldest = start + first // group - window + 1
    lowest = oldest // BLOCK * BLOCK if window > 0 and oldest > 0 else 0
    for begin in range(lowest, last + 1, BLOCK):
        used = BLOCK if last + 1 - begin > BLOCK else last + 1 - begin
        vectors = (used + LANES - 1) // LANES
        if stage_at is None:
            _locate(bases, table, begin, lowest, last, head, kv_heads, dim, page_size)
            keys, values, key_stride, value_stride = k_pool, v_pool, page_size, dim
        else:
            stage = pointer(memory + stage_at, element)
            _stage(bases, table, begin, used, head, kv_heads, dim, width, page_size, k_pool, v_pool, stage)
            keys, values, key_stride, value_stride = stage, stage, BLOCK, width
        _score(rows, key_columns, work, queries, scores, padded, dim, keys, values, bases, vectors, key_stride)
        if cap is not None:
            _cap(work, scores, padded, cap)
        for j in range(count):
            position = start + (first + j) // group - begin
            _weigh(work, scores + j * BLOCK, sums + j * LANES, tops + j, outputs + j * width, width, position, window, vectors)
        _accumulate(rows, value_columns, work, scores, outputs, padded, width, values, bases, used, value_stride)
    for j in range(count):
        flat = first + j
        target = ((token + flat // group) * heads + head * group + flat % group) * dim
        factor = splat(np.float32(1.0) / total(load(work, sums + j * LANES)))
        for d in range(0, dim, LANES):
            store_part(out, target + d, mul(load(work, outputs + j * width + d), factor), dim - d)
