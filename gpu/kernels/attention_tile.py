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

from ._jit import inlined, part
from .lanemath import add, between, exp2, larger, largest, mul, splat, sub, tanh, total
from .simd import LANES, load, store, store_part
from .tile import fma_tile, load_indirect, load_row, load_tile, prefetch_indirect, store_tile, zeros

BLOCK = 64
VECTORS = BLOCK // LANES
TILE = 24

_LOWEST = np.float32(-3e38)
_MASKED = np.float32(-np.inf)
_ZERO = np.float32(0.0)


class Shape(NamedTuple):
    """Sizes that are constant in a call."""

    heads: int
    kv_heads: int
    group: int
    dim: int
    width: int
    page_size: int
    window: int


class Data(NamedTuple):
    """Buffers: the call's tensors, the segment's block table, and the thread's own memory."""

    q: Any
    keys: Any
    values: Any
    out: Any
    table: Any
    bases: Any
    work: Any


class Place(NamedTuple):
    """The tile: queries ``first … first + count - 1`` of a segment's (token, head of the group) pairs."""

    token: int
    start: int
    first: int
    count: int
    head: int


class Scratch(NamedTuple):
    """Where in the thread's float32 memory things are; ``rows`` is the count of queries, padded."""

    rows: int
    queries: int
    scores: int
    sums: int
    tops: int
    outputs: int


