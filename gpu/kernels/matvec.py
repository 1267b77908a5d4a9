"""One row times a weight matrix, which takes as long as the weights take to come from memory.

What counts is that each thread reads one long ascending stream, which the hardware fetches ahead: rows of the
matrix are taken one after the other, each from front to back. Two or more side by side halve the bandwidth.

Every output is summed in float32, in an order that depends on nothing but the number of inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ._jit import intrinsic, kernel, part, types
from .lanemath import add, splat, total
from .simd import I32, LANES, ir_fma, ir_load, lanes, load, pointer, store
from .tensors import element, misfit
from .threads import parallel, team

_CHAINS = 4  # of fused multiply-adds side by side, so that none waits for its predecessor
_STEP = _CHAINS * LANES
_LEAST = 1 << 20  # weights: fewer are read by the time another thread has been woken, if it slept


@intrinsic
def _multiply_add(typingctx: Any, sums: Any, weight: Any, at: Any, x: Any, begin: Any) -> Any:
    """Add the products of the next vectors of a weight row and of ``x``, each to a chain of its own."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result, weight, at, x, begin = args
        for chain in range(sums.count):
            step = at.type(chain * LANES)
            factor = ir_load(builder, builder.gep(weight, [builder.add(at, step)]))
            value = ir_load(builder, builder.gep(x, [builder.add(begin, step)]))
            added = ir_fma(builder, factor, value, builder.extract_value(result, chain))
            result = builder.insert_value(result, added, chain)
        return result

    return sums(sums, weight, at, x, begin), codegen


@intrinsic
def _with_lane(typingctx: Any, value: Any, lane: Any, scalar: Any) -> Any:
    """``value`` with the float32 ``scalar`` in one lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.insert_element(args[0], args[2], builder.trunc(args[1], I32))

    return lanes(lanes, types.int64, types.float32), codegen


@part
def _multiply_blocks(
    chunk: Any,
    chunks: Any,
    worker: Any,
    element: Any,
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    inputs: Any,
    blocks: Any,
) -> None:
    """A block is 16 outputs: a vector to store."""
    source, matrix, target = pointer(x, element), pointer(weight, element), pointer(out, element)
    zero = splat(np.float32(0.0))
    for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
        first = block * LANES
        result = zero
        for lane in range(LANES):
            sums = (zero, zero, zero, zero)
            for j in range(0, inputs, _STEP):
                sums = _multiply_add(sums, matrix, (first + lane) * inputs + j, source, j)
            result = _with_lane(result, lane, total(add(add(sums[0], sums[1]), add(sums[2], sums[3]))))
        if bias != 0:
            result = add(result, load(pointer(bias, element), first))
        store(target, first, result)


@kernel
def _multiply(
    element: Any, x: Any, weight: Any, bias: Any, out: Any, inputs: Any, blocks: Any, fork: Any, threads: Any
) -> None:
    parallel(_multiply_blocks, fork, threads, 4 * threads, (element, x, weight, bias, out, inputs, blocks))


def can_multiply_row(weight: torch.Tensor) -> bool:
    """Whether :func:`multiply_row` takes this matrix. Any thread."""
    outputs, inputs = weight.shape
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and not (outputs % LANES or inputs % _STEP)
    )


def multiply_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``. Compute thread only.

    Args:
        x: ``[1, inputs]``, bfloat16.
        weight: ``[outputs, inputs]``, one that :func:`can_multiply_row`.
        bias: ``[outputs]``, same type.

    Returns:
        ``[1, outputs]``, computed in float32 and rounded once.

    Raises:
        ValueError: the shapes do not fit, or a tensor is not contiguous.
    """
    outputs, inputs = weight.shape
    if not can_multiply_row(weight) or x.shape != (1, inputs) or (bias is not None and bias.shape != (outputs,)):
        offsets = "" if bias is None else f", bias {tuple(bias.shape)}"
        raise misfit(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} of {weight.dtype}{offsets}")
    kind = element(x, weight) if bias is None else element(x, weight, bias)
    out = x.new_empty((1, outputs))
    addresses = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
    _multiply(kind, *addresses, inputs, outputs // LANES, *team(outputs * inputs, _LEAST))
    return out
