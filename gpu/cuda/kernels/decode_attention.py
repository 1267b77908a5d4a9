"""Attention of one new token per row over its paged context.

Split-KV decoding as in Flash-Decoding (Dao et al., 2023, crfm.stanford.edu/2023/10/12/flashdecoding):
a row's context is divided among several programs, each of which leaves a partial softmax that a
second kernel joins. The queries that share a key/value head are the rows of one matrix product, so
the pool is read once per key/value head, in blocks whose loads are queued ahead of the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .attend import attend, load_queries
from .pool_shape import PoolShape, check_integers
from .tiling import Tiling, decode_tiling, padded

_WAVES = 8
_RESIDENT = 2
_SHORTEST = 128
_LONGEST = 16384
_MOST_SPLITS = 128


@triton.jit
def _span(
    length: tl.tensor, window: tl.tensor, splits: tl.tensor, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """First position of a row's context and positions per split, both multiples of ``BLOCK_N``.

    The token being computed sits at position ``length``. Splits are whole blocks: the last ones of
    a short context stay empty.
    """
    first = 0
    if WINDOWED:
        first = tl.maximum(length + 1 - window, 0) // BLOCK_N * BLOCK_N
    blocks = tl.cdiv(length + 1 - first, BLOCK_N)
    return first, tl.cdiv(blocks, splits) * BLOCK_N


@triton.jit(do_not_specialize=["window", "table_stride"])
def _attend_split(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    block_table: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
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
    DIRECT: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    # Key/value heads are the fastest axis: their tiles of one page are neighbours in memory.
    BLOCKS_M: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head, split, entry = tl.program_id(0) // BLOCKS_M, tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + entry)
    if row < 0:
        return
    length = tl.load(lengths + row)
    first, share = _span(length, window, tl.num_programs(1), BLOCK_N, WINDOWED)
    begin = first + split * share
    if begin > length:
        return
    member = tl.program_id(0) % BLOCKS_M * BLOCK_M + tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + member
    queries = load_queries(q, entry.to(tl.int64) * q_stride + head * HEAD_DIM, member < GROUP, HEAD_DIM, BLOCK_D)
    peak, total, summed = attend(
        queries,
        tl.full([BLOCK_M], 0, tl.int32) + length,
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        k_pool,
        v_pool,
        block_table + row.to(tl.int64) * table_stride,
        kv_head,
        scale,
        window,
        begin,
        tl.minimum(begin + share, length + 1),
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
    inside = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    result = summed / total[:, None]
    at = entry.to(tl.int64) * (KV_HEADS * GROUP) + head
    if DIRECT:
        tl.store(out + at[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        at = at * tl.num_programs(1) + split
        tl.store(partial + at[:, None] * HEAD_DIM + dim[None, :], result, mask=inside)
        tl.store(weight + at, peak + tl.math.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["window", "splits"])
def _join_splits(
    rows: tl.tensor,
    lengths: tl.tensor,
    partial: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    head, entry = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + entry)
    if row < 0:
        return
    length = tl.load(lengths + row)
    first, share = _span(length, window, splits, BLOCK_N, WINDOWED)
    split = tl.arange(0, BLOCK_SPLITS)
    used = split < tl.cdiv(length + 1 - first, share)
    at = entry.to(tl.int64) * tl.num_programs(0) + head
    logarithm = tl.load(weight + at * splits + split, mask=used, other=float("-inf"))
    factor = tl.math.exp2(logarithm - tl.max(logarithm, 0))
    dim = tl.arange(0, BLOCK_D)
    tile = (at * splits + split)[:, None] * HEAD_DIM + dim[None, :]
    values = tl.load(partial + tile, mask=used[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    result = tl.sum(values * factor[:, None], 0) / tl.sum(factor, 0)
    tl.store(out + at * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def decode_splits(rows: int, kv_heads: int, context: int, multiprocessors: int) -> int:
    """Into how many parts every row's context is divided.

    Enough for 8 waves of programs, two to a multiprocessor, so that rows of different lengths even
    out and the last wave is a small part of the whole; but no parts under 128 positions, which are
    all beginning and end, and none over 16,384, which would leave one long row to a few programs.

    Args:
        rows: Entries of the launch, padding included.
        kv_heads: Key/value heads.
        context: The longest context the launch is for, in tokens; at most the window where there is one.
        multiprocessors: Of the device.
    """
    wanted = -(-_WAVES * _RESIDENT * multiprocessors // max(rows * kv_heads, 1))
    wanted = max(wanted, -(-context // _LONGEST))
    return max(1, min(wanted, -(-context // _SHORTEST), _MOST_SPLITS))


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results between the two kernels of decode attention; one serves all layers.

    Attributes:
        partial: float32 ``[n * heads * splits * head_dim]`` or more: attention over one split.
        weight: float32 ``[n * heads * splits]`` or more: log2 of the sum of its exponentials.
    """

    partial: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def allocate(cls, parts: int, heads: int, head_dim: int, device: torch.device | str) -> DecodeScratch:
        """Memory for launches of up to ``parts`` entries × splits, the most over all launches it is to serve."""
        count = parts * heads
        return cls(
            torch.empty(count * head_dim, dtype=torch.float32, device=device),
            torch.empty(count, dtype=torch.float32, device=device),
        )


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    splits: int,
    window: int = 0,
    tiling: Tiling | None = None,
) -> None:
    """Attention of one token per entry of ``rows``, whose key and value are in the pool already. Compute thread only.

    The token of entry ``i`` sits at position ``lengths[rows[i]]`` and attends to that many positions
    and itself. Launches nothing that depends on values on the device, so it can be captured in a
    CUDA graph; one captured graph serves all contexts, best those up to what ``splits`` is for.

    Args:
        q: ``[n, heads, head_dim]`` in the pool's type; any stride between tokens.
        k_pool, v_pool: ``[pages, kv_heads, page_size, head_dim]``; bfloat16, float16 or float32.
        block_table: int32 ``[max_rows, max_pages]``.
        rows: int32 ``[n]``; -1 is padding: nothing is computed or written for it.
        lengths: int32 ``[max_rows]``: tokens in the pool before this one.
        out: ``[n, heads * head_dim]``, written.
        scratch: For ``n * splits`` parts or more; not touched if ``splits`` is 1.
        scale: Factor of the scores.
        splits: Into how many parts a context is divided, see ``decode_splits``.
        window: Positions a token sees at most, itself included; 0 for all.
        tiling: Other blocks than ``decode_tiling`` chooses.

    Raises:
        UnsupportedModelError: a data type or head size the kernel lacks.
        ValueError: shapes, types or strides that do not fit.
    """
    pool = PoolShape.of(k_pool, v_pool)
    group = pool.group(q, out, k_pool.dtype)
    check_integers(block_table=block_table, rows=rows, lengths=lengths)
    entries, heads, head_dim = q.shape
    if rows.shape != (entries,):
        raise ValueError(f"{tuple(rows.shape)} rows for {entries} queries; there must be one each, -1 for padding")
    if splits > 1 and scratch.weight.numel() < entries * heads * splits:
        raise ValueError(f"scratch of {scratch.weight.numel():,} parts for {entries} × {heads} × {splits}; allocate more")
    if not entries:
        return
    tiling = tiling or decode_tiling(head_dim, q.dtype, group)
    shared: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_N": tiling.keys,
        "WINDOWED": window > 0,
    }
    _attend_split[(pool.kv_heads * -(-group // tiling.queries), splits, entries)](
        q,
        k_pool,
        v_pool,
        block_table,
        rows,
        lengths,
        out,
        scratch.partial,
        scratch.weight,
        scale * math.log2(math.e),
        window,
        q.stride(0),
        block_table.stride(0),
        GROUP=group,
        KV_HEADS=pool.kv_heads,
        PAGE_SIZE=pool.page_size,
        BLOCK_M=tiling.queries,
        DIRECT=splits == 1,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        enable_fp_fusion=True,
        **shared,
    )
    if splits > 1:
        block = 1 << (splits - 1).bit_length()
        wide = block * shared["BLOCK_D"] > 8192
        _join_splits[(heads, entries)](
            rows,
            lengths,
            scratch.partial,
            scratch.weight,
            out,
            window,
            splits,
            BLOCK_SPLITS=block,
            num_warps=8 if wide else 4,
            enable_fp_fusion=True,
            **shared,
        )
