"""Attention of a packed step over the paged pool: one kernel for decode and prefill.

Queries that share a key/value head are cut into *tiles*: consecutive (token, head) pairs of one
segment, so a tile is the head group of one decoded token or of several prompt tokens. A tile
walks its context in blocks of 64 positions, read in place through the block table, and keeps a
running maximum and sum per query (online softmax: Milakov and Gimelshein, arXiv:1805.02867; in
blocks as in Dao et al., FlashAttention, arXiv:2205.14135), all in float32.

Blocks begin at absolute positions and every query has accumulators of its own, so the arithmetic
for one query is the same in whatever tile, chunk, batch or thread it is computed, bit for bit.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]  # no type information

from ._jit import inlined, kernel, part
from .lanemath import add, between, exp2, larger, largest, mul, splat, sub, tanh, total
from .layout import StepLayout
from .simd import LANES, load, pointer, store, store_part
from .store import check_pools
from .tensors import element, require
from .threads import FORK, parallel
from .tile import fma_tile, load_indirect, load_row, load_tile, prefetch_indirect, store_tile, zeros

BLOCK = 64
VECTORS = BLOCK // LANES
TILE = 24
_LOWEST = np.float32(-3e38)
_MASKED = np.float32(-np.inf)
_LEAST = 1 << 17
_LOG2E = math.log2(math.e)


class Shape(NamedTuple):
    """Sizes that do not change within a call, all int64."""

    heads: int
    kv_heads: int
    group: int
    dim: int
    width: int
    page_size: int
    max_pages: int
    window: int
    staged: int


class Place(NamedTuple):
    """One tile: queries ``first … first + count - 1`` of a segment's (token, head in group) pairs."""

    token: int
    start: int
    first: int
    count: int
    padded: int
    head: int


class Scratch(NamedTuple):
    """Offsets into a worker's float32 memory."""

    queries: int
    scores: int
    sums: int
    tops: int
    outputs: int


