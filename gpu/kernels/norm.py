"""Root-mean-square layer norm (Zhang and Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ._jit import inlined, kernel
from .lanemath import add, fma, mul, splat, total
from .simd import LANES, load_part, pointer, store_part
from .tensors import element, require
from .threads import FORK, parallel, worth, workers


@inlined
def scale_of_rms(source: Any, begin: Any, width: Any, eps: Any) -> Any:
    """``1 / sqrt(mean(x²) + eps)`` of ``source[begin : begin + width]``, float32."""
    squares = splat(np.float32(0.0))
    for j in range(0, width, LANES):
        x = load_part(source, begin + j, width - j)
        squares = fma(x, x, squares)
    return np.float32(1.0) / np.sqrt(total(squares) / np.float32(width) + np.float32(eps))


@kernel
def _norm_rows(
    chunk: Any, chunks: Any, worker: Any, element: Any, x: Any, delta: Any, weight: Any, out: Any, rows: Any, width: Any, eps: Any, offset: Any
) -> None:
    """``out = norm(x)``; with ``delta``, first ``x += delta`` in place, rounded as stored."""
    source, change, factors, target = pointer(x, element), pointer(delta, element), pointer(weight, element), pointer(out, element)
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        begin = row * width
        if delta != 0:
            for j in range(0, width, LANES):
                value = add(load_part(source, begin + j, width - j), load_part(change, begin + j, width - j))
                store_part(source, begin + j, value, width - j)
        scale = splat(scale_of_rms(source, begin, width, eps))
        for j in range(0, width, LANES):
            value = mul(load_part(source, begin + j, width - j), scale)
            factor = add(load_part(factors, j, width - j), splat(np.float32(offset)))
            store_part(target, begin + j, mul(value, factor), width - j)
