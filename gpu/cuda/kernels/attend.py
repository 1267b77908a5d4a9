"""The inner loop of both attention kernels: a block of queries walks a range of paged positions.

Online softmax (Milakov and Gimelshein, arXiv:1805.02867) over blocks as in FlashAttention (Dao et
al., arXiv:2205.14135), keys and values read in place through the block table (Kwon et al.,
arXiv:2309.06180). Products take the pool's type, sums are float32. Exponentials are powers of two:
the caller's scale contains log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_queries(
    q: tl.tensor, offsets: tl.tensor, valid: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """A block of query heads, ``[rows, BLOCK_D]``; zeros where there is none."""
    dim = tl.arange(0, BLOCK_D)
    return tl.load(q + offsets[:, None] + dim[None, :], mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def attend(
    q: tl.tensor,
    position: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    summed: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Positions ``begin`` to ``end`` (exclusive) added to the running softmax of some queries.

    Args:
        q: ``[rows, BLOCK_D]``.
        position: int32 ``[rows]``: a query sees the positions up to its own.
        peak, total, summed: float32 ``[rows]``, ``[rows]``, ``[rows, BLOCK_D]``: largest score so
            far, sum of the weights relative to it, and of the weighted values.
        k_pool, v_pool: ``[pages, KV_HEADS, PAGE_SIZE, HEAD_DIM]``.
        table: Block table of the row the queries belong to.
        scale: Factor of the scores, with log2(e) in it.
        window: Positions a query sees at most, if ``WINDOWED``.
        begin, end: ``begin`` is a multiple of ``BLOCK_N``; so is ``end`` if not ``MASKED``.
        MASKED: Some query does not see all of the range, or ``end`` is anywhere.

    Returns:
        The new ``peak, total, summed``.
    """
    dim = tl.arange(0, BLOCK_D)
    # Three products of 10-bit halves make a float32 one; the default is the first of them.
    PRECISION: tl.constexpr = "tf32x3" if q.dtype == tl.float32 else "tf32"
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK_N)
        held = key < end
        page = tl.load(table + key // PAGE_SIZE, mask=held, other=0)
        slot = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE_SIZE + key % PAGE_SIZE
        tile = slot[:, None] * HEAD_DIM + dim[None, :]
        # Slots behind the range may hold anything, NaN too, so they are not read.
        inside = held[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_pool + tile, mask=inside, other=0.0)
        v = tl.load(v_pool + tile, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        base = higher
        if WINDOWED:
            # The window of a query may begin behind this block, and -inf - -inf is not a number.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.math.exp2(score - base[:, None])
        shrink = tl.math.exp2(peak - base)
        total = total * shrink + tl.sum(weight, 1)
        summed = tl.dot(weight.to(v.dtype), v, summed * shrink[:, None], input_precision=PRECISION)
        peak = higher
    return peak, total, summed
