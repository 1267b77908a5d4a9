"""Causal attention of packed prompt chunks over what is cached before them and their own tokens.

FlashAttention-2 (Dao, arXiv:2307.08691) over a paged pool. A block of queries holds (token, head)
pairs of one key/value head's group, as grouped-query attention wants it (Ainslie et al.,
arXiv:2305.13245): short chunks fill a block, and a key is read once for the whole group. Blocks of
keys that no query of a block can see are not visited, and only those on the diagonal are masked.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .attend import attend, load_queries
from .pool_shape import PoolShape, check_chunks, check_integers
from .tiling import Tiling, padded, prefill_tiling


@triton.jit
def _chunk_of_block(
    cu_seqlens: tl.tensor, chunks: tl.tensor, block: tl.tensor, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
) -> tl.tensor:
    """The chunk a block of queries belongs to, by bisection.

    Chunk ``i`` owns the blocks from ``cu_seqlens[i] * GROUP // BLOCK_M + i`` on: with one block to
    spare per chunk there are always enough, and no list of blocks has to be made or sent.
    """
    low = 0
    high = chunks
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) * GROUP // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["window", "chunks", "table_stride"])
def _attend_chunks(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    block_table: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    cu_seqlens: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    chunks: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    # Late blocks see most keys and go first, so that the short ones fill the gaps at the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
    chunk = _chunk_of_block(cu_seqlens, chunks, block, GROUP, BLOCK_M)
    token = tl.load(cu_seqlens + chunk)
    pairs = (tl.load(cu_seqlens + chunk + 1) - token) * GROUP
    begin = (block - (token * GROUP // BLOCK_M + chunk)) * BLOCK_M
    if begin >= pairs:
        return
    start = tl.load(starts + chunk)
    table = block_table + tl.load(rows + chunk).to(tl.int64) * table_stride
    pair = begin + tl.arange(0, BLOCK_M)
    # Pairs behind the chunk take its last position: they see a key, and are not stored.
    position = start + tl.minimum(pair, pairs - 1) // GROUP
    head = kv_head * GROUP + pair % GROUP
    at = token.to(tl.int64) + pair // GROUP
    queries = load_queries(q, at * q_stride + head * HEAD_DIM, pair < pairs, HEAD_DIM, BLOCK_D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    oldest = start + begin // GROUP  # position of the block's first query
    end = start + (tl.minimum(begin + BLOCK_M, pairs) - 1) // GROUP + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(oldest + 1 - window, 0) // BLOCK_N * BLOCK_N
    else:
        first = (oldest + 1) // BLOCK_N * BLOCK_N
        peak, total, summed = attend(
            queries,
            position,
            peak,
            total,
            summed,
            k_pool,
            v_pool,
            table,
            kv_head,
            scale,
            window,
            0,
            first,
            KV_HEADS,
            PAGE_SIZE,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            False,
            False,
            STAGES,
        )
    peak, total, summed = attend(
        queries,
        position,
        peak,
        total,
        summed,
        k_pool,
        v_pool,
        table,
        kv_head,
        scale,
        window,
        first,
        end,
        KV_HEADS,
        PAGE_SIZE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        True,
        WINDOWED,
        STAGES,
    )
    dim = tl.arange(0, BLOCK_D)
    target = (at * (KV_HEADS * GROUP) + head) * HEAD_DIM
    result = (summed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + target[:, None] + dim[None, :], result, mask=(pair < pairs)[:, None] & (dim < HEAD_DIM)[None, :])


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    tiling: Tiling | None = None,
) -> None:
    """Causal attention of packed chunks whose keys and values are in the pool already. Compute thread only.

    Token ``j`` of chunk ``i`` sits at position ``starts[i] + j`` and attends to the positions up to its own.

    Args:
        q: ``[tokens, heads, head_dim]`` in the pool's type; any stride between tokens.
        k_pool, v_pool: ``[pages, kv_heads, page_size, head_dim]``; bfloat16, float16 or float32.
        block_table: int32 ``[max_rows, max_pages]``.
        rows: int32 ``[chunks]``.
        starts: int32 ``[chunks]``: tokens in the pool before the chunk.
        cu_seqlens: int32 ``[chunks + 1]``: 0 and the sums of the chunks' lengths. Tokens behind the
            last sum are padding: nothing is computed or written for them.
        out: ``[tokens, heads * head_dim]``, written.
        scale: Factor of the scores.
        window: Positions a token sees at most, itself included; 0 for all.
        tiling: Other blocks than ``prefill_tiling`` chooses.

    Raises:
        UnsupportedModelError: a data type or head size the kernel lacks.
        ValueError: shapes, types or strides that do not fit.
    """
    pool = PoolShape.of(k_pool, v_pool)
    group = pool.group(q, out, k_pool.dtype)
    check_integers(block_table=block_table, rows=rows, starts=starts, cu_seqlens=cu_seqlens)
    check_chunks(rows, starts, cu_seqlens)
    tokens, _, head_dim = q.shape
    chunks = len(rows)
    if not tokens or not chunks:
        return
    tiling = tiling or prefill_tiling(head_dim, q.dtype)
    _attend_chunks[(pool.kv_heads, tokens * group // tiling.queries + chunks)](
        q,
        k_pool,
        v_pool,
        block_table,
        rows,
        starts,
        cu_seqlens,
        out,
        scale * math.log2(math.e),
        window,
        chunks,
        q.stride(0),
        block_table.stride(0),
        GROUP=group,
        KV_HEADS=pool.kv_heads,
        PAGE_SIZE=pool.page_size,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        BLOCK_M=tiling.queries,
        BLOCK_N=tiling.keys,
        WINDOWED=window > 0,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        enable_fp_fusion=True,
    )
