"""The last two kernels of sampling: the draw from what is left of a row, and the step's end for every row."""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import MAX_NOISE, noise_bits, noise_bound, noise_of, noise_stream
from .order import INFINITY_ORDER, NO_CUT, order_in, token_in, value_of
from .penalties import count_token
from .record import (
    DRAWS,
    MIN_P,
    NEEDS,
    PENALISED,
    POSITION,
    RECORD_WORDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_double,
    load_seed,
)
from .scan import can_be_drawn, status_of, top_of
from .selection import inverse_of

_OK: tl.constexpr = tl.constexpr(0)
_ALL_MASKED: tl.constexpr = tl.constexpr(4)
_SLACK: tl.constexpr = tl.constexpr(1e-3)


@triton.jit
def race_kernel(
    rows: tl.tensor,
    records: tl.tensor,
    work: tl.tensor,
    work_stride: tl.tensor,
    keys: tl.tensor,
    extremes: tl.tensor,
    cuts: tl.tensor,
    scores: tl.tensor,
    winners: tl.tensor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The best of logit / temperature + noise over a part of a row, among tokens at or over the cut and over min-p.

    The likeliest token of the row is the one to beat. A bound of the noise in float32 rules out most
    tiles before any logarithm is taken in float64, and what cannot win whatever its noise is not even
    hashed.
    """
    i = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows + i)
    if row < 0:
        return
    record = records + row.to(tl.int64) * RECORD_WORDS
    needs = tl.load(record + NEEDS)
    if (needs & DRAWS) == 0:
        return
    parts = tl.num_programs(1)
    if can_be_drawn(keys, extremes, i, parts, PARTS) == 0:
        return
    top_key = top_of(keys, i, parts, PARTS)
    top = value_of(order_in(top_key))
    temperature = load_double(record, TEMPERATURE)
    inverse = inverse_of(temperature)
    cut = tl.full([], NO_CUT, tl.int64)
    if (needs & (TOP_K | TOP_P)) != 0:
        cut = tl.load(cuts + i)
    least = value_of(order_in(cut))
    last = token_in(cut)
    min_p = load_double(record, MIN_P)
    log_min_p = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), -float("inf"))
    floor = tl.where(min_p > 0.0, top.to(tl.float64) + temperature * (log_min_p - _SLACK), -3.0e38)
    floor = tl.maximum(floor, -3.0e38).to(tl.float32)
    last = tl.where(floor > least, 0x7FFFFFFF, last)
    least = tl.where(floor > least, floor, least)
    stream = noise_stream(load_seed(record), tl.load(record + POSITION))
    winner = token_in(top_key)
    best = noise_of(noise_bits(stream, winner))
    source = work + i.to(tl.int64) * work_stride
    for first in range(0, CHUNK, TILE):
        token = part * CHUNK + first + tl.arange(0, TILE)
        x = tl.load(source + token)
        kept = (x > least) | ((x == least) & (token <= last))
        z = tl.where(kept, (x - top) * inverse, -float("inf"))
        if tl.max(z) + MAX_NOISE >= best.to(tl.float32):
            bits = noise_bits(stream, token)
            if tl.max(z + noise_bound(bits)) >= best.to(tl.float32):
                exact = (x.to(tl.float64) - top.to(tl.float64)) / temperature
                score = tl.where(kept & (exact >= log_min_p), exact + noise_of(bits), -float("inf"))
                leader = tl.max(score)
                if leader > best:
                    best = leader
                    winner = tl.min(tl.where(score == leader, token, 0x7FFFFFFF))
    tl.store(scores + i * parts + part, best)
    tl.store(winners + i * parts + part, winner)


@triton.jit(do_not_specialize=["decoding", "parts"])
def finish_kernel(
    rows: tl.tensor,
    records: tl.tensor,
    pool_address: tl.tensor,
    lengths: tl.tensor,
    last_token: tl.tensor,
    keys: tl.tensor,
    extremes: tl.tensor,
    scores: tl.tensor,
    winners: tl.tensor,
    tokens: tl.tensor,
    status: tl.tensor,
    decoding: tl.tensor,
    parts: tl.tensor,
    GREEDY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A row's token and status, and the row moved on: last token, output position, counts and, if it decodes, length.

    If ``GREEDY`` there are no scores, nor anything to count.
    """
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if row < 0:
        return
    record = records + row.to(tl.int64) * RECORD_WORDS
    needs = 0 if GREEDY else tl.load(record + NEEDS)
    top_key = top_of(keys, i, parts, PARTS)
    outcome = status_of(extremes, i, parts, PARTS)
    masked = (outcome == _OK) & (order_in(top_key) == -INFINITY_ORDER)
    outcome = tl.where(masked, _ALL_MASKED, outcome)
    token = tl.where(outcome == _OK, token_in(top_key), 0)
    if ((needs & DRAWS) != 0) & (outcome == _OK):
        part = tl.arange(0, PARTS)
        score = tl.load(scores + i * parts + part, mask=part < parts, other=-float("inf"))
        winner = tl.load(winners + i * parts + part, mask=part < parts, other=0)
        token = tl.min(tl.where(score == tl.max(score), winner, 0x7FFFFFFF))
    tl.store(tokens + i, token)
    tl.store(status + i, outcome)
    tl.store(last_token + row, token)
    if i < decoding:
        tl.store(lengths + row, tl.load(lengths + row) + 1)
    if outcome == _OK:
        tl.store(record + POSITION, tl.load(record + POSITION) + 1)
        if (needs & PENALISED) != 0:
            count_token(record, pool_address, token, BLOCK)
