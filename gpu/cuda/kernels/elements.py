"""What the launchers of elementwise kernels check: kernels check nothing."""

from __future__ import annotations

import torch

from ....errors import UnsupportedModelError

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_rows(name: str, x: torch.Tensor, width: int | None = None) -> None:
    """``x`` must be a matrix of a type the kernels compute, whose rows are contiguous, of ``width`` elements if given.

    Raises:
        UnsupportedModelError: the data type is another.
        ValueError: it is not such a matrix.
    """
    if x.dtype not in _TYPES:
        raise UnsupportedModelError(
            f"the CUDA kernels compute bfloat16, float16 and float32, not {x.dtype}; choose another dtype"
        )
    if x.ndim != 2 or (x.stride(1) != 1 and x.shape[1] != 1) or x.shape[1] != (width or x.shape[1]):
        shape = f"[n, {width or 'any'}]"
        raise ValueError(f"{name} {tuple(x.shape)} of strides {x.stride()} must be {shape} with contiguous rows")


def check_vector(name: str, x: torch.Tensor, length: int) -> None:
    """``x`` must be a contiguous vector of a type the kernels compute.

    Raises:
        UnsupportedModelError: the data type is another.
        ValueError: it is not such a vector.
    """
    if x.shape != (length,):
        raise ValueError(f"{name} {tuple(x.shape)} must be a vector of {length}")
    check_rows(name, x[None])


def output(out: torch.Tensor | None, like: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """The tensor a kernel writes: ``out``, checked, or a new one.

    Raises:
        ValueError: ``out`` has another shape or type, or is not contiguous.
    """
    if out is None:
        return like.new_empty((rows, width))
    if out.shape != (rows, width) or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} must be contiguous [{rows}, {width}] {like.dtype}")
    return out
