"""Norms, activation, rotary embedding and the pool's writes against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncsched.errors import UnsupportedModelError
from asyncsched.gpu.kernels import StepLayout, add_rms_norm, reference, rms_norm, rotary_store, silu_mul, store_kv

from .kernels_helpers import Scene, close, guarded

BF16, F32 = torch.bfloat16, torch.float32
both_types = pytest.mark.parametrize("dtype", [BF16, F32])
widths = pytest.mark.parametrize(("rows", "width"), [(1, 576), (130, 576), (3, 20), (2, 1), (5, 33), (0, 64)])


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Random numbers in memory that ends with them."""
    return guarded(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def angles(positions: int, rotated: int) -> Tensor:
    """Cosines and sines of a rotary embedding."""
    turn = torch.outer(torch.arange(positions), 10000.0 ** -(torch.arange(0, rotated, 2) / rotated))
    return guarded(torch.cat([turn.cos(), turn.sin()], -1))


@both_types
@widths
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, offset: float) -> None:
    x, weight = normal(rows, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    close(rms_norm(x, weight, 1e-5, offset=offset), reference.rms_norm(x, weight, 1e-5, offset=offset))


@both_types
@widths
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype, seed=1)
    weight = normal(width, dtype=dtype, seed=2)
    before = residual.clone()
    normed, summed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    assert torch.equal(residual, before)
    assert torch.equal(normed, rms_norm(summed, weight, 1e-5))


@both_types
@widths
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = normal(rows, 2 * width, dtype=dtype) * 20
    close(silu_mul(guarded(gate_up)), reference.silu_mul(gate_up))


def test_silu_mul_of_extremes() -> None:
    gate = torch.tensor([-1e30, -100.0, -88.0, -0.0, 0.0, 88.0, 1e30, torch.inf, torch.nan])
    found = silu_mul(torch.cat([gate, torch.ones_like(gate)]).view(1, -1))[0]
    wanted = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 88.0, 1e30, torch.inf, torch.nan])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-35, equal_nan=True)


def empty_pools(kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, pages: int = 9) -> tuple[Tensor, Tensor]:
    keys = torch.full((pages, kv_heads, dim, page_size), torch.nan, dtype=dtype)
    return guarded(keys), guarded(torch.full((pages, kv_heads, page_size, dim), torch.nan, dtype=dtype))


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal, NaN included: the pool's other slots must not be touched."""
    return torch.equal(found.nan_to_num(7.5), wanted.nan_to_num(7.5))


def three_segments(page_size: int) -> StepLayout:
    table = np.array([[8, 0, 3, 5], [2, 7, 1, 1], [4, 4, 4, 6]], np.int32)
    lengths, starts = np.array([2 * page_size, 1, 1]), np.array([page_size // 2, 2 * page_size - 1, 3 * page_size])
    return StepLayout.build(table, np.arange(3, dtype=np.int32), lengths, starts, page_size)


@both_types
@pytest.mark.parametrize(("dim", "page_size"), [(64, 32), (64, 1), (80, 16), (20, 4)])
def test_store_kv(dim: int, page_size: int, dtype: torch.dtype) -> None:
    layout = three_segments(page_size)
    k, v = normal(layout.tokens, 3, dim, dtype=dtype), normal(layout.tokens, 3, dim, dtype=dtype, seed=1)
    found, wanted = empty_pools(3, dim, page_size, dtype), empty_pools(3, dim, page_size, dtype)
    store_kv(k, v, layout, *found)
    reference.store_kv(k, v, layout, *wanted)
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])


@both_types
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "page_size", "rotated"), [(64, 32, 64), (80, 16, 80), (128, 16, 64), (20, 4, 20), (8, 1, 8)])
def test_rotary_store(dim: int, page_size: int, rotated: int, dtype: torch.dtype, interleaved: bool) -> None:
    layout = three_segments(page_size)
    qkv, cos_sin = normal(layout.tokens, 15 * dim, dtype=dtype), angles(layout.end, rotated)
    found, wanted = empty_pools(3, dim, page_size, dtype), empty_pools(3, dim, page_size, dtype)
    q = rotary_store(qkv, cos_sin, layout, *found, 9, 3, interleaved=interleaved)
    defined = reference.rotary_store(qkv, cos_sin, layout, *wanted, 9, 3, interleaved=interleaved)
    assert torch.equal(q, defined)
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])


