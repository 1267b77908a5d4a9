"""The product of one row: equal to float32 arithmetic, within its memory, the same on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from asyncsched.gpu.kernels import matvec
from asyncsched.gpu.kernels.matvec import can_multiply_row, multiply_row

from .kernels_helpers import close, guarded


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).bfloat16()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("least", [0, 1 << 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (32, 128), (144, 64), (272, 576), (48, 1536)])
def test_products(outputs: int, inputs: int, least: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matvec, "_LEAST", least)
    # Positive and of one size: no sum is so small beside its parts that float32 could not tell it.
    x, weight = random(1, inputs).abs(), random(outputs, inputs).abs()
    bias = random(outputs) if biased else None
    found = multiply_row(x, weight, bias)
    assert found.shape == (1, outputs)
    close(found, exact(x, weight, bias))


def test_every_weight_counts_once() -> None:
    # Sums of small integers are exact: a weight that is skipped, or read twice, is seen in its output.
    x = torch.full((1, 128), 2.0).bfloat16()
    weight = torch.zeros(32, 128).bfloat16()
    for output in range(32):
        weight[output, 4 * output + output % 4] = output + 1.0
        weight[output, 127 - output] += 64.0
    bias = torch.arange(32).bfloat16()
    wanted = 2.0 * (torch.arange(1, 33) + 64.0) + torch.arange(32)
    assert torch.equal(multiply_row(x, weight, bias)[0], wanted.bfloat16())


def test_it_reads_and_writes_nothing_else() -> None:
    x, weight, bias = random(1, 192), random(48, 192), random(48)
    close(multiply_row(guarded(x), guarded(weight), guarded(bias)), multiply_row(x, weight, bias))


def test_the_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matvec, "_LEAST", 0)
    x, weight = random(1, 576), random(400, 576)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(multiply_row(x, weight))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_it_is_rounded_to_the_nearest() -> None:
    x = torch.zeros(1, 64).bfloat16()
    x[0, :3] = torch.tensor([256.0, 1.0, 1.0])
    weight = torch.zeros(16, 64).bfloat16()
    weight[:, 0] = 1.0
    weight[1, 1] = 1.0  # 257: in the middle of 256 and 258
    weight[2, 1:3] = 1.0
    weight[3, 1:3] = torch.tensor([2.0, 1.0])  # 259: in the middle of 258 and 260
    assert multiply_row(x, weight)[0, :4].tolist() == [256.0, 256.0, 258.0, 260.0]


def test_nan_and_infinity_stay_in_their_outputs() -> None:
    x, weight = random(1, 64).abs() + 1, random(32, 64).abs() + 1
    weight[3, 5], weight[17, 63] = torch.nan, torch.inf
    found = multiply_row(x, weight)[0]
    assert found.isnan().nonzero().tolist() == [[3]]
    assert found.isinf().nonzero().tolist() == [[17]]


@pytest.mark.parametrize(
    ("weight", "accepted"),
    [
        (random(16, 64), True),
        (random(17, 64), False),
        (random(16, 96), False),
        (random(16, 64).float(), False),
        (random(64, 16).T, False),
        (torch.empty(16, 64, dtype=torch.bfloat16, device="meta"), False),
    ],
)
def test_matrices_that_do_not_fit(weight: Tensor, accepted: bool) -> None:
    assert can_multiply_row(weight) is accepted
    if not accepted:
        with pytest.raises(ValueError, match="do not fit"):
            multiply_row(random(1, weight.shape[1]), weight)


def test_other_shapes_are_refused() -> None:
    weight = random(16, 64)
    for x, bias in [(random(2, 64), None), (random(1, 128), None), (random(64), None), (random(1, 64), random(17))]:
        with pytest.raises(ValueError, match="do not fit"):
            multiply_row(x, weight, bias)
    with pytest.raises(ValueError, match="together"):
        multiply_row(random(1, 64).float(), weight)
    with pytest.raises(ValueError, match="strides"):
        multiply_row(random(1, 128)[:, ::2], weight)
