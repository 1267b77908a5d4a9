"""Numba kernels that choose tokens and report log-probabilities; rows run in parallel.

Compute thread only. One row of logits is one unit of work; what a row draws depends on its own
logits, parameters, seed and position alone.

*Gumbel-max* (Gumbel, 1954; Maddison, Tarlow, Minka, "A* Sampling", 2014): the largest of
``logit + noise`` is a draw from the softmax. The noise of a token is ``-log(-log(u))`` with ``u``
from a counter: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) of seed, output position and token id.
Before any logarithm is taken, a cheap upper bound of the noise rules nearly every token out, so
the result is exactly that of computing all of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._jit import kernel, part
from .logits import (
    ALL_MASKED,
    BLOCK,
    NO_CUT,
    OK,
    Bits,
    Floats,
    Keys,
    argmax,
    collect,
    fill_peaks,
    first_at,
    load,
    logit_of,
    mix,
    prefix_cut,
    token_of,
    top_k_cut,
    weigh,
)
from .threads import parallel

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MAX_NOISE = np.float32(36.8)  # -log(-log(u)) at the largest u, 1 - 2**-53, rounded up
_LOG_2 = np.float32(math.log(2.0))
_LARGEST = 3.0e38  # adjusted logits stay finite, so that differences of them are never NaN
_SLACK = 1e-3  # on a threshold of logit / temperature: far over what float32 loses there

Ints = NDArray[np.int32]
Scratch = tuple[Floats, Floats, Keys, Floats]
Report = tuple[Floats, Ints, Ints, Floats]
Record = Any  # the row table or one entry of it, see sampling_rows.ROW


@part
def _stream(seed: np.uint64, position: int) -> np.uint64:
    """The counter's base for one output position of one request."""
    return mix(mix(np.uint64(seed) + _GAMMA) + np.uint64(position + 1) * _GAMMA)


@part
def _noise(stream: np.uint64, token: int) -> float:
    bits = mix(stream + np.uint64(token + 1) * _GAMMA)
    u = (float(bits >> np.uint64(12)) + 0.5) * 2.0**-52
    return -math.log(-math.log(u))


@part
def _noise_bound(stream: np.uint64, token: int) -> np.float32:
    """At least ``_noise``: since ``-log(u) >= 1 - u``, the noise is at most ``-log(1 - u)``.

    The bits of a float, as an integer, are its logarithm interpolated linearly between powers of
    two, which is never over the true one. A hundredth covers every rounding in float32.
    """
    bits = mix(stream + np.uint64(token + 1) * _GAMMA)
    rest = np.float32(np.uint32(~bits >> np.uint64(32)))  # (1 - u) * 2**32, rounded down
    log2 = np.float32(np.float32(rest).view(np.int32)) * np.float32(2.0**-23) - np.float32(127.0)
    return _LOG_2 * (np.float32(32.0) - log2) + np.float32(0.01)


@part
def _race(x: Floats, peaks: Floats, top: np.float32, cut: int, row: Record, inverse: np.float32, stream: np.uint64) -> int:
    """Draw from the softmax of the tokens at or over the cut and over min-p.

    Starts at the likeliest token, to rule out the rest early.
    """
    least, last = logit_of(cut), token_of(cut)
    log_min_p = -np.inf
    if row.min_p > 0.0:
        log_min_p = math.log(row.min_p)
        floor = np.float32(float(top) + row.temperature * (log_min_p - _SLACK))
        if floor > least:
            least, last = floor, x.size
    winner = first_at(x, peaks, top)
    best = _noise(stream, winner)
    for block in range(peaks.size):
        limit = np.float32(best)
        if peaks[block] < least or (peaks[block] - top) * inverse + _MAX_NOISE < limit:
            continue
        first = block * BLOCK
        part = x[first : first + BLOCK]
        hits = np.int32(0)
        for i in range(BLOCK):
            kept = (part[i] > least) | ((part[i] == least) & (first + i <= last))
            hits += np.int32(kept & ((part[i] - top) * inverse + _noise_bound(stream, first + i) >= limit))
        if hits == 0:
            continue
        for i in range(BLOCK):
            kept = (part[i] > least) | ((part[i] == least) & (first + i <= last))
            if kept and (part[i] - top) * inverse + _noise_bound(stream, first + i) >= limit:
                z = (float(part[i]) - float(top)) / row.temperature
                score = z + _noise(stream, first + i)
                if z >= log_min_p and score > best:
                    best = score
                    winner = first + i
    return winner


