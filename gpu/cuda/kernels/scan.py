"""The first look at a row of logits: its largest, whether it can be sampled from, and a float32 copy to work on.

A row is divided among programs, each of which leaves the key of the largest logit of its part (see
``order``); whoever needs the row's takes the largest of those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .order import INFINITY_ORDER, LAST, LEAST_KEY, key_of, magnitude_of, order_in, order_of
from .record import LISTED, NEEDS, RECORD_WORDS, RESTRICTED

_OK: tl.constexpr = tl.constexpr(0)
_HAS_NAN: tl.constexpr = tl.constexpr(1)
_HAS_INFINITY: tl.constexpr = tl.constexpr(2)
_NOTHING_FINITE: tl.constexpr = tl.constexpr(3)


@triton.jit(do_not_specialize=["vocab"])
def scan_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    rows: tl.tensor,
    records: tl.tensor,
    work: tl.tensor,
    work_stride: tl.tensor,
    keys: tl.tensor,
    extremes: tl.tensor,
    vocab: tl.tensor,
    COPY: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Key of the largest logit and extremes per part of a row; if ``COPY``, the copy for rows that need more than the argmax.

    The copy ends in -inf up to a multiple of ``CHUNK``; a restricted row's is -inf altogether.
    """
    i = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows + i)
    if row < 0:
        return
    needs = tl.load(records + row.to(tl.int64) * RECORD_WORDS + NEEDS) if COPY else 0
    source = logits + i.to(tl.int64) * logits_stride
    target = work + i.to(tl.int64) * work_stride
    largest = tl.full([TILE], -LAST, tl.int32)
    at = tl.zeros([TILE], tl.int32)
    magnitude = tl.zeros([TILE], tl.int32)
    for first in range(0, CHUNK, TILE):
        token = part * CHUNK + first + tl.arange(0, TILE)
        x = tl.load(source + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        order = order_of(x)
        at = tl.where(order > largest, token, at)
        largest = tl.maximum(largest, order)
        magnitude = tl.maximum(magnitude, magnitude_of(x))
        if needs != 0:
            tl.store(target + token, tl.where((needs & RESTRICTED) != 0, -float("inf"), x))
    slot = i * tl.num_programs(1) + part
    tl.store(keys + slot, tl.max(key_of(largest, at)))
    tl.store(extremes + 2 * slot, tl.max(largest))
    tl.store(extremes + 2 * slot + 1, tl.max(magnitude))


@triton.jit
def rescan_kernel(
    rows: tl.tensor,
    records: tl.tensor,
    work: tl.tensor,
    work_stride: tl.tensor,
    keys: tl.tensor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Keys anew for rows whose copy was changed by their list."""
    i = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows + i)
    if row < 0:
        return
    needs = tl.load(records + row.to(tl.int64) * RECORD_WORDS + NEEDS)
    if (needs & (LISTED | RESTRICTED)) == 0:
        return
    source = work + i.to(tl.int64) * work_stride
    best = tl.full([TILE], LEAST_KEY, tl.int64)
    for first in range(0, CHUNK, TILE):
        token = part * CHUNK + first + tl.arange(0, TILE)
        best = tl.maximum(best, key_of(order_of(tl.load(source + token)), token))
    tl.store(keys + i * tl.num_programs(1) + part, tl.max(best))


@triton.jit
def top_of(keys: tl.tensor, i: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The key of a row's largest logit; ``PARTS`` is a power of two, ``parts`` at least."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(keys + i * parts + part, mask=part < parts, other=LEAST_KEY))


@triton.jit
def status_of(extremes: tl.tensor, i: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Whether the unmodified logits of a row make a distribution."""
    part = tl.arange(0, PARTS)
    at = extremes + 2 * (i * parts + part)
    largest = tl.max(tl.load(at, mask=part < parts, other=-LAST))
    magnitude = tl.max(tl.load(at + 1, mask=part < parts, other=0))
    status = tl.where(largest == -INFINITY_ORDER, _NOTHING_FINITE, _OK)
    status = tl.where(largest == INFINITY_ORDER, _HAS_INFINITY, status)
    return tl.where(magnitude > INFINITY_ORDER, _HAS_NAN, status)


@triton.jit
def can_be_drawn(keys: tl.tensor, extremes: tl.tensor, i: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Whether a row has a distribution of which its list leaves something."""
    something = order_in(top_of(keys, i, parts, PARTS)) > -INFINITY_ORDER
    return something & (status_of(extremes, i, parts, PARTS) == _OK)
