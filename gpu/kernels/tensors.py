"""What a kernel's Python side checks before it hands addresses to compiled code."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import UnsupportedModelError

ELEMENTS: dict[torch.dtype, np.uint16 | np.float32] = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}


def element(first: torch.Tensor, *others: torch.Tensor) -> np.uint16 | np.float32:
    """The scalar that tells a kernel how the tensors are stored: bfloat16 travels as its 16 bits.

    Raises:
        UnsupportedModelError: the data type is neither bfloat16 nor float32.
        ValueError: the tensors differ in type, or one is not contiguous.
    """
    found = ELEMENTS.get(first.dtype)
    if found is None:
        raise UnsupportedModelError(f"the CPU kernels compute bfloat16 and float32, not {first.dtype}; choose another dtype")
    if not first.is_contiguous():
        raise ValueError(f"a kernel got a tensor of strides {first.stride()}; call contiguous() first")
    for other in others:
        if other.dtype != first.dtype:
            raise ValueError(f"a kernel got {first.dtype} and {other.dtype} together; convert one of them")
        if not other.is_contiguous():
            raise ValueError(f"a kernel got a tensor of strides {other.stride()}; call contiguous() first")
    return found


def misfit(what: str) -> ValueError:
    """The error for shapes that do not belong together: compiled code checks nothing."""
    return ValueError(f"tensor shapes do not fit: {what}")
