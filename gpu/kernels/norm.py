"""Root-mean-square layer norm (Zhang and Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ._jit import inlined, kernel, part
from .lanemath import add, fma, mul, splat, total
from .simd import LANES, load_part, pointer, store_part
from .tensors import element, misfit
from .threads import parallel, team

_LEAST = 1 << 15


@inlined
def scale_of_rms(source: Any, begin: Any, width: Any, eps: Any) -> Any:
    """``1 / sqrt(mean(x²) + eps)`` of ``source[begin : begin + width]``, float32."""
    squares = splat(np.float32(0.0))
    for j in range(0, width, LANES):
        x = load_part(source, begin + j, width - j)
        squares = fma(x, x, squares)
    return np.float32(1.0) / np.sqrt(total(squares) / np.float32(width) + np.float32(eps))


@part
def _norm_rows(
    chunk: Any,
    chunks: Any,
    worker: Any,
    element: Any,
    x: Any,
    residual: Any,
    weight: Any,
    summed: Any,
    out: Any,
    rows: Any,
    width: Any,
    eps: Any,
    offset: Any,
) -> None:
    source, factors, target = pointer(x, element), pointer(weight, element), pointer(out, element)
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        begin = row * width
        if residual != 0:
            other, result = pointer(residual, element), pointer(summed, element)
            for j in range(0, width, LANES):
                value = add(load_part(other, begin + j, width - j), load_part(source, begin + j, width - j))
                store_part(result, begin + j, value, width - j)
        # The norm sees the sum as it was stored, so that it does not depend on what a layer keeps in registers.
        input = pointer(summed, element) if residual != 0 else source
        scale = splat(scale_of_rms(input, begin, width, eps))
        for j in range(0, width, LANES):
            factor = add(load_part(factors, j, width - j), splat(np.float32(offset)))
            value = mul(mul(load_part(input, begin + j, width - j), scale), factor)
            store_part(target, begin + j, value, width - j)


@kernel
def _norm(
    element: Any,
    x: Any,
    residual: Any,
    weight: Any,
    summed: Any,
    out: Any,
    rows: Any,
    width: Any,
    eps: Any,
    offset: Any,
    fork: Any,
    threads: Any,
) -> None:
    arguments = (element, x, residual, weight, summed, out, rows, width, eps, offset)
    parallel(_norm_rows, fork, threads, 4 * threads, arguments)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * (weight + offset)`` over the last dimension. Compute thread only.

    Args:
        x: ``[N, H]``, bfloat16 or float32.
        weight: ``[H]``, same type.
        eps: Added to the mean square.
        offset: Added to the weight (1 for Gemma).

    Returns:
        ``[N, H]``, computed in float32 and rounded once.
    """
    kind = element(x, weight)
    width = x.shape[-1]
    if weight.shape != (width,):
        raise misfit(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    out = torch.empty_like(x)
    size = x.numel()
    work = team(size, _LEAST)
    _norm(kind, x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), size // width, width, eps, offset, *work)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a block's output to the residual stream and norm the sum. Compute thread only.

    Args:
        x: ``[N, H]``, bfloat16 or float32.
        residual: ``[N, H]``, same type.
        weight: ``[H]``, same type.
        eps: Added to the mean square.

    Returns:
        The normed sum and the sum itself, both ``[N, H]``; the sum is rounded before it is normed.
    """
    kind = element(x, residual, weight)
    width = x.shape[-1]
    if weight.shape != (width,) or x.shape != residual.shape:
        raise misfit(f"x {tuple(x.shape)}, residual {tuple(residual.shape)}, weight {tuple(weight.shape)}")
    out, summed = torch.empty_like(x), torch.empty_like(x)
    size = x.numel()
    addresses = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), summed.data_ptr(), out.data_ptr())
    _norm(kind, *addresses, size // width, width, eps, 0.0, *team(size, _LEAST))
    return out, summed
