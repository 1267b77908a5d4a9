"""Matrix products with constant weights, laid out once for the machine at hand."""

from __future__ import annotations

from functools import cache
from threading import Lock
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional

from .kernels.matvec import can_multiply_row, multiply_row
from .pool import available_memory

# One bf16 ulp is 2**-8; two orders of summation of the same product differ by a few of them.
_RELATIVE_TOLERANCE = 0.03

# Of the memory available to the process, for plain copies beside blocked weights.
_PLAIN_SHARE = 1 / 8


class Linear:
    """``y = x @ weight.T + bias`` for ``x [n, inputs]``, weight ``[outputs, inputs]``, bias ``[outputs]``.

    bfloat16 weights are reordered into oneDNN's blocked layout at construction where the build and
    the CPU can do it; the plain copy is then not kept. oneDNN otherwise repacks the weights on every
    call, which costs more than the product itself when ``n`` is small. The first product is compared
    with the plain one, and the plain form is kept if they disagree.

    A single row is multiplied with the plain bfloat16 weights (:func:`~.kernels.matvec.multiply_row`), which are kept
    beside the blocked ones for that as long as all such copies in the process take at most an eighth of the memory that
    was available when the first matrix was laid out.

    Args:
        weight: Constant from now on.
        bias: Likewise.
        shared: The caller keeps ``weight`` anyway, so a plain copy costs nothing.

    Attributes:
        inputs: Size of the last dimension of ``x``.
        outputs: Size of the last dimension of ``y``.
        packed: True if the blocked layout is in use.
        row_weight: The plain weights that a single row is multiplied with, if it is not done like several.
    """

    __slots__ = ("__weakref__", "_bias", "_weight", "inputs", "outputs", "packed", "row_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> None:
        self.outputs, self.inputs = weight.shape
        self._bias = bias
        self._weight = weight
        self.packed = False
        self.row_weight: Tensor | None = None
        if weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and _can_pack():
            packed = _pack(weight, bias)
            if packed is not None:
                self._weight = packed
                self.packed = True
        if can_multiply_row(weight) and (shared or not self.packed or _take_share(self, weight.nbytes)):
            self.row_weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x [n, inputs]``; returns ``[n, outputs]`` in the same dtype. Compute thread only."""
        if self.row_weight is not None and len(x) == 1:
            return multiply_row(x, self.row_weight, self._bias)
        if self.packed:
            return _multiply(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


_copies: WeakSet[Linear] = WeakSet()
_copies_lock = Lock()


@cache
def _copies_limit() -> int:
    """Bytes that plain copies may take; read once, because asking costs as much as packing a small matrix."""
    return int(_PLAIN_SHARE * available_memory())


def _take_share(linear: Linear, size: int) -> bool:
    """Whether ``linear`` may keep ``size`` bytes more; they count until it is dropped."""
    with _copies_lock:
        taken = sum(copy.inputs * copy.outputs * torch.bfloat16.itemsize for copy in _copies)
        if taken + size > _copies_limit():
            return False
        _copies.add(linear)
        return True


@cache
def _can_pack() -> bool:
    operators = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch does not annotate it
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
        and hasattr(operators, "_is_mkldnn_bf16_supported")
        and bool(operators._is_mkldnn_bf16_supported())
    )


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return product


def _pack(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The blocked weight, or ``None`` if this build cannot make it or multiplies wrongly with it."""
    probe = torch.linspace(-1.0, 1.0, 2 * weight.shape[1]).view(2, -1).to(weight.dtype)
    plain = functional.linear(probe, weight, bias).float()
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        product = _multiply(probe, packed, bias).float()
    except RuntimeError:
        return None
    # NaN weights are the checkpoint's business: they give NaN in both forms.
    bound = _RELATIVE_TOLERANCE * plain.nan_to_num().abs().max().clamp_min(1e-6)
    agrees = torch.isclose(product, plain, rtol=_RELATIVE_TOLERANCE, atol=float(bound), equal_nan=True)
    return packed if bool(agrees.all()) else None
