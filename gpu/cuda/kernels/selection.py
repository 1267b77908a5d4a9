"""Top-k and top-p without sorting: a search for the key of the last token that is kept.

The order of tokens is total (see ``order``), so the k most likely, or the smallest set whose
probability reaches a target, are the tokens at or over one key. A token measures 1 (top-k) or its
weight as an integer (top-p), and the search is for the largest key at or over which all tokens
together measure the target. Integer sums are exact whatever their order: the result depends on
nothing but the row.

It is a bisection, as in the sampling kernels of FlashInfer (Ye et al., arXiv:2501.01005), but run
to the end: passes over the row until a band of at most ``BAND`` tokens is left, which is gathered
and searched in registers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .order import LEAST_KEY, NO_CUT, key_of, lowest_key_of, order_in, order_of, value_of
from .record import NEEDS, RECORD_WORDS, TEMPERATURE, TOP_K, TOP_K_VALUE, TOP_P, TOP_P_VALUE, load_double
from .scan import can_be_drawn, top_of

_ONE: tl.constexpr = tl.constexpr(2.0**44)  # of 2**18 tokens the weights still fit 63 bits
_FIRST_GAP: tl.constexpr = tl.constexpr(4.0)
_STEPS_BY_VALUE: tl.constexpr = tl.constexpr(12)  # then halve the range of keys, which ends for certain
_SLACK: tl.constexpr = tl.constexpr(1e-3)  # on a threshold of logit / temperature: far over what float32 loses there


@triton.jit
def inverse_of(temperature: tl.tensor) -> tl.tensor:
    """One over the temperature, float32, within bounds that float32 products bear."""
    return tl.minimum(tl.maximum(1.0 / temperature, 1e-30), 1e30).to(tl.float32)


@triton.jit
def _measure(key: tl.tensor, top: tl.tensor, inverse: tl.tensor, WEIGHTED: tl.constexpr) -> tl.tensor:
    """What a token counts, int64: 1, or its weight relative to the likeliest."""
    if WEIGHTED:
        measure = (tl.exp((value_of(order_in(key)) - top) * inverse) * _ONE).to(tl.int64)
    else:
        measure = tl.full(key.shape, 1, tl.int64)
    return measure


@triton.jit
def _tally(
    work: tl.tensor,
    width: tl.tensor,
    least: tl.tensor,
    top: tl.tensor,
    inverse: tl.tensor,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Measure and number of the tokens whose keys are at least ``least``."""
    measure = tl.zeros([TILE], tl.int64)
    count = tl.zeros([TILE], tl.int32)
    for first in range(0, width, TILE):
        token = first + tl.arange(0, TILE)
        key = key_of(order_of(tl.load(work + token)), token)
        inside = key >= least
        count += inside.to(tl.int32)
        if WEIGHTED:
            measure += tl.where(inside, _measure(key, top, inverse, WEIGHTED), 0)
    number = tl.sum(count)
    total = tl.sum(measure) if WEIGHTED else number.to(tl.int64)
    return total, number