@part
def _draw(row: Record, x: Floats, peaks: Floats, top: np.float32, keys: Keys, weights: Floats) -> int:
    """Temperature, top-k, top-p over what top-k left, min-p, and the draw."""
    inverse = np.float32(min(max(1.0 / row.temperature, 1e-30), 1e30))
    cut = NO_CUT
    if row.top_k > 0:
        cut = top_k_cut(x, peaks, top, row.top_k, keys, weights)
    if row.top_p < 1.0:
        total = weigh(x, peaks, top, inverse, cut, weights)
        # All tokens under this share together weigh less than what top-p may leave out.
        share = math.log((1.0 - row.top_p) * total / x.size) - _SLACK
        floor = np.float32(float(top) + row.temperature * share)
        cut = max(cut, prefix_cut(x, peaks, top, max(floor, logit_of(cut)), weights, row.top_p * total, keys))
    return _race(x, peaks, top, cut, row, inverse, _stream(row.seed, row.position))


@part
def _bounded(value: float) -> np.float32:
    if value == -np.inf:
        return np.float32(value)
    return np.float32(min(max(value, -_LARGEST), _LARGEST))


@part
def _adjust(row: Record, ids: Ints, values: Floats, x: Floats, saved: Floats) -> None:
    """Apply the row's lists, in the order they are stored: allowed, bias and bans, stops, seen."""
    start = row.start
    end = start + row.allowed
    if row.restricted:
        for j in range(start, end):
            saved[j - start] = x[ids[j]]
        x[:] = -np.inf
        for j in range(start, end):
            x[ids[j]] = saved[j - start]
    start, end = end, end + row.biased
    for j in range(start, end):
        x[ids[j]] = _bounded(float(x[ids[j]]) + values[j])
    start, end = end, end + row.stops
    if row.position < row.min_tokens:
        for j in range(start, end):
            x[ids[j]] = -np.inf
    start, end = end, end + row.seen
    for j in range(start, end):
        logit = float(x[ids[j]])
        logit = logit / row.repetition if logit > 0.0 else logit * row.repetition
        if values[j] > 0.0:
            logit -= row.frequency * values[j] + row.presence
        x[ids[j]] = _bounded(logit)


@part
def _count(row: Record, ids: Ints, values: Floats, token: int) -> None:
    """Count one more occurrence in the output. The caller keeps room for one more entry."""
    start = row.start + row.allowed + row.biased + row.stops
    end = start + row.seen
    for j in range(start, end):
        if ids[j] == token:
            values[j] += 1.0
            return
    ids[end] = token
    values[end] = 1.0
    row.seen += 1


@part
def _choose(
    row: Record, bits: Bits, ids: Ints, values: Floats, x: Floats, peaks: Floats, keys: Keys, weights: Floats
) -> tuple[int, int]:
    if row.plain and row.position >= row.min_tokens:
        return argmax(bits)
    status = load(bits, x)
    if status != OK:
        return status, 0
    _adjust(row, ids, values, x, weights)
    top = fill_peaks(x, peaks)
    if top == -np.inf:
        return ALL_MASKED, 0
    if row.temperature == 0.0:
        return OK, first_at(x, peaks, top)
    return OK, _draw(row, x, peaks, top, keys, weights)


@part
def _report(
    bits: Bits, token: int, x: Floats, peaks: Floats, keys: Keys, weights: Floats, top_ids: Ints, top_logprobs: Floats
) -> tuple[float, int]:
    """Log-probability and rank of one token under the unmodified logits, and the likeliest tokens.

    Unused entries of ``top_ids`` become -1. A row without a distribution (NaN, +inf, nothing
    finite) reports NaN and rank 0.
    """
    top_ids[:] = -1
    if load(bits, x) != OK:
        return np.nan, 0
    top = fill_peaks(x, peaks)
    normaliser = float(top) + math.log(weigh(x, peaks, top, np.float32(1.0), NO_CUT, weights))
    chosen = x[token]
    rank = 1
    for i in range(token):
        rank += x[i] >= chosen
    for i in range(token + 1, bits.size):
        rank += x[i] > chosen
    if top_ids.size > 0:
        n = collect(x, peaks, top_k_cut(x, peaks, top, top_ids.size, keys, weights), keys)
        order = np.sort(keys[:n])
        for i in range(n):
            top_ids[i] = token_of(order[n - 1 - i])
            top_logprobs[i] = float(logit_of(order[n - 1 - i])) - normaliser
    return float(chosen) - normaliser, rank


