"""Numba building blocks over one row of logits: order, maxima, exponentials, exact selection.

Compute thread only, inside compiled functions. Every sum is taken in one fixed order within one
row, so a result depends on that row alone: never on its neighbours or the number of threads.

- *Order keys.* The bits of a float, with the magnitude of negative ones negated, compare as
  integers the way the floats compare (both zeros are equal). Integer maxima vectorise; float
  maxima, with their rule for NaN, do not. A NaN is a magnitude above infinity's.
- *Block maxima* (``peaks``). The k-th largest of them bounds the k-th largest logit from below,
  and blocks whose maximum is under a threshold are skipped unread.
- *Cuts.* The order is total: larger logit first, and of equal logits the lower token id first. So
  a set of the most likely tokens is one number, the key of its last member.

Inner loops run over slices from zero: indices that may wrap around keep LLVM from vectorising.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._jit import part

OK, HAS_NAN, HAS_INFINITY, NOTHING_FINITE, ALL_MASKED = range(5)

BLOCK = 64
"""Logits per block maximum; scratch rows are padded to a multiple of it."""

LANES = 1024
"""Logits per pass of the chunked loops."""

_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_LOWEST = np.int32(-0x7FFFFFFF)
_LEAST = np.float32(np.finfo(np.float32).min)
_BAND = 1024  # tokens worth one more pass over the row rather than quickselect
_BISECTIONS = 24
_LAST = 0x7FFFFFFF  # the highest token id a key can hold

NO_CUT = -(0x7F7FFFFF << 32)
"""The lowest key of a finite logit: nothing is cut off."""

Bits = NDArray[np.integer[Any]]
Floats = NDArray[np.float32]
Keys = NDArray[np.int64]


@part
def _order(bits: np.int32) -> np.int32:
    magnitude = np.int32(bits & _MAGNITUDE)
    sign = np.int32(bits >> _SIGN)
    return np.int32(np.int32(magnitude ^ sign) - sign)


@part
def _value(order: np.int32) -> np.float32:
    bits = order if order >= 0 else np.int32(np.int32(-order) | np.int32(-0x80000000))
    return np.int32(bits).view(np.float32)


@part
def key_of(logit: np.float32, token: int) -> int:
    """An integer that sorts by logit, then by lower token id; all keys of a row differ."""
    return (int(_order(np.float32(logit).view(np.int32))) << 32) | (_LAST - token)


@part
def token_of(key: int) -> int:
    """The token id in a key."""
    return _LAST - (key & _LAST)


@part
def logit_of(key: int) -> np.float32:
    """The logit in a key."""
    return _value(np.int32(key >> 32))


@part
def mix(h: np.uint64) -> np.uint64:
    """SplitMix64's output function (Steele, Lea, Flood, OOPSLA 2014; Stafford's variant 13)."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@part
def _extremes(bits: Bits) -> tuple[np.int32, np.int32]:
    """The largest order key and the largest magnitude."""
    shift = np.int32(32 - 8 * bits.itemsize)
    largest = _LOWEST
    magnitude = np.int32(0)
    for i in range(bits.size):
        word = np.int32(np.int32(bits[i]) << shift)
        order = _order(word)
        largest = order if order > largest else largest
        size = np.int32(word & _MAGNITUDE)
        magnitude = size if size > magnitude else magnitude
    return largest, magnitude


@part
def _verdict(largest: np.int32, magnitude: np.int32) -> int:
    if magnitude > _INFINITY:
        return HAS_NAN
    if largest == _INFINITY:
        return HAS_INFINITY
    if largest == -_INFINITY:
        return NOTHING_FINITE
    return OK


@part
def argmax(bits: Bits) -> tuple[int, int]:
    """Status of one row and the first index of its largest logit.

    Args:
        bits: Bit patterns ``[V]``: int16 of bfloat16, or int32 of float32.
    """
    shift = np.int32(32 - 8 * bits.itemsize)
    largest = _LOWEST
    magnitude = np.int32(0)
    start = 0
    for at in range(0, bits.size, LANES):
        order, size = _extremes(bits[at : at + LANES])
        if order > largest:
            largest = order
            start = at
        magnitude = size if size > magnitude else magnitude
    status = _verdict(largest, magnitude)
    token = start
    while status == OK and _order(np.int32(np.int32(bits[token]) << shift)) != largest:
        token += 1
    return status, token