@triton.jit
def _halfway(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The mean of two int64, rounded down, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _gather(
    work: tl.tensor, width: tl.tensor, low: tl.tensor, high: tl.tensor, band: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Write the keys in ``low <= key < high`` one behind the other; returns how many."""
    n = 0
    for first in range(0, width, TILE):
        token = first + tl.arange(0, TILE)
        key = key_of(order_of(tl.load(work + token)), token)
        inside = ((key >= low) & (key < high)).to(tl.int32)
        found = tl.sum(inside)
        if found > 0:
            tl.store(band + n + tl.cumsum(inside) - 1, key, mask=inside != 0)
        n += found
    return n


@triton.jit
def _last_kept(
    work: tl.tensor,
    width: tl.tensor,
    band: tl.tensor,
    top_key: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    inverse: tl.tensor,
    target: tl.tensor,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
    BAND: tl.constexpr,
) -> tl.tensor:
    """The largest key at or over which tokens measure ``target``, or ``least`` if all over that do not.

    Args:
        band: Scratch, int64 ``[BAND]``.
        least: No lower key is looked at.
        most: At least the number of tokens at or over ``least``.
        target: At least 1.
    """
    top = value_of(order_in(top_key))
    # Tokens at or over ``low`` measure the target, those at or over ``high`` do not.
    low = least
    high = top_key + 1
    at_low = most
    at_high = tl.full([], 0, tl.int32)
    beyond = tl.full([], 0, tl.int64)
    gap = tl.full([], _FIRST_GAP, tl.float32)
    steps = tl.full([], 0, tl.int32)
    while (low + 1 < high) & (at_low - at_high > BAND):
        if low == NO_CUT:  # nothing is known yet: what matters is close to the top
            value = top - gap
            gap = gap * 2.0
        else:
            value = 0.5 * value_of(order_in(low)) + 0.5 * value_of(order_in(high))
        middle = lowest_key_of(order_of(value))
        if (middle <= low) | (middle >= high) | (steps >= _STEPS_BY_VALUE):
            middle = _halfway(low, high)
        steps += 1
        measure, count = _tally(work, width, middle, top, inverse, WEIGHTED, TILE)
        if measure >= target:
            low = middle
            at_low = count
        else:
            high = middle
            at_high = count
            beyond = measure
    if low + 1 < high:
        tl.debug_barrier()  # threads may still read an earlier band
        n = _gather(work, width, low, high, band, TILE)
        tl.debug_barrier()
        j = tl.arange(0, BAND)
        key = tl.load(band + j, mask=j < n, other=LEAST_KEY)
        measures = tl.where(j < n, _measure(key, top, inverse, WEIGHTED), 0)
        at_low = n
        at_high = tl.full([], 0, tl.int32)
        if n > 1:
            low = tl.min(tl.where(j < n, key, high))
            high = tl.max(key) + 1
        while at_low - at_high > 1:  # of two keys that one token lies between, either keeps the same
            middle = _halfway(low, high)
            inside = key >= middle
            count = tl.sum(inside.to(tl.int32))
            if beyond + tl.sum(tl.where(inside, measures, 0)) >= target:
                low = middle
                at_low = count
            else:
                high = middle
                at_high = count
    return low


@triton.jit(do_not_specialize=["vocab", "parts"])
def cut_kernel(
    rows: tl.tensor,
    records: tl.tensor,
    work: tl.tensor,
    work_stride: tl.tensor,
    keys: tl.tensor,
    extremes: tl.tensor,
    bands: tl.tensor,
    cuts: tl.tensor,
    vocab: tl.tensor,
    parts: tl.tensor,
    TILE: tl.constexpr,
    BAND: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The key of the last token that top-k, and top-p over what top-k left, keep; for rows that ask for either."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if row < 0:
        return
    record = records + row.to(tl.int64) * RECORD_WORDS
    needs = tl.load(record + NEEDS)
    if (needs & (TOP_K | TOP_P)) == 0:
        return
    if can_be_drawn(keys, extremes, i, parts, PARTS) == 0:
        return
    top_key = top_of(keys, i, parts, PARTS)
    source = work + i.to(tl.int64) * work_stride
    band = bands + i.to(tl.int64) * BAND
    temperature = load_double(record, TEMPERATURE)
    inverse = inverse_of(temperature)
    cut = tl.full([], NO_CUT, tl.int64)
    most = vocab
    if (needs & TOP_K) != 0:
        k = tl.load(record + TOP_K_VALUE)
        cut = _last_kept(source, work_stride, band, top_key, cut, vocab, inverse, k.to(tl.int64), False, TILE, BAND)
        most = tl.minimum(vocab, k)
    if (needs & TOP_P) != 0:
        top = value_of(order_in(top_key))
        top_p = load_double(record, TOP_P_VALUE)
        total, number = _tally(source, work_stride, cut, top, inverse, True, TILE)
        # All tokens under this share together weigh less than what top-p may leave out.
        share = tl.log((1.0 - top_p) * (total.to(tl.float64) * (1.0 / _ONE)) / vocab) - _SLACK
        floor = tl.maximum(top.to(tl.float64) + temperature * share, -3.0e38).to(tl.float32)
        least = tl.maximum(cut, lowest_key_of(order_of(floor)))
        target = tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)
        target = tl.maximum(target, 1)
        cut = _last_kept(source, work_stride, band, top_key, least, tl.minimum(most, number), inverse, target, True, TILE, BAND)
    tl.store(cuts + i, cut)
