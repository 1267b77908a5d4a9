"""A single row is multiplied with the plain weights, while copies of them take little of the memory."""

from __future__ import annotations

from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from asyncsched.gpu import linear
from asyncsched.gpu.linear import Linear
from asyncsched.gpu.models import decoder
from asyncsched.gpu.models.decoder import Decoder
from asyncsched.gpu.models.decoder_config import DecoderConfig

from .models_helpers import TINY, ModuleWeights, tiny_transformer

SIZE = 64 * 128 * 2
"""Bytes of the matrices below."""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocked weights on whatever machine this is: their product stands out, as its outputs are all ones."""
    monkeypatch.setattr(linear, "_can_pack", lambda: True)
    monkeypatch.setattr(linear, "_pack", lambda weight, bias: weight)
    monkeypatch.setattr(linear, "_multiply", lambda x, packed, bias: x.new_ones(len(x), len(packed)))


@pytest.fixture(autouse=True)
def no_copies_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_copies", WeakSet())


def allow(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(linear, "_copies_limit", lambda: size)


def keeps(product: Linear) -> bool:
    return product.row_weight is not None


@pytest.mark.usefixtures("blocked")
def test_one_row_is_multiplied_with_the_plain_weights_and_several_with_the_blocked_ones() -> None:
    weight, bias = random(64, 128), random(64)
    product = Linear(weight, bias)
    assert product.packed
    for count in (0, 2, 3, 64):
        assert torch.equal(product(random(count, 128)), torch.ones(count, 64).bfloat16())
    x = random(1, 128)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(product(x).double(), exact, rtol=2**-7, atol=0.01)


@pytest.mark.usefixtures("blocked")
def test_copies_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 2 * SIZE)
    products = [Linear(random(64, 128)) for _ in range(3)]
    assert [keeps(product) for product in products] == [True, True, False]
    assert torch.equal(products[2](random(1, 128)), torch.ones(1, 64).bfloat16())
    assert not keeps(Linear(random(16, 64)))  # not even one that is smaller: nothing is left
    del products[0]
    assert keeps(Linear(random(64, 128)))


@pytest.mark.usefixtures("blocked")
def test_weights_that_the_caller_keeps_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, SIZE)
    weight = random(1024, 128)
    head = Linear(weight, shared=True)
    assert head.row_weight is weight
    assert keeps(Linear(random(64, 128)))  # the share is untouched


def test_plain_weights_are_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_can_pack", lambda: False)
    allow(monkeypatch, 0)
    product = Linear(random(64, 128))
    assert not product.packed
    assert keeps(product)


@pytest.mark.usefixtures("blocked")
def test_shapes_and_types_that_the_row_product_does_not_take() -> None:
    for weight in (random(64, 100), random(63, 128), random(64, 128).float()):
        assert not keeps(Linear(weight, shared=True))


def test_the_limit_is_an_eighth_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "available_memory", lambda: 8_000)
    linear._copies_limit.cache_clear()
    try:
        assert linear._copies_limit() == 1_000
    finally:
        linear._copies_limit.cache_clear()


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_head_of_tied_embeddings_is_shared(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def noting(weight: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> Linear:
        found.append(shared)
        return Linear(weight, bias, shared=shared)

    monkeypatch.setattr(decoder, "Linear", noting)
    weights = ModuleWeights(tiny_transformer("llama", **TINY, tie_word_embeddings=tied))
    Decoder(DecoderConfig.from_hf(weights.config), weights)
    assert found == [False] * (4 * TINY["num_hidden_layers"]) + [tied]