@part
def load(bits: Bits, x: Floats) -> int:
    """Convert one row to float32, pad it with -inf, and return its status."""
    shift = np.int32(32 - 8 * bits.itemsize)
    words = x.view(np.int32)
    largest = _LOWEST
    magnitude = np.int32(0)
    for i in range(bits.size):
        word = np.int32(np.int32(bits[i]) << shift)
        words[i] = word
        order = _order(word)
        largest = order if order > largest else largest
        size = np.int32(word & _MAGNITUDE)
        magnitude = size if size > magnitude else magnitude
    x[bits.size :] = -np.inf
    return _verdict(largest, magnitude)


@part
def fill_peaks(x: Floats, peaks: Floats) -> np.float32:
    """Fill the maximum of every block; return the maximum of all."""
    words = x.view(np.int32)
    overall = _LOWEST
    for block in range(peaks.size):
        part = words[block * BLOCK : (block + 1) * BLOCK]
        largest = _LOWEST
        for i in range(BLOCK):
            order = _order(part[i])
            largest = order if order > largest else largest
        peaks[block] = _value(largest)
        overall = largest if largest > overall else overall
    return _value(overall)


@part
def first_at(x: Floats, peaks: Floats, top: np.float32) -> int:
    """The lowest token id whose logit is the maximum."""
    block = 0
    while peaks[block] != top:
        block += 1
    token = block * BLOCK
    while x[token] != top:
        token += 1
    return token


@part
def exp(z: np.float32) -> np.float32:
    """e**z for z <= 0 to about one unit in the last place; 0 below -87. Vectorises, unlike libm's.

    Reduction to ``|r| <= log(2) / 2`` in two steps (Cody, Waite, 1980), then a Taylor polynomial.
    """
    z = np.float32(z)  # in float64 the rounding below would not round
    low = np.float32(-87.0)
    rounder = np.float32(12582912.0)
    clamped = z if z > low else low
    n = (clamped * np.float32(1.4426950408889634) + rounder) - rounder
    r = clamped - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = r * np.float32(1 / 5040) + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r * r + r + np.float32(1.0)
    scale = np.int32((np.int32(n) + 127) << 23).view(np.float32)
    return p * scale if z >= low else np.float32(0.0)


@part
def _sum(lanes: NDArray[np.float64]) -> float:
    total = 0.0
    for i in range(lanes.size):
        total += lanes[i]
    return total


@part
def weigh(x: Floats, peaks: Floats, top: np.float32, inverse: np.float32, cut: int, weights: Floats) -> float:
    """Fill ``weights = exp((x - top) * inverse)``, 0 under the cut, and return their sum, taken in float64.

    Blocks that lie under the cut altogether are left as they are.
    """
    least, last = logit_of(cut), token_of(cut)
    lanes = np.zeros(BLOCK)
    for block in range(peaks.size):
        if peaks[block] < least:
            continue
        first = block * BLOCK
        source = x[first : first + BLOCK]
        target = weights[first : first + BLOCK]
        for i in range(BLOCK):
            kept = (source[i] > least) | ((source[i] == least) & (first + i <= last))
            weight = exp((source[i] - top) * inverse)
            target[i] = weight if kept else np.float32(0.0)
        for i in range(BLOCK):
            lanes[i] += target[i]
    return _sum(lanes)


# -- exact selection ---------------------------------------------------------------------------


@part
def _tally(x: Floats, peaks: Floats, weights: Floats, floor: np.float32) -> tuple[float, int]:
    """Weight and number of the tokens whose logits are at least ``floor``."""
    lanes = np.zeros(BLOCK)
    count = 0
    for block in range(peaks.size):
        if peaks[block] < floor:
            continue
        first = block * BLOCK
        part = x[first : first + BLOCK]
        own = weights[first : first + BLOCK]
        for i in range(BLOCK):
            inside = part[i] >= floor
            count += inside
            lanes[i] += own[i] if inside else np.float32(0.0)
    return _sum(lanes), count


