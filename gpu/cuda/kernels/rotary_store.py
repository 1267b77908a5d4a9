"""Rotary position embedding (Su et al., arXiv:2104.09864), fused with the store of keys and values.

One pass over a fused projection: queries are rotated where they are, keys are rotated and written
with the values to the paged pool. Pairs of dimensions are half the rotated size apart (Llama).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pool_shape import PoolShape, check_chunks, check_integers, misfit
from .tiling import padded

_BLOCK = 2048


@triton.jit
def _chunk_of_token(cu_seqlens: tl.tensor, chunks: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The last chunk that does not begin behind ``token``, by bisection."""
    low = 0
    high = chunks
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _turn(
    source: tl.tensor,
    begin: tl.tensor,
    target: tl.tensor,
    end: tl.tensor,
    valid: tl.tensor,
    norm: tl.tensor,
    angles: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Some heads from ``source + begin`` normed (if asked), rotated and written to ``target + end``."""
    HALF: tl.constexpr = ROPE_DIM // 2
    half = tl.arange(0, BLOCK_HALF)
    rest = ROPE_DIM + tl.arange(0, BLOCK_REST)
    inside = valid[:, None] & (half < HALF)[None, :]
    behind = valid[:, None] & (rest < HEAD_DIM)[None, :]
    head = source + begin[:, None]
    low = tl.load(head + half[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(head + HALF + half[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(head + rest[None, :], mask=behind, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(low * low + high * high, 1) + tl.sum(other * other, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low = low * scale * tl.load(norm + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        high = high * scale * tl.load(norm + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        other = other * scale * tl.load(norm + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    cos = tl.load(angles + half, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF + half, mask=half < HALF, other=0.0)[None, :]
    kind = target.dtype.element_ty
    head = target + end[:, None]
    tl.store(head + half[None, :], (low * cos - high * sin).to(kind), mask=inside)
    tl.store(head + HALF + half[None, :], (high * cos + low * sin).to(kind), mask=inside)
    tl.store(head + rest[None, :], other.to(kind), mask=behind)


@triton.jit(do_not_specialize=["chunks", "table_stride"])
def _rotate_and_store(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    cos_sin: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    block_table: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    cu_seqlens: tl.tensor,
    chunks: tl.tensor,
    qkv_stride: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One block of heads of one token: queries, or keys with their values.

    Without ``cu_seqlens`` a token is one row's, and ``starts`` are by row.
    """
    token = tl.program_id(0)
    if cu_seqlens is None:
        row = tl.load(rows + token)
        if row < 0:
            return
        position = tl.load(starts + row)
    else:
        if token >= tl.load(cu_seqlens + chunks):
            return
        chunk = _chunk_of_token(cu_seqlens, chunks, token)
        row = tl.load(rows + chunk)
        position = tl.load(starts + chunk) + token - tl.load(cu_seqlens + chunk)
    BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    block = tl.program_id(1)
    begin = token.to(tl.int64) * qkv_stride
    angles = cos_sin + position * ROPE_DIM
    if block < BLOCKS:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        at = begin + head * HEAD_DIM
        _turn(qkv, at, qkv, at, head < HEADS, q_norm, angles, eps, HEAD_DIM, ROPE_DIM, BLOCK_HALF, BLOCK_REST)
    else:
        head = (block - BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        valid = head < KV_HEADS
        page = tl.load(block_table + row.to(tl.int64) * table_stride + position // PAGE_SIZE).to(tl.int64)
        slot = ((page * KV_HEADS + head) * PAGE_SIZE + position % PAGE_SIZE) * HEAD_DIM
        at = begin + (HEADS + head) * HEAD_DIM
        _turn(qkv, at, k_pool, slot, valid, k_norm, angles, eps, HEAD_DIM, ROPE_DIM, BLOCK_HALF, BLOCK_REST)
        dim = tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
        value = tl.load(qkv + (at + KV_HEADS * HEAD_DIM)[:, None] + dim[None, :], mask=inside)
        tl.store(v_pool + slot[:, None] + dim[None, :], value, mask=inside)


def rotary_store_decode(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rotate and store one token per entry of ``rows``, at position ``lengths[rows[i]]``. Compute thread only.

    Args:
        qkv: ``[n, (heads + 2 * kv_heads) * head_dim]``: queries, keys, values, in the pool's type;
            any stride between tokens. The queries are rotated in place.
        cos_sin: float32 ``[max_len, rope_dim]``: cosines of the ``rope_dim / 2`` angles, then sines.
            Dimensions behind ``rope_dim`` stay as they are. No position may be ``max_len`` or more.
        k_pool, v_pool: ``[pages, kv_heads, page_size, head_dim]``, written.
        block_table: int32 ``[max_rows, max_pages]``; each token must have its page.
        rows: int32 ``[n]``; -1 is padding: nothing is computed or written for it.
        lengths: int32 ``[max_rows]``: tokens in the pool before this one.
        heads: Query heads.
        q_norm, k_norm: Weights ``[head_dim]`` of a root-mean-square norm per head before the
            rotation (Qwen3); ``None`` for no norm.
        eps: Of these norms.

    Returns:
        The queries, ``[n, heads, head_dim]``, a view of ``qkv``.

    Raises:
        UnsupportedModelError: a data type or head size the kernel lacks.
        ValueError: shapes, types or strides that do not fit.
    """
    if rows.shape != (len(qkv),):
        raise misfit(f"{tuple(rows.shape)} rows for {len(qkv)} tokens; there must be one each, -1 for padding")
    check_integers(block_table=block_table, rows=rows, lengths=lengths)
    return _launch(qkv, cos_sin, k_pool, v_pool, (block_table, rows, lengths, None), heads, q_norm, k_norm, eps)


def rotary_store_prefill(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rotate and store packed chunks; token ``j`` of chunk ``i`` at position ``starts[i] + j``. Compute thread only.

    Args:
        qkv, cos_sin, k_pool, v_pool, block_table, heads, q_norm, k_norm, eps: See ``rotary_store_decode``.
        rows: int32 ``[chunks]``.
        starts: int32 ``[chunks]``: tokens in the pool before the chunk.
        cu_seqlens: int32 ``[chunks + 1]``: 0 and the sums of the chunks' lengths. Tokens behind the
            last sum are padding: nothing is computed or written for them.

    Returns:
        The queries, ``[tokens, heads, head_dim]``, a view of ``qkv``.

    Raises:
        UnsupportedModelError: a data type or head size the kernel lacks.
        ValueError: shapes, types or strides that do not fit.
    """
    check_integers(block_table=block_table, rows=rows, starts=starts, cu_seqlens=cu_seqlens)
    check_chunks(rows, starts, cu_seqlens)
    return _launch(qkv, cos_sin, k_pool, v_pool, (block_table, rows, starts, cu_seqlens), heads, q_norm, k_norm, eps)


def _launch(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    pool = PoolShape.of(k_pool, v_pool)
    dim, rope_dim = pool.head_dim, cos_sin.shape[1]
    tokens, columns = qkv.shape
    if columns != (heads + 2 * pool.kv_heads) * dim:
        raise misfit(f"qkv {tuple(qkv.shape)} for {heads} + 2 × {pool.kv_heads} heads of {dim}")
    if qkv.dtype != k_pool.dtype or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv is {qkv.dtype} of strides {qkv.stride()}; it must be the pool's {k_pool.dtype} and have contiguous tokens"
        )
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or rope_dim > dim or rope_dim % 2 or not rope_dim:
        raise misfit(f"cos_sin {tuple(cos_sin.shape)} of {cos_sin.dtype} for heads of {dim}; it must be contiguous float32")
    for norm in (q_norm, k_norm):
        if norm is not None and (norm.shape != (dim,) or not norm.is_contiguous()):
            raise misfit(f"norm weight {tuple(norm.shape)} for heads of {dim}")
    queries = qkv[:, : heads * dim].view(tokens, heads, dim)
    if not tokens or not len(places[1]):
        return queries
    block = max(1, min(_BLOCK // padded(dim), triton.next_power_of_2(max(heads, pool.kv_heads))))
    _rotate_and_store[(tokens, triton.cdiv(heads, block) + triton.cdiv(pool.kv_heads, block))](
        qkv,
        q_norm,
        k_norm,
        cos_sin,
        k_pool,
        v_pool,
        *places,
        len(places[1]),
        qkv.stride(0),
        places[0].stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=pool.kv_heads,
        PAGE_SIZE=pool.page_size,
        HEAD_DIM=dim,
        ROPE_DIM=rope_dim,
        BLOCK_HEADS=block,
        BLOCK_HALF=triton.next_power_of_2(rope_dim // 2),
        BLOCK_REST=triton.next_power_of_2(max(dim - rope_dim, 1)),
        BLOCK_D=padded(dim),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return queries
