"""Matrix products with constant weights, laid out once for the machine at hand."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

# One bf16 ulp is 2**-8; two orders of summation of the same product differ by a few of them.
_RELATIVE_TOLERANCE = 0.03


class Linear:
    """``y = x @ weight.T + bias`` for ``x [n, inputs]``, weight ``[outputs, inputs]``, bias ``[outputs]``.

    bfloat16 weights are reordered into oneDNN's blocked layout at construction where the build and
    the CPU can do it; the plain copy is then not kept. oneDNN otherwise repacks the weights on every
    call, which costs more than the product itself when ``n`` is small. The first product is compared
    with the plain one, and the plain form is kept if they disagree.

    Attributes:
        inputs: Size of the last dimension of ``x``.
        outputs: Size of the last dimension of ``y``.
        packed: True if the blocked layout is in use.
    """

    __slots__ = ("_bias", "_weight", "inputs", "outputs", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._bias = bias
        self._weight = weight
        self.packed = False
        if weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and _can_pack():
            packed = _pack(weight, bias)
            if packed is not None:
                self._weight = packed
                self.packed = True

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x [n, inputs]``; returns ``[n, outputs]`` in the same dtype. Compute thread only."""
        if self.packed:
            return _multiply(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


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
