"""Norms and activations in Triton against their definitions in torch."""

from __future__ import annotations

import pytest
import torch

from asyncsched.errors import UnsupportedModelError
from asyncsched.gpu.cuda.kernels import reference_elementwise as reference
from asyncsched.gpu.cuda.kernels.activation import silu_mul
from asyncsched.gpu.cuda.kernels.norm import add_rms_norm, head_rms_norm, rms_norm

from . import triton_launches
from .triton_helpers import DEVICE, compile_for, needs_no_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 576), (4, 1000), (1, 5120)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last place, where a different order of summation may round another way."""
    assert actual.dtype == expected.dtype
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    before = x.clone()
    close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    close(rms_norm(x, weight, 1e-2, offset=1.0), reference.rms_norm(x, weight, 1e-2, offset=1.0))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_updates_the_residual_in_place(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    residual = random(*shape, dtype=dtype, seed=2)
    expected_sum = residual.clone()
    expected = reference.add_rms_norm(x, expected_sum, weight, 1e-6)
    close(add_rms_norm(x, residual, weight, 1e-6), expected)
    assert torch.equal(residual, expected_sum)


def test_norm_into_the_input_and_from_rows_apart() -> None:
    x, weight = random(4, 96, dtype=torch.float32), random(64, dtype=torch.float32, seed=1)
    apart = x[:, 8:72]
    expected = reference.rms_norm(apart, weight, 1e-6)
    close(rms_norm(apart, weight, 1e-6), expected)
    packed = apart.contiguous()
    assert rms_norm(packed, weight, 1e-6, out=packed) is packed
    close(packed, expected)
    residual = random(4, 80, dtype=torch.float32, seed=2)
    outside = residual[:, 64:].clone()
    expected = reference.add_rms_norm(apart, residual[:, :64].clone(), weight, 1e-6)
    close(add_rms_norm(apart, residual[:, :64], weight, 1e-6), expected)
    assert torch.equal(residual[:, 64:], outside)


def test_weight_of_another_type() -> None:
    x, weight = random(3, 32, dtype=torch.bfloat16), random(32, dtype=torch.float32, seed=1)
    close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_norm_of_zeros_is_zero() -> None:
    x = torch.zeros(2, 33, device=DEVICE)
    assert not rms_norm(x, torch.ones(33, device=DEVICE), 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 80), (16, 8, 128), (2, 2, 256), (1, 1, 8)])
def test_head_rms_norm(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = random(3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    q_weight, k_weight = random(head_dim, dtype=dtype, seed=1), random(head_dim, dtype=dtype, seed=2)
    expected = qkv.clone()
    reference.head_rms_norm(expected, q_weight, k_weight, heads, kv_heads, 1e-6)
    values = qkv[:, (heads + kv_heads) * head_dim :].clone()
    head_rms_norm(qkv, q_weight, k_weight, heads, kv_heads, 1e-6)
    close(qkv, expected)
    assert torch.equal(qkv[:, (heads + kv_heads) * head_dim :], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (4, 2 * 576), (2, 2 * 1500)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random(*shape, dtype=dtype, scale=4.0)
    close(silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_mul_at_extremes_and_from_rows_apart() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0, 2.0, 3.0, 4.0, 5.0, 9.9]], device=DEVICE)[:, :10]
    close(silu_mul(gate_up), torch.tensor([[0.0, 0.0, 0.0, 360.0, 5e4]], device=DEVICE))


@pytest.mark.parametrize("width", [64, 0])
def test_no_tokens(width: int) -> None:
    empty = torch.zeros(0, 2 * width, device=DEVICE)
    assert silu_mul(empty).shape == (0, width)
    assert rms_norm(empty, torch.zeros(2 * width, device=DEVICE), 1e-6).shape == (0, 2 * width)


def test_arguments_are_checked() -> None:
    x, weight = torch.zeros(2, 8, device=DEVICE), torch.zeros(8, device=DEVICE)
    with pytest.raises(UnsupportedModelError, match=r"not torch\.float64"):
        rms_norm(x.double(), weight.double(), 1e-6)
    with pytest.raises(UnsupportedModelError, match="up to 65,536 elements"):
        rms_norm(torch.zeros(1, 70_000, device=DEVICE), torch.zeros(70_000, device=DEVICE), 1e-6)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, weight[:7], 1e-6)
    with pytest.raises(ValueError, match="contiguous rows"):
        rms_norm(x.T, weight[:2], 1e-6)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, x[:1], weight, 1e-6)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, x.bfloat16(), weight, 1e-6)
    with pytest.raises(ValueError, match="out"):
        rms_norm(x, weight, 1e-6, out=x.bfloat16())
    with pytest.raises(ValueError, match="even"):
        silu_mul(x[:, :7])
    with pytest.raises(ValueError, match="qkv"):
        head_rms_norm(x, weight, weight, 1, 1, 1e-6)


@needs_no_device
@pytest.mark.parametrize("capability", [80, 100])
def test_kernels_compile(capability: int) -> None:
    """These, those that sample, and the row state's."""
    names = {line.split()[0] for line in compile_for(triton_launches.__file__, capability)}
    sampling = {f"{each}_kernel" for each in ("scan", "adjust", "rescan", "cut", "race", "finish")}
    assert names == sampling | {"_norm_kernel", "_head_norm_kernel", "_silu_mul_kernel", "_scatter_kernel"}