@inlined
def _scratch(rows: Any, place: Any, shape: Any) -> Any:
    padded = (place.count + len(rows) - 1) // len(rows) * len(rows)
    scores = (padded * shape.dim + LANES - 1) // LANES * LANES
    sums = scores + padded * BLOCK
    tops = sums + padded * LANES
    return Scratch(padded, 0, scores, sums, tops, tops + (padded + LANES - 1) // LANES * LANES)


def scratch_floats(rows: int, dim: int, width: int) -> int:
    """Float32 words of memory that any tile needs."""
    most = -(-TILE // rows) * rows
    return most * (dim + BLOCK + LANES + 1 + width) + 2 * LANES


@inlined
def _row_of(place: Any, shape: Any, index: Any) -> Any:
    """Row of the packed ``[tokens × heads]`` array that holds query ``index`` of the tile."""
    flat = place.first + index
    return (place.token + flat // shape.group) * shape.heads + place.head * shape.group + flat % shape.group


@inlined
def _begin(rows: Any, place: Any, shape: Any, data: Any, at: Any, scale: Any) -> None:
    """Load the queries, interleaved by ``rows`` so that one dimension of a row group is contiguous."""
    work, step = data.work, len(rows)
    for j in range(at.rows):
        target = at.queries + j // step * step * shape.dim + j % step
        source = _row_of(place, shape, j) * shape.dim
        for d in range(shape.dim):
            work[target + d * step] = data.q[source + d] * scale if j < place.count else _ZERO
        work[at.tops + j] = _LOWEST
        store(work, at.sums + j * LANES, splat(_ZERO))
        for d in range(0, shape.width, LANES):
            store(work, at.outputs + j * shape.width + d, splat(_ZERO))


@inlined
def _locate(place: Any, shape: Any, data: Any, begin: Any, lowest: Any, last: Any) -> None:
    """Where the vectors of 16 positions from ``begin`` on are, and those to read next.

    Slots of ``bases``: keys, values, keys to come, values to come. Behind the last block comes
    the next head's first. A vector past the last position repeats the one with it.
    """
    head = place.head
    for slot in range(0, 4 * VECTORS, 2 * VECTORS):
        for c in range(VECTORS):
            t = begin + c * LANES
            if t > last:
                t = last
            t -= t % LANES
            page = np.int64(data.table[t // shape.page_size]) * shape.kv_heads + head
            offset = t % shape.page_size
            data.bases[slot + c] = page * shape.dim * shape.page_size + offset
            data.bases[slot + VECTORS + c] = (page * shape.page_size + offset) * shape.dim
        begin += BLOCK
        if begin > last:
            begin = lowest
            if head + 1 < shape.kv_heads:
                head += 1


@inlined
def _stage(place: Any, shape: Any, data: Any, begin: Any, used: Any, stage: Any) -> None:
    """Copy a block whose pages or heads do not fit vectors of 16: keys ``[dim, 64]``, then values ``[64, width]``."""
    behind = shape.dim * BLOCK
    for t in range(used):
        page = np.int64(data.table[(begin + t) // shape.page_size]) * shape.kv_heads + place.head
        offset = (begin + t) % shape.page_size
        for d in range(shape.dim):
            stage[d * BLOCK + t] = data.keys[(page * shape.dim + d) * shape.page_size + offset]
            stage[behind + t * shape.width + d] = data.values[(page * shape.page_size + offset) * shape.dim + d]
    for slot in range(0, 4 * VECTORS, 2 * VECTORS):
        for c in range(VECTORS):
            data.bases[slot + c] = c * LANES
            data.bases[slot + VECTORS + c] = behind + c * LANES * shape.width


@inlined
def _score(rows: Any, columns: Any, shape: Any, data: Any, at: Any, keys: Any, values: Any, vectors: Any, stride: Any) -> None:
    """Scores of all queries against one block, while the next block is on its way to the cache."""
    work, bases, step = data.work, data.bases, len(rows)
    for r in range(0, at.rows, step):
        for c in range(0, vectors, len(columns)):
            tile = zeros(rows, columns)
            for d in range(shape.dim):
                if r == 0:
                    prefetch_indirect(columns, keys, bases, 2 * VECTORS + c, d * stride)
                    prefetch_indirect(columns, values, bases, 3 * VECTORS + c, d * LANES)
                row = load_indirect(columns, keys, bases, c, d * stride)
                tile = fma_tile(tile, work, at.queries + r * shape.dim + d * step, 1, row)
            store_tile(rows, columns, tile, work, at.scores + r * BLOCK + c * LANES, BLOCK)


@inlined
def _cap(work: Any, at: Any, cap: Any) -> None:
    """Bend scores that were divided by the cap, in place."""
    for i in range(at.scores, at.scores + at.rows * BLOCK, LANES):
        store(work, i, mul(tanh(load(work, i)), splat(cap)))


@inlined
def _weigh(place: Any, shape: Any, work: Any, at: Any, begin: Any, vectors: Any) -> None:
    """Scores to softmax weights under the running maximum; rescale what was summed under an older one."""
    for j in range(place.count):
        position = place.start + (place.first + j) // shape.group - begin
        oldest = position - shape.window + 1 if shape.window > 0 else 0
        row = at.scores + j * BLOCK
        before = work[at.tops + j]
        top = splat(before)
        for c in range(vectors):
            x = between(load(work, row + c * LANES), oldest - c * LANES, position - c * LANES, _MASKED)
            store(work, row + c * LANES, x)
            top = larger(x, top)
        now = largest(top)
        sums = load(work, at.sums + j * LANES)
        if now > before:
            work[at.tops + j] = now
            shrink = exp2(splat(before - now))
            sums = mul(sums, shrink)
            target = at.outputs + j * shape.width
            for d in range(target, target + shape.width, LANES):
                store(work, d, mul(load(work, d), shrink))
        for c in range(vectors):
            weight = exp2(sub(load(work, row + c * LANES), splat(now)))
            store(work, row + c * LANES, weight)
            sums = add(sums, weight)
        store(work, at.sums + j * LANES, sums)


@inlined
def _accumulate(rows: Any, columns: Any, shape: Any, data: Any, at: Any, values: Any, used: Any, stride: Any) -> None:
    """Add the block's values, weighted. Positions from ``used`` on are never read: they may hold anything."""
    work = data.work
    for r in range(0, at.rows, len(rows)):
        for d in range(0, shape.width, LANES * len(columns)):
            target = at.outputs + r * shape.width + d
            tile = load_tile(rows, columns, work, target, shape.width)
            for c in range(0, used, LANES):
                base = data.bases[VECTORS + c // LANES] + d
                weights = at.scores + r * BLOCK + c
                for t in range(LANES if used - c > LANES else used - c):
                    tile = fma_tile(tile, work, weights + t, BLOCK, load_row(columns, values, base + t * stride))
            store_tile(rows, columns, tile, work, target, shape.width)


@inlined
def _finish(place: Any, shape: Any, data: Any, at: Any) -> None:
    """Divide by the sum of weights and round to the output's format."""
    work = data.work
    for j in range(place.count):
        factor = splat(np.float32(1.0) / total(load(work, at.sums + j * LANES)))
        target = _row_of(place, shape, j) * shape.dim
        for d in range(0, shape.dim, LANES):
            value = mul(load(work, at.outputs + j * shape.width + d), factor)
            store_part(data.out, target + d, value, shape.dim - d)


@inlined
def attend_tile(
    rows: Any,
    key_columns: Any,
    value_columns: Any,
    place: Any,
    shape: Any,
    data: Any,
    stage: Any,
    scale: Any,
    cap: Any,
) -> None:
    """Attention of one tile.

    Args:
        rows, key_columns, value_columns: Markers, see :mod:`tile`.
        place, shape, data: What and where.
        stage: Memory for one block in the pool's format, if its pages or heads do not fit vectors
            of 16; else ``None``, and blocks are read in place.
        scale: Multiplies the queries; scores are powers of two.
        cap: Bends scores, ``cap * tanh(score)``; ``None`` does not.
    """
    at = _scratch(rows, place, shape)
    _begin(rows, place, shape, data, at, scale)
    last = place.start + (place.first + place.count - 1) // shape.group
    oldest = place.start + place.first // shape.group - shape.window + 1
    lowest = oldest // BLOCK * BLOCK if shape.window > 0 and oldest > 0 else 0
    for begin in range(lowest, last + 1, BLOCK):
        used = BLOCK if last + 1 - begin > BLOCK else last + 1 - begin
        vectors = (used + LANES - 1) // LANES
        if stage is None:
            _locate(place, shape, data, begin, lowest, last)
            keys, values, key_stride, value_stride = data.keys, data.values, shape.page_size, shape.dim
        else:
            _stage(place, shape, data, begin, used, stage)
            keys, values, key_stride, value_stride = stage, stage, BLOCK, shape.width
        _score(rows, key_columns, shape, data, at, keys, values, vectors, key_stride)
        if cap is not None:
            _cap(data.work, at, cap)
        _weigh(place, shape, data.work, at, begin, vectors)
        _accumulate(rows, value_columns, shape, data, at, values, used, value_stride)
    _finish(place, shape, data, at)
