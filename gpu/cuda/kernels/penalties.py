"""What a row's list of entries does to its logits: masks, bias, stops and penalties; and counting what was sampled.

An entry says everything there is to say about one token id, so all entries of a row are worked on
at once. The arithmetic is float64 with the roundings to float32 in between that the CPU makes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .record import (
    ALLOWED,
    ENTRY_WORDS,
    FREQUENCY,
    LIST_ROOM,
    LIST_SIZE,
    LISTED,
    MIN_TOKENS,
    NEEDS,
    POSITION,
    PRESENCE,
    RECORD_WORDS,
    REPETITION,
    RESTRICTED,
    SEEN,
    STOP,
    list_of,
    load_double,
)

_LARGEST: tl.constexpr = tl.constexpr(3.0e38)  # adjusted logits stay finite, so that differences of them are never NaN


@triton.jit
def _bounded(value: tl.tensor) -> tl.tensor:
    """float64 to float32, finite unless -inf."""
    clipped = tl.minimum(tl.maximum(value, -_LARGEST), _LARGEST)
    return tl.where(value == -float("inf"), value, clipped).to(tl.float32)


@triton.jit
def adjust_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    rows: tl.tensor,
    records: tl.tensor,
    pool_address: tl.tensor,
    work: tl.tensor,
    work_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the adjusted logits of every listed token into the row's copy; several programs share a list.

    In this order: ``allowed_token_ids``, ``logit_bias`` and ``bad_token_ids``, stops below
    ``min_tokens``, ``repetition_penalty`` (Keskar et al., arXiv:1909.05858), ``frequency_penalty``
    and ``presence_penalty``.
    """
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if row < 0:
        return
    record = records + row.to(tl.int64) * RECORD_WORDS
    needs = tl.load(record + NEEDS)
    if (needs & LISTED) == 0:
        return
    suppressing = tl.load(record + POSITION) < tl.load(record + MIN_TOKENS)
    repetition = load_double(record, REPETITION)
    frequency = load_double(record, FREQUENCY)
    presence = load_double(record, PRESENCE)
    entries = list_of(record, pool_address)
    size = tl.load(record + LIST_SIZE)
    for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < size
        entry = entries + j.to(tl.int64) * ENTRY_WORDS
        token = tl.load(entry, mask=inside, other=0)
        bias = tl.load(entry + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
        marks = tl.load(entry + 2, mask=inside, other=0)
        count = tl.load(entry + 3, mask=inside, other=0)
        x = tl.load(logits + i.to(tl.int64) * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(((needs & RESTRICTED) != 0) & ((marks & ALLOWED) == 0), -float("inf"), x)
        banned = (bias == -float("inf")) | (suppressing & ((marks & STOP) != 0))
        x = tl.where((bias != 0.0) & (bias > -float("inf")), _bounded(x.to(tl.float64) + tl.maximum(bias, -_LARGEST)), x)
        x = tl.where(banned, -float("inf"), x)
        wide = x.to(tl.float64)
        wide = tl.where(wide > 0.0, wide / repetition, wide * repetition)
        wide = tl.where(count > 0, wide - (frequency * count + presence), wide)
        x = tl.where((marks & SEEN) != 0, _bounded(wide), x)
        tl.store(work + i.to(tl.int64) * work_stride + token, x, mask=inside)


@triton.jit
def count_token(record: tl.tensor, pool_address: tl.tensor, token: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Count one more occurrence of a token in a row's output, in its entry or a new one."""
    entries = list_of(record, pool_address)
    size = tl.load(record + LIST_SIZE)
    found = size
    for first in range(0, size, BLOCK):
        j = first + tl.arange(0, BLOCK)
        listed = tl.load(entries + j.to(tl.int64) * ENTRY_WORDS, mask=j < size, other=-1)
        found = tl.minimum(found, tl.min(tl.where(listed == token, j, size)))
    entry = entries + found.to(tl.int64) * ENTRY_WORDS
    tl.debug_barrier()  # every warp has read the size before one of them changes it
    if found < size:
        tl.store(entry + 2, tl.load(entry + 2) | SEEN)
        tl.store(entry + 3, tl.load(entry + 3) + 1)
    elif size < tl.load(record + LIST_ROOM):  # always so; behind the room lies another row's list
        tl.store(entry, token)
        tl.store(entry + 1, 0)
        tl.store(entry + 2, SEEN)
        tl.store(entry + 3, 1)
        tl.store(record + LIST_SIZE, size + 1)
