"""What kernels found and what was to be found, worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .records import Record

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative and absolute: a few roundings of the type; float32 is also what three products of halves leave of it."""
_EXCESS = 1e9  # for NaN where there should be a number, or the reverse: JSON has no infinity


@dataclass(slots=True)
class Worst:
    """The largest errors of one kernel.

    Attributes:
        share: As a share of the tolerance.
        absolute: The largest difference of two numbers.
        at: The shape with the largest share.
        shapes: How many were compared.
        failures: Shapes whose launch raised, and what.
    """

    share: float = 0.0
    absolute: float = 0.0
    at: str = ""
    shapes: int = 0
    failures: dict[str, str] = field(default_factory=dict)


class Comparison:
    """Collects errors by kernel.

    Args:
        lost: See ``Device.lost``: with a lost device nothing can be compared any more.
    """

    def __init__(self, lost: Callable[[BaseException], BaseException | None]) -> None:
        self._lost = lost
        self._worst: dict[str, Worst] = {}

    @contextmanager
    def of(self, kernel: str, shape: str) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """Within, compare results of one launch; what it raises counts as a failure of this shape."""
        worst = self._worst.setdefault(kernel, Worst())
        worst.shapes += 1

        def compare(found: Tensor, wanted: Tensor) -> None:
            share, absolute = error(found, wanted)
            worst.absolute = max(worst.absolute, absolute)
            if share > worst.share or not worst.at:
                worst.share, worst.at = share, shape

        try:
            yield compare
        except Exception as failure:
            if self._lost(failure) is not None:
                raise
            worst.failures[shape] = f"{type(failure).__name__}: {failure}"[:2000]

    def records(self) -> Iterator[Record]:
        """One per kernel."""
        for kernel, worst in self._worst.items():
            details: dict[str, Any] = {"largest_error": worst.absolute, "at": worst.at, "shapes": worst.shapes}
            measured = _EXCESS if worst.failures else worst.share
            if worst.failures:
                details |= {"failures": worst.failures, "share_of_the_others": worst.share}
            yield Record("kernels", f"{kernel}, largest error ÷ tolerance", measured, 1, at_most=True, details=details)


def error(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Largest error as a share of the tolerance, and in numbers; integers must be equal."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} is not {tuple(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{found.dtype} is not {wanted.dtype}"
    if not found.numel():
        return 0.0, 0.0
    if not found.is_floating_point():
        return (0.0, 0.0) if torch.equal(found, wanted) else (_EXCESS, _EXCESS)
    tolerance = TOLERANCE[wanted.dtype]
    one, other = found.double(), wanted.double()
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=_EXCESS, posinf=_EXCESS)
    share = difference / (tolerance * (1.0 + other.abs().nan_to_num(nan=0.0, posinf=0.0)))
    return float(share.max()), float(difference.max())