@part
def _least_kept(keys: Keys, weights: Floats, n: int, target: float) -> int:
    """The last key of the smallest prefix, in descending order, that weighs ``target``; else the last of all.

    Weighted quickselect (after Hoare, Algorithm 65, 1961), in expected linear time. Reorders both arrays.
    """
    low, high = 0, n
    while low < high:
        at = low + int(mix(np.uint64(low) << np.uint64(32) | np.uint64(high)) % np.uint64(high - low))
        pivot, weight = keys[at], weights[at]
        keys[at], weights[at] = keys[high - 1], weights[high - 1]
        middle = low
        mass = 0.0
        for i in range(low, high - 1):
            key, w = keys[i], weights[i]
            keys[i], weights[i] = keys[middle], weights[middle]
            keys[middle], weights[middle] = key, w  # a swap either way: no branch to mispredict
            above = int(key > pivot)
            mass += float(w) if above else 0.0
            middle += above
        keys[high - 1], weights[high - 1] = keys[middle], weights[middle]
        keys[middle], weights[middle] = pivot, weight
        if mass >= target:
            high = middle
        else:
            target -= mass + weight
            low = middle + 1
            if target <= 0.0:
                break
    least = keys[0]
    for i in range(1, low):
        least = min(least, keys[i])
    return int(least)


@part
def prefix_cut(x: Floats, peaks: Floats, top: np.float32, floor: np.float32, weights: Floats, target: float, keys: Keys) -> int:
    """The key of the last token of the smallest prefix, in descending order, that weighs ``target``.

    Logits under ``floor`` (finite) must not be needed to reach the target. Bisection on the logit
    narrows the band that the cut lies in, until quickselect is cheap. Overwrites ``keys`` and
    ``weights``.
    """
    low, high = floor, np.float32(np.inf)
    gap = np.float32(2.0)
    over = 0.0
    _, at_low = _tally(x, peaks, weights, low)
    at_high = 0
    for _ in range(_BISECTIONS):
        if low == _LEAST:  # no floor known: gallop down from the top
            gap *= np.float32(2.0)
            middle = top - gap
        else:
            middle = np.float32(0.5) * low + np.float32(0.5) * min(high, top)
        if at_low - at_high <= _BAND or not low < middle < high:
            break
        mass, count = _tally(x, peaks, weights, middle)
        if mass >= target:
            low, at_low = middle, count
        else:
            high, at_high, over = middle, count, mass
    n = 0
    for block in range(peaks.size):
        if peaks[block] < low:
            continue
        first = block * BLOCK
        for i in range(first, first + BLOCK):
            keys[n], weights[n] = key_of(x[i], i), weights[i]  # stays only if n moves on
            n += int(x[i] >= low) & int(x[i] < high)
    if n == 0:  # the sum fell short of the target by rounding: all of it is needed
        return key_of(low, _LAST)
    return _least_kept(keys, weights, n, target - over)


@part
def top_k_cut(x: Floats, peaks: Floats, top: np.float32, k: int, keys: Keys, weights: Floats) -> int:
    """The key of the k-th largest logit, or of the last one over -inf. Overwrites ``keys`` and ``weights``."""
    floor = _LEAST
    if k < peaks.size:
        for block in range(peaks.size):
            keys[block] = key_of(peaks[block], block)
        weights[: peaks.size] = 1.0
        floor = max(_LEAST, logit_of(_least_kept(keys, weights, peaks.size, float(k))))
    weights[:] = 1.0
    return prefix_cut(x, peaks, top, floor, weights, float(k), keys)


@part
def collect(x: Floats, peaks: Floats, cut: int, keys: Keys) -> int:
    """Gather the keys at or over the cut, by token id; returns how many."""
    least = logit_of(cut)
    n = 0
    for block in range(peaks.size):
        if peaks[block] >= least:
            for i in range(block * BLOCK, (block + 1) * BLOCK):
                keys[n] = key_of(x[i], i)
                n += int(keys[n] >= cut)
    return n
