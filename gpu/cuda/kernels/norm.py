"""Root-mean-square layer norm (Zhang and Sennrich, arXiv:1910.07467), with the residual sum, and of single heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....errors import UnsupportedModelError
from .elements import check_rows, check_vector, output

_WIDEST = 1 << 16
_HEAD_TILE = 2048


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    residual: tl.tensor,
    residual_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * residual_stride + column
        summed = (tl.load(at, mask=inside, other=0.0).to(tl.float32) + value).to(residual.dtype.element_ty)
        tl.store(at, summed, mask=inside)
        value = summed.to(tl.float32)  # the norm sees the sum as it was stored
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row * width + column, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _head_norm_kernel(
    qkv: tl.tensor,
    stride: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS + KV_HEADS) & (dim < HEAD_DIM)
    at = qkv + tl.program_id(0).to(tl.int64) * stride + head * HEAD_DIM + dim
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / HEAD_DIM + eps)
    own = dim < HEAD_DIM
    q_factor = tl.load(q_weight + dim, mask=own, other=0.0).to(tl.float32)
    k_factor = tl.load(k_weight + dim, mask=own, other=0.0).to(tl.float32)
    value = value * scale[:, None] * tl.where(head < HEADS, q_factor, k_factor)
    tl.store(at, value.to(qkv.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * (weight + offset)`` over the last dimension. Compute thread only.

    Args:
        x: ``[N, H]``, float32, bfloat16 or float16; rows may be apart.
        weight: ``[H]``, any of these types.
        eps: Added to the mean square.
        offset: Added to the weight (1 for Gemma).
        out: Where to write, ``[N, H]`` contiguous, ``x`` itself if it is contiguous; new if left out.

    Returns:
        ``[N, H]``, computed in float32 and rounded once.

    Raises:
        UnsupportedModelError: another type, or rows of more than 65,536 elements.
        ValueError: shapes do not fit.
    """
    return _norm(x, None, weight, eps, offset, out)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add a block's output to the residual stream, in place, and norm the sum. Compute thread only.

    Args:
        x: ``[N, H]``, float32, bfloat16 or float16; rows may be apart.
        residual: ``[N, H]``, same type; becomes ``residual + x``, rounded before it is normed.
        weight, eps, offset, out: See ``rms_norm``.

    Returns:
        The normed sum, ``[N, H]``.

    Raises:
        UnsupportedModelError, ValueError: see ``rms_norm``.
    """
    return _norm(x, residual, weight, eps, offset, out)


def head_rms_norm(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int, kv_heads: int, eps: float
) -> None:
    """RMS norm of every query and key head on its own, in place (as in Qwen3). Compute thread only.

    Args:
        qkv: ``[N, (heads + 2 * kv_heads) * head_dim]``, float32, bfloat16 or float16; values are left alone.
        q_weight, k_weight: ``[head_dim]``.
        heads, kv_heads: Query heads and key heads.
        eps: Added to the mean square.

    Raises:
        UnsupportedModelError, ValueError: see ``rms_norm``.
    """
    head_dim = q_weight.numel()
    check_rows("qkv", qkv, (heads + 2 * kv_heads) * head_dim)
    check_vector("q_weight", q_weight, head_dim)
    check_vector("k_weight", k_weight, head_dim)
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(max(1, _HEAD_TILE // block_d), triton.next_power_of_2(heads + kv_heads))
    if qkv.shape[0]:
        grid = (qkv.shape[0], triton.cdiv(heads + kv_heads, block_h))
        shape = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_H": block_h, "BLOCK_D": block_d}
        _head_norm_kernel[grid](qkv, qkv.stride(0), q_weight, k_weight, eps, **shape, num_warps=4)


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float, out: torch.Tensor | None
) -> torch.Tensor:
    check_rows("x", x)
    rows, width = x.shape
    check_vector("weight", weight, width)
    target = output(out, x, rows, width)
    if width > _WIDEST:
        raise UnsupportedModelError(f"the norm takes rows of up to {_WIDEST:,} elements, not {width:,}")
    summed = x if residual is None else residual
    check_rows("residual", summed, width)
    if summed.dtype != x.dtype or summed.shape[0] != rows:
        raise ValueError(f"residual {tuple(summed.shape)} {summed.dtype} must be as x, {tuple(x.shape)} {x.dtype}")
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(16, max(1, block // 256))
        strides = (summed, summed.stride(0))
        shape = {"ADD": residual is not None, "BLOCK": block}
        _norm_kernel[(rows,)](x, x.stride(0), *strides, weight, target, width, eps, offset, **shape, num_warps=warps)
    return target