@both_types
@pytest.mark.parametrize("norms", [(True, True), (True, False), (False, True)])
def test_rotary_store_with_norms(norms: tuple[bool, bool], dtype: torch.dtype) -> None:
    layout = three_segments(16)
    qkv, cos_sin = normal(layout.tokens, 15 * 64, dtype=dtype), angles(layout.end, 64)
    weights = [normal(64, dtype=dtype, seed=i) if use else None for i, use in enumerate(norms)]
    found, wanted = empty_pools(3, 64, 16, dtype), empty_pools(3, 64, 16, dtype)
    options = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
    q = rotary_store(qkv, cos_sin, layout, *found, 9, 3, **options)  # type: ignore[arg-type]
    close(q, reference.rotary_store(qkv, cos_sin, layout, *wanted, 9, 3, **options))  # type: ignore[arg-type]
    assert torch.equal(found[0].isnan(), wanted[0].isnan())
    close(found[0].nan_to_num(0.0), wanted[0].nan_to_num(0.0))
    assert same(found[1], wanted[1])


def test_a_row_does_not_notice_its_batch() -> None:
    """Bit for bit, alone and among enough others to be computed on several threads."""
    x, other, weight = normal(300, 576, dtype=BF16), normal(300, 576, dtype=BF16, seed=1), normal(576, dtype=BF16, seed=2)
    scene = Scene.build(9, 3, 64, 32, [300], BF16)
    qkv, cos_sin = normal(300, 15 * 64, dtype=BF16), angles(300, 64)
    pools = (scene.keys, scene.values)
    every = (
        rms_norm(x, weight, 1e-5),
        add_rms_norm(x, other, weight, 1e-5)[0],
        silu_mul(x),
        rotary_store(qkv, cos_sin, scene.layout([(300, 0)]), *pools, 9, 3, q_norm=weight[:64], k_norm=weight[:64]),
    )
    for i in (0, 7, 299):
        row = slice(i, i + 1)
        layout = scene.layout([(1, i)])
        alone = (
            rms_norm(x[row], weight, 1e-5),
            add_rms_norm(x[row], other[row], weight, 1e-5)[0],
            silu_mul(x[row]),
            rotary_store(qkv[row], cos_sin, layout, *pools, 9, 3, q_norm=weight[:64], k_norm=weight[:64]),
        )
        assert all(torch.equal(one[0], many[i]) for one, many in zip(alone, every, strict=True))


def test_refuses_what_it_cannot_compute() -> None:
    x, weight, layout = normal(4, 64), normal(64), three_segments(4)
    pools = empty_pools(3, 8, 4, F32)
    qkv, cos_sin = normal(layout.tokens, 15 * 8), angles(layout.end, 8)
    with pytest.raises(UnsupportedModelError, match="float16"):
        rms_norm(x.half(), weight.half(), 1e-5)
    with pytest.raises(ValueError, match="together"):
        rms_norm(x, weight.bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(x.T, weight[:4], 1e-5)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, weight[:32], 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, x[:2], weight, 1e-5)
    with pytest.raises(ValueError, match="even"):
        silu_mul(x[:, :63].contiguous())
    with pytest.raises(ValueError, match="tokens"):
        store_kv(x.view(4, 1, 64), x.view(4, 1, 64), layout, *pools)
    with pytest.raises(ValueError, match="of the pool"):
        rotary_store(qkv, cos_sin, layout, *empty_pools(3, 8, 8, F32), 9, 3)
    with pytest.raises(ValueError, match="has no row"):
        rotary_store(qkv, cos_sin[:-1], layout, *pools, 9, 3)
    with pytest.raises(ValueError, match="must be contiguous float32"):
        rotary_store(qkv, cos_sin.double(), layout, *pools, 9, 3)
    with pytest.raises(ValueError, match="norm weight"):
        rotary_store(qkv, cos_sin, layout, *pools, 9, 3, q_norm=weight)