@inlined
def _query_row(place: Any, shape: Any, index: Any) -> Any:
    """Row of the packed ``[tokens × heads]`` array that holds query ``index`` of the tile."""
    flat = place.first + index
    return (place.token + flat // shape.group) * shape.heads + place.head * shape.group + flat % shape.group


@inlined
def _begin(rows: Any, place: Any, shape: Any, work: Any, at: Any, q: Any, scale: Any) -> None:
    """Load the queries, interleaved by ``rows`` so that one dimension of a row group is contiguous."""
    step = len(rows)
    for j in range(place.padded):
        target = at.queries + j // step * step * shape.dim + j % step
        source = _query_row(place, shape, j) * shape.dim
        for d in range(shape.dim):
            work[target + d * step] = q[source + d] * scale if j < place.count else np.float32(0.0)
        work[at.tops + j] = _LOWEST
        store(work, at.sums + j * LANES, splat(np.float32(0.0)))
        for d in range(0, shape.width, LANES):
            store(work, at.outputs + j * shape.width + d, splat(np.float32(0.0)))


@inlined
def _locate(place: Any, shape: Any, table: Any, bases: Any, begin: Any, lowest: Any, last: Any) -> None:
    """Where the vectors of 16 positions from ``begin`` on are, and those to read next.

    Slots of ``bases``: keys, values, keys to come, values to come. Behind the last block comes
    the next head's first.
    """
    head = place.head
    for slot in range(0, 4 * VECTORS, 2 * VECTORS):
        for c in range(VECTORS):
            t = min(begin + c * LANES, last)
            t -= t % LANES
            page = np.int64(table[t // shape.page_size]) * shape.kv_heads + head
            offset = t % shape.page_size
            bases[slot + c] = page * shape.dim * shape.page_size + offset
            bases[slot + VECTORS + c] = (page * shape.page_size + offset) * shape.dim
        begin += BLOCK
        if begin > last:
            begin = lowest
            head = min(head + 1, shape.kv_heads - 1)


@inlined
def _stage(place: Any, shape: Any, table: Any, bases: Any, begin: Any, used: Any, keys: Any, values: Any, stage: Any) -> None:
    """Copy a block whose pages or head size do not fit vectors of 16: keys ``[dim, 64]``, values ``[64, width]``."""
    for t in range(used):
        page = np.int64(table[(begin + t) // shape.page_size]) * shape.kv_heads + place.head
        offset = (begin + t) % shape.page_size
        for d in range(shape.dim):
            stage[d * BLOCK + t] = keys[(page * shape.dim + d) * shape.page_size + offset]
            stage[shape.dim * BLOCK + t * shape.width + d] = values[(page * shape.page_size + offset) * shape.dim + d]
    for c in range(VECTORS):
        bases[c] = c * LANES
        bases[VECTORS + c] = shape.dim * BLOCK + c * LANES * shape.width


@inlined
def _score(
    rows: Any,
    columns: Any,
    place: Any,
    shape: Any,
    work: Any,
    at: Any,
    keys: Any,
    values: Any,
    bases: Any,
    vectors: Any,
    stride: Any,
) -> None:
    """Scores of all queries against one block, while the next block is on its way to the cache."""
    step = len(rows)
    for r in range(0, place.padded, step):
        for c in range(0, vectors, len(columns)):
            ahead = r == 0 and shape.staged == 0
            tile = zeros(rows, columns)
            for d in range(shape.dim):
                if ahead:
                    prefetch_indirect(columns, keys, bases, 2 * VECTORS + c, d * stride)
                    prefetch_indirect(columns, values, bases, 3 * VECTORS + c, d * LANES)
                row = load_indirect(columns, keys, bases, c, d * stride)
                tile = fma_tile(tile, work, at.queries + r * shape.dim + d * step, 1, row)
            store_tile(rows, columns, tile, work, at.scores + r * BLOCK + c * LANES, BLOCK)


@inlined
def _weigh(place: Any, shape: Any, work: Any, at: Any, begin: Any, vectors: Any, cap: Any) -> None:
    """Scores to softmax weights under the running maximum; rescale what was summed under an older one."""
    for j in range(place.count):
        position = place.start + (place.first + j) // shape.group - begin
        oldest = position - shape.window + 1 if shape.window > 0 else 0
        row = at.scores + j * BLOCK
        before = work[at.tops + j]
        top = splat(before)
        for c in range(vectors):
            x = load(work, row + c * LANES)
            if cap > 0:
                x = mul(tanh(x), splat(cap))
            x = between(x, oldest - c * LANES, position - c * LANES, _MASKED)
            store(work, row + c * LANES, x)
            top = larger(x, top)
        now = largest(top)
        sums = load(work, at.sums + j * LANES)
        if now > before:
            work[at.tops + j] = now
            shrink = exp2(splat(before - now))
            sums = mul(sums, shrink)
            for d in range(0, shape.width, LANES):
                at_d = at.outputs + j * shape.width + d
                store(work, at_d, mul(load(work, at_d), shrink))
        for c in range(vectors):
            weight = exp2(sub(load(work, row + c * LANES), splat(now)))
            store(work, row + c * LANES, weight)
            sums = add(sums, weight)
        store(work, at.sums + j * LANES, sums)


@inlined
def _accumulate(
    rows: Any, columns: Any, place: Any, shape: Any, work: Any, at: Any, values: Any, bases: Any, used: Any, stride: Any
) -> None:
    """Add the block's values, weighted. Positions from ``used`` on are never read: they may hold anything."""
    for r in range(0, place.padded, len(rows)):
        for d in range(0, shape.width, LANES * len(columns)):
            target = at.outputs + r * shape.width + d
            tile = load_tile(rows, columns, work, target, shape.width)
            for c in range((used + LANES - 1) // LANES):
                base = bases[VECTORS + c] + d
                weights = at.scores + r * BLOCK + c * LANES
                for t in range(min(LANES, used - c * LANES)):
                    tile = fma_tile(tile, work, weights + t, BLOCK, load_row(columns, values, base + t * stride))
            store_tile(rows, columns, tile, work, target, shape.width)


@inlined
def _finish(place: Any, shape: Any, work: Any, at: Any, out: Any) -> None:
    """Divide by the sum of weights and round to the output's format."""
    for j in range(place.count):
        factor = splat(np.float32(1.0) / total(load(work, at.sums + j * LANES)))
        target = _query_row(place, shape, j) * shape.dim
        for d in range(0, shape.dim, LANES):
            value = mul(load(work, at.outputs + j * shape.width + d), factor)
            store_part(out, target + d, value, shape.dim - d)


@part
def _attend_tile(
    rows: Any,
    key_columns: Any,
    value_columns: Any,
    place: Any,
    shape: Any,
    table: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    bases: Any,
    work: Any,
    stage: Any,
    scale: Any,
    cap: Any,
) -> None:
    padded = place.padded
    scores = (padded * shape.dim + LANES - 1) // LANES * LANES
    sums = scores + padded * BLOCK
    tops = sums + padded * LANES
    at = Scratch(0, scores, sums, tops, tops + (padded + LANES - 1) // LANES * LANES)
    _begin(rows, place, shape, work, at, q, scale)
    last = place.start + (place.first + place.count - 1) // shape.group
    oldest = max(0, place.start + place.first // shape.group - shape.window + 1) if shape.window > 0 else 0
    for block in range(oldest // BLOCK, last // BLOCK + 1):
        begin = block * BLOCK
        used = min(last + 1 - begin, BLOCK)
        vectors = (used + LANES - 1) // LANES
        if shape.staged:
            _stage(place, shape, table, bases, begin, used, keys, values, stage)
        else:
            _locate(place, shape, table, bases, begin, oldest // BLOCK * BLOCK, last)
        near_keys = stage if shape.staged else keys
        near_values = stage if shape.staged else values
        _score(
            rows,
            key_columns,
            place,
            shape,
            work,
            at,
            near_keys,
            near_values,
            bases,
            vectors,
            BLOCK if shape.staged else shape.page_size,
        )
        _weigh(place, shape, work, at, begin, vectors, cap)
        _accumulate(
            rows, value_columns, place, shape, work, at, near_values, bases, used, shape.width if shape.staged else shape.dim
        )
    _finish(place, shape, work, at, out)


@inlined
def _cost(shape: Any, start: Any, first: Any, count: Any) -> Any:
    """Work of a tile in arbitrary units: positions read × (a share per query + one for reading)."""
    reach = start + (first + count - 1) // shape.group + 1
    if shape.window > 0:
        reach = min(reach, shape.window + count // shape.group)
    return reach * (count + 3)


@part
def _attend_chunk(
    chunk: Any,
    chunks: Any,
    worker: Any,
    rows: Any,
    key_columns: Any,
    value_columns: Any,
    element: Any,
    shape: Any,
    segments: Any,
    table: Any,
    seg_row: Any,
    seg_first: Any,
    seg_len: Any,
    seg_start: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    work: Any,
    work_bytes: Any,
    stage_at: Any,
    scale: Any,
    cap: Any,
    everything: Any,
) -> None:
    index = np.int32(0)
    number = np.float32(0.0)
    memory = work + worker * work_bytes
    low = everything * chunk // chunks
    high = everything * (chunk + 1) // chunks
    cost = 0
    for s in range(segments):
        begin = np.int64(pointer(seg_start, index)[s])
        n = np.int64(pointer(seg_len, index)[s]) * shape.group
        token = np.int64(pointer(seg_first, index)[s])
        own_table = pointer(table + np.int64(pointer(seg_row, index)[s]) * shape.max_pages * 4, index)
        for head in range(shape.kv_heads):
            for first in range(0, n, TILE):
                count = min(TILE, n - first)
                if low <= cost < high:
                    padded = (count + len(rows) - 1) // len(rows) * len(rows)
                    place = Place(token, begin, first, count, padded, head)
                    _attend_tile(
                        rows,
                        key_columns,
                        value_columns,
                        place,
                        shape,
                        own_table,
                        pointer(q, number),
                        pointer(keys, element),
                        pointer(values, element),
                        pointer(out, element),
                        pointer(memory, np.int64(0)),
                        pointer(memory + 4 * BLOCK, number),
                        pointer(memory + stage_at, element),
                        scale,
                        cap,
                    )
                cost += _cost(shape, begin, first, count)


@kernel
def _attend(
    rows: Any,
    key_columns: Any,
    value_columns: Any,
    element: Any,
    heads: Any,
    kv_heads: Any,
    dim: Any,
    page_size: Any,
    max_pages: Any,
    window: Any,
    segments: Any,
    table: Any,
    seg_row: Any,
    seg_first: Any,
    seg_len: Any,
    seg_start: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    work: Any,
    work_bytes: Any,
    stage_at: Any,
    scale: Any,
    cap: Any,
    fork: Any,
    threads: Any,
) -> None:
    width = (dim + LANES - 1) // LANES * LANES
    staged = 1 if page_size % LANES != 0 or dim % LANES != 0 else 0
    shape = Shape(heads, kv_heads, heads // kv_heads, dim, width, page_size, max_pages, window, staged)
    everything = 0
    for s in range(segments):
        n = np.int64(pointer(seg_len, np.int32(0))[s]) * shape.group
        for first in range(0, n, TILE):
            everything += kv_heads * _cost(shape, np.int64(pointer(seg_start, np.int32(0))[s]), first, min(TILE, n - first))
    if everything * dim < _LEAST:
        threads = 1
    chunks = threads * 4 if threads > 1 else 1
    parallel(
        _attend_chunk,
        fork,
        threads,
        chunks,
        (
            rows,
            key_columns,
            value_columns,
            element,
            shape,
            segments,
            table,
            seg_row,
            seg_first,
            seg_len,
            seg_start,
            q,
            keys,
            values,
            out,
            work,
            work_bytes,
            stage_at,
            np.float32(scale),
            np.float32(cap),
            everything,
        ),
    )


@cache
def _registers() -> int:
    """Vectors of 16 float32 that fit the CPU's registers, one spared."""
    return 31 if get_host_cpu_features().get("avx512f") else 7


@cache
def _markers(group: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Rows and columns of the accumulator tiles: as many as the registers hold beside one row of operands."""
    most = 4 if _registers() > 16 else 3
    rows = -(-group // -(-group // most))
    columns = (_registers() - 1) // (rows + 1)
    keys = max(c for c in (1, 2, 4) if c <= columns)
    values = max(c for c in range(1, columns + 1) if width // LANES % c == 0)
    return (0,) * rows, (0,) * keys, (0,) * values


def paged_attention(
    q: torch.Tensor,
    layout: StepLayout,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of every new token over its own context in the pool. Compute thread only.

    Keys and values of the whole step must have been written. Slots of a page that hold no token
    yet may contain anything, NaN included.

    Args:
        q: Queries, float32 ``[N, heads, head_dim]``; ``heads`` is a multiple of the pool's.
        layout: The step's segments.
        k_pool: ``[pages, kv_heads, head_dim, page_size]``, bfloat16 or float32.
        v_pool: ``[pages, kv_heads, page_size, head_dim]``, same type.
        scale: Multiplies the scores.
        window: Attend to the last ``window`` positions only, the token's own included; 0 is all.
        softcap: ``cap * tanh(score / cap)`` before the softmax (Gemma 2); 0 is off.

    Returns:
        ``[N, heads * head_dim]`` in the pool's type.
    """
    kind = element(k_pool, v_pool)
    tokens, heads, dim = q.shape
    kv_heads, page_size = k_pool.shape[1], layout.page_size
    require(
        q.dtype == torch.float32 and q.is_contiguous(), f"q is {q.dtype} of strides {q.stride()}; it must be contiguous float32"
    )
    require(
        tokens == layout.tokens and heads % kv_heads == 0, f"q {tuple(q.shape)}, {layout.tokens} tokens, {kv_heads} key heads"
    )
    check_pools(k_pool, v_pool, layout, kv_heads, dim)
    markers = _markers(heads // kv_heads, -(-dim // LANES) * LANES)
    threads = torch.get_num_threads() if FORK else 1
    floats, staged = _memory(dim, len(markers[0]), k_pool.element_size())
    out = k_pool.new_empty((tokens, heads * dim))
    work = torch.empty(threads * (floats + staged), dtype=torch.float32)
    factor, cap = (scale / softcap, softcap * _LOG2E) if softcap > 0 else (scale * _LOG2E, 0.0)
    sizes = (heads, kv_heads, dim, page_size, layout.table.shape[1], window, len(layout.seg_row))
    at = layout.addresses
    segments = (at.table, at.seg_row, at.seg_first, at.seg_len, at.seg_start)
    tensors = (q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr(), work.data_ptr())
    _attend(*markers, kind, *sizes, *segments, *tensors, 4 * (floats + staged), 4 * floats, factor, cap, FORK, threads)
    return out


@cache
def _memory(dim: int, rows: int, element_size: int) -> tuple[int, int]:
    """Float32 words of scratch memory per thread: for a tile, and for a staged block behind it."""
    width = -(-dim // LANES) * LANES
    most = -(-TILE // rows) * rows
    tile = BLOCK + most * (dim + BLOCK + 2 * LANES + width) + 4 * LANES
    return -(-tile // LANES) * LANES, BLOCK * (dim + width) * element_size // 4
