"""Rotary position embedding (Su et al., arXiv:2104.09864), fused with the split of q, k and v."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ._jit import inlined, kernel, part
from .lanemath import add, mul, splat, sub
from .layout import StepLayout
from .norm import scale_of_rms
from .simd import LANES, load_part, pointer, store_part
from .store import check_pools, put_key, put_value
from .tensors import element, misfit
from .threads import parallel, team

_LEAST = 1 << 14
_PAD = 64


@inlined
def _take(source: Any, begin: Any, dim: Any, line: Any) -> None:
    """One head to float32."""
    for d in range(0, dim, LANES):
        store_part(line, d, load_part(source, begin + d, dim - d), dim - d)


@inlined
def _norm_head(line: Any, dim: Any, weight: Any, eps: Any) -> None:
    """Root-mean-square norm of the head, in place."""
    scale = splat(scale_of_rms(line, 0, dim, eps))
    for d in range(0, dim, LANES):
        value = mul(mul(load_part(line, d, dim - d), scale), load_part(weight, d, dim - d))
        store_part(line, d, value, dim - d)


@inlined
def _rotate(line: Any, cos_sin: Any, angle: Any, rotated: Any, interleaved: Any) -> None:
    """Rotate the first ``rotated`` dimensions in place: pairs are half that apart, or neighbours."""
    half = rotated // 2
    if interleaved is not None:
        for i in range(half):
            a, b = line[2 * i], line[2 * i + 1]
            c, s = cos_sin[angle + i], cos_sin[angle + half + i]
            line[2 * i] = a * c - b * s
            line[2 * i + 1] = b * c + a * s
    else:
        for i in range(0, half, LANES):
            a, b = load_part(line, i, half - i), load_part(line, half + i, half - i)
            c, s = load_part(cos_sin, angle + i, half - i), load_part(cos_sin, angle + half + i, half - i)
            store_part(line, i, sub(mul(a, c), mul(b, s)), half - i)
            store_part(line, half + i, add(mul(b, c), mul(a, s)), half - i)


@part
def _rotary_tokens(
    chunk: Any,
    chunks: Any,
    worker: Any,
    element: Any,
    normed: Any,
    interleaved: Any,
    qkv: Any,
    q_norm: Any,
    k_norm: Any,
    cos_sin: Any,
    positions: Any,
    slots: Any,
    k_pool: Any,
    v_pool: Any,
    q: Any,
    work: Any,
    tokens: Any,
    heads: Any,
    kv_heads: Any,
    dim: Any,
    rotated: Any,
    page_size: Any,
    eps: Any,
) -> None:
    """``normed`` and ``interleaved`` are markers, ``None`` for no: what a model does not do is not compiled for it."""
    number = np.float32(0.0)
    source, angles, queries = pointer(qkv, element), pointer(cos_sin, number), pointer(q, number)
    line = pointer(work + worker * (dim + _PAD) * 4, number)
    for i in range(tokens * chunk // chunks, tokens * (chunk + 1) // chunks):
        angle = np.int64(pointer(positions, np.int32(0))[i]) * rotated
        slot = pointer(slots, np.int64(0))[i]
        begin = i * (heads + 2 * kv_heads) * dim
        for head in range(heads + kv_heads):
            _take(source, begin + head * dim, dim, line)
            if normed is not None:
                norm = q_norm if head < heads else k_norm
                if norm != 0:
                    _norm_head(line, dim, pointer(norm, element), eps)
            _rotate(line, angles, angle, rotated, interleaved)
            if head < heads:
                for d in range(0, dim, LANES):
                    store_part(queries, (i * heads + head) * dim + d, load_part(line, d, dim - d), dim - d)
            else:
                put_key(pointer(k_pool, element), slot, head - heads, kv_heads, dim, page_size, line, 0)
        for head in range(kv_heads):
            value = begin + (heads + kv_heads + head) * dim
            put_value(pointer(v_pool, element), slot, head, kv_heads, dim, page_size, source, value)


@kernel
def _rotary(
    element: Any,
    normed: Any,
    interleaved: Any,
    qkv: Any,
    q_norm: Any,
    k_norm: Any,
    cos_sin: Any,
    positions: Any,
    slots: Any,
    k_pool: Any,
    v_pool: Any,
    q: Any,
    work: Any,
    tokens: Any,
    heads: Any,
    kv_heads: Any,
    dim: Any,
    rotated: Any,
    page_size: Any,
    eps: Any,
    fork: Any,
    threads: Any,
) -> None:
    markers = (element, normed, interleaved)
    addresses = (qkv, q_norm, k_norm, cos_sin, positions, slots, k_pool, v_pool, q, work)
    sizes = (tokens, heads, kv_heads, dim, rotated, page_size, eps)
    parallel(_rotary_tokens, fork, threads, 4 * threads, markers + addresses + sizes)


def rotary_store(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: StepLayout,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    heads: int,
    kv_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> torch.Tensor:
    """Split a projection, rotate queries and keys, write keys and values to the pool. Compute thread only.

    Args:
        qkv: ``[N, (heads + 2 * kv_heads) * head_dim]``: queries, keys, values; in the pool's type.
        cos_sin: float32 ``[max_len, rotated]``: cosines of the ``rotated / 2`` angles, then sines.
            ``rotated`` is the head size, or less to leave the dimensions behind it as they are.
        layout: Positions and slots of the N tokens.
        k_pool: ``[pages, kv_heads, head_dim, page_size]``, written.
        v_pool: ``[pages, kv_heads, page_size, head_dim]``, written.
        heads, kv_heads: How many of each.
        q_norm, k_norm: Weights ``[head_dim]`` of a root-mean-square norm per head before the
            rotation (Qwen3), in the pool's type; ``None`` for no norm.
        eps: Of these norms.
        interleaved: Pairs are neighbours (GPT-J) instead of half the rotated size apart (Llama).

    Returns:
        Queries, float32 ``[N, heads, head_dim]``, ready for :func:`paged_attention`.
    """
    kind = element(qkv, k_pool, v_pool)
    tokens, columns = qkv.shape
    dim = columns // (heads + 2 * kv_heads)
    rotated = cos_sin.shape[1]
    if columns != (heads + 2 * kv_heads) * dim or tokens != layout.tokens:
        raise misfit(f"qkv {tuple(qkv.shape)} for {heads} + 2 × {kv_heads} heads and {layout.tokens} tokens")
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or rotated > dim or rotated % 2:
        raise misfit(f"cos_sin {tuple(cos_sin.shape)} of {cos_sin.dtype} for heads of {dim}; it must be contiguous float32")
    if layout.end > len(cos_sin):
        raise misfit(f"position {layout.end - 1} has no row in cos_sin {tuple(cos_sin.shape)}")
    check_pools(k_pool, v_pool, layout, kv_heads, dim)
    norms = (_norm_address(q_norm, qkv, dim), _norm_address(k_norm, qkv, dim))
    fork, threads = team(qkv.numel(), _LEAST)
    q = torch.empty((tokens, heads, dim), dtype=torch.float32)
    work = torch.empty(threads * (dim + _PAD), dtype=torch.float32)
    at = layout.addresses
    pools = (k_pool.data_ptr(), v_pool.data_ptr())
    addresses = (qkv.data_ptr(), *norms, cos_sin.data_ptr(), at.positions, at.slots, *pools, q.data_ptr(), work.data_ptr())
    markers = (kind, None if q_norm is None and k_norm is None else True, True if interleaved else None)
    _rotary(*markers, *addresses, tokens, heads, kv_heads, dim, rotated, layout.page_size, eps, fork, threads)
    return q


def _norm_address(weight: torch.Tensor | None, qkv: torch.Tensor, dim: int) -> int:
    if weight is None:
        return 0
    element(qkv, weight)
    if weight.shape != (dim,):
        raise misfit(f"norm weight {tuple(weight.shape)} for heads of {dim}")
    return weight.data_ptr()
