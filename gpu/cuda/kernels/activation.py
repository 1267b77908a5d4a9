"""Gated activations between the two halves of a feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elements import check_rows, output

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up: tl.tensor, stride: tl.tensor, out: tl.tensor, inner: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = gate_up + row * stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.abs(gate))  # at most 1, so that nothing overflows
    value = gate * tl.where(gate >= 0.0, 1.0, decay) / (1.0 + decay) * up
    tl.store(out + row * inner + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` (SwiGLU: Shazeer, arXiv:2002.05202). Compute thread only.

    Args:
        gate_up: ``[N, 2 * I]``, gate first, float32, bfloat16 or float16; rows may be apart.
        out: Where to write, ``[N, I]`` contiguous; new if left out.

    Returns:
        ``[N, I]``, computed in float32 and rounded once.

    Raises:
        UnsupportedModelError: another type.
        ValueError: shapes do not fit.
    """
    check_rows("gate_up", gate_up)
    rows, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must have an even number of columns")
    inner = both // 2
    target = output(out, gate_up, rows, inner)
    if rows and inner:
        block = min(_BLOCK, triton.next_power_of_2(inner))
        _silu_mul_kernel[(rows, triton.cdiv(inner, block))](gate_up, gate_up.stride(0), target, inner, BLOCK=block, num_warps=4)
    return target
