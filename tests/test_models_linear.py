"""Packed products equal plain ones, and are only used where they do."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from asyncsched.gpu import linear
from asyncsched.gpu.linear import Linear


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (1, 8), (33, 17), (1000, 48)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    weight = random(outputs, inputs, dtype=dtype)
    bias = random(outputs, dtype=dtype) if biased else None
    product = Linear(weight, bias)
    assert (product.outputs, product.inputs) == (outputs, inputs)
    for count in (1, 2, 7, 64, 130):
        x = random(count, inputs, dtype=dtype)
        exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5
        y = product(x)
        assert y.dtype is dtype
        assert float((y.double() - exact).abs().max()) <= tolerance * float(exact.abs().max().clamp_min(1.0))


def test_a_sick_row_stays_alone() -> None:
    product = Linear(random(64, 32))
    x = random(5, 32)
    healthy = product(x)
    x[2, 7] = float("nan")
    sick = product(x)
    assert sick[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(sick[others], healthy[others])


def test_float32_is_never_packed() -> None:
    assert not Linear(random(8, 8, dtype=torch.float32)).packed


def test_weights_with_nan_can_still_be_loaded() -> None:
    weight = random(64, 32)
    weight[3, 3] = float("nan")
    y = Linear(weight)(random(2, 32))
    assert y[:, 3].isnan().all()
    assert y.isnan().sum() == 2


def test_a_wrong_product_falls_back_to_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(64, 32)
    monkeypatch.setattr(linear, "_can_pack", lambda: True)
    monkeypatch.setattr(linear, "_multiply", lambda x, packed, bias: functional.linear(x, weight, bias) * 1.2)
    product = Linear(weight)
    x = random(3, 32)
    assert not product.packed
    assert torch.equal(product(x), functional.linear(x, weight))


def test_a_build_without_the_operators_uses_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_can_pack", lambda: False)
    assert not Linear(random(64, 32)).packed
    monkeypatch.undo()

    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("no bf16 on this machine")

    monkeypatch.setattr(linear, "_multiply", refuse)
    assert not Linear(random(64, 32)).packed