@part
def _argmax_task(i: int, chunks: int, worker: int, bits: Bits, tokens: Ints, status: Ints) -> None:
    status[i], tokens[i] = argmax(bits[i])


@kernel
def argmax_rows(fork: int, threads: int, bits: Bits, tokens: Ints, status: Ints) -> None:
    """The first index of the largest logit of every row: all that plain greedy rows need.

    Args:
        fork, threads: See ``threads.parallel``.
        bits: Bit patterns ``[n, V]``: int16 of bfloat16, or int32 of float32.
        tokens, status: Written, int32 ``[n]``. A token means something where its status is ``OK``.
    """
    parallel(_argmax_task, fork, threads, tokens.size, (bits, tokens, status))


@part
def _sample_task(
    i: int,
    chunks: int,
    worker: int,
    bits: Bits,
    rows: Ints,
    table: Record,
    ids: Ints,
    values: Floats,
    scratch: Scratch,
    tokens: Ints,
    status: Ints,
    report: Report,
) -> None:
    x, peaks, keys, weights = scratch[0][worker], scratch[1][worker], scratch[2][worker], scratch[3][worker]
    logprobs, ranks, top_ids, top_logprobs = report
    row = table[rows[i]]
    status[i], tokens[i] = _choose(row, bits[i], ids, values, x, peaks, keys, weights)
    if status[i] != OK:
        return
    row.position += 1
    if row.penalised:
        _count(row, ids, values, tokens[i])
    k = row.top_logprobs
    if k >= 0:
        logprobs[i], ranks[i] = _report(bits[i], tokens[i], x, peaks, keys, weights, top_ids[i, :k], top_logprobs[i, :k])


@kernel
def sample_rows(
    fork: int,
    threads: int,
    bits: Bits,
    rows: Ints,
    table: Record,
    ids: Ints,
    values: Floats,
    scratch: Scratch,
    tokens: Ints,
    status: Ints,
    report: Report,
) -> None:
    """Sample one token per row and advance the rows' positions and token counts.

    Args:
        fork, threads: See ``threads.parallel``.
        bits: Bit patterns ``[n, V]``: int16 of bfloat16, or int32 of float32.
        rows: int32 ``[n]``, distinct indices into ``table``.
        table: State of every row, see ``sampling_rows.ROW``.
        ids, values: The pool that the rows' token lists lie in.
        scratch: For at least ``threads`` workers: logits ``[w, P]``, block maxima
            ``[w, P / BLOCK]``, keys ``[w, P]`` and weights ``[w, P]``, where ``P`` is ``V`` rounded
            up to a multiple of ``BLOCK``.
        tokens, status: Written, int32 ``[n]``. A token means something where its status is ``OK``.
        report: Written for rows that want log-probabilities: log-probability ``[n]``, rank ``[n]``,
            likeliest ids ``[n, 20]`` and their log-probabilities ``[n, 20]``. May have no entries
            if no row wants any.
    """
    parallel(_sample_task, fork, threads, tokens.size, (bits, rows, table, ids, values, scratch, tokens, status, report))


@part
def _report_task(i: int, chunks: int, worker: int, bits: Bits, tokens: Ints, scratch: Scratch, report: Report) -> None:
    x, peaks, keys, weights = scratch[0][worker], scratch[1][worker], scratch[2][worker], scratch[3][worker]
    logprobs, ranks, top_ids, top_logprobs = report
    logprobs[i], ranks[i] = _report(bits[i], tokens[i], x, peaks, keys, weights, top_ids[i], top_logprobs[i])


@kernel
def report_rows(fork: int, threads: int, bits: Bits, tokens: Ints, scratch: Scratch, report: Report) -> None:
    """Log-probabilities of given tokens ``[m]``, one per row of logits; else as in ``sample_rows``, with ``[m, k]``."""
    parallel(_report_task, fork, threads, tokens.size, (bits, tokens, scratch, report))
