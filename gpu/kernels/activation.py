"""Gated activations between the two halves of a feed-forward layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ._jit import kernel, part
from .lanemath import add, div, exp, mul, splat, sub
from .simd import LANES, load_part, pointer, store_part
from .tensors import element, misfit
from .threads import parallel, team

_LEAST = 1 << 14
_SLICE = 64 * LANES


@part
def _silu_mul_slices(
    chunk: Any, chunks: Any, worker: Any, element: Any, gate_up: Any, out: Any, width: Any, slices: Any, count: Any
) -> None:
    """One slice is up to 1,024 outputs of one row, so that a single wide row feeds several threads."""
    source, target = pointer(gate_up, element), pointer(out, element)
    for i in range(count * chunk // chunks, count * (chunk + 1) // chunks):
        row = i // slices
        begin = i % slices * _SLICE
        for j in range(begin, begin + _SLICE if begin + _SLICE < width else width, LANES):
            gate = load_part(source, 2 * row * width + j, width - j)
            up = load_part(source, (2 * row + 1) * width + j, width - j)
            decay = exp(sub(splat(np.float32(0.0)), gate))
            value = mul(div(gate, add(splat(np.float32(1.0)), decay)), up)
            store_part(target, row * width + j, value, width - j)


@kernel
def _silu_mul(element: Any, gate_up: Any, out: Any, rows: Any, width: Any, fork: Any, threads: Any) -> None:
    slices = (width + _SLICE - 1) // _SLICE
    count = rows * slices
    parallel(_silu_mul_slices, fork, threads, 4 * threads, (element, gate_up, out, width, slices, count))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` (SwiGLU: Shazeer, arXiv:2002.05202). Compute thread only.

    Args:
        gate_up: ``[N, 2 * I]``, gate first, bfloat16 or float32.

    Returns:
        ``[N, I]``, computed in float32 and rounded once.
    """
    kind = element(gate_up)
    rows, both = gate_up.shape
    if both % 2:
        raise misfit(f"gate_up {tuple(gate_up.shape)} must have an even number of columns")
    out = gate_up.new_empty((rows, both // 2))
    _silu_mul(kind, gate_up.data_ptr(), out.data_ptr(), rows, both // 2, *team(gate_up.numel(), _LEAST))
    return out
