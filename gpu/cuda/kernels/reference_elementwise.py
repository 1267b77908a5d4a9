"""The elementwise kernels in plain torch: their definition, and what the tests compare them with.

Same signatures and shapes, float32 arithmetic, results rounded once. Any device.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """See ``norm.rms_norm``."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + offset)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    """See ``norm.add_rms_norm``."""
    residual += x
    return rms_norm(residual, weight, eps, offset=offset)


def head_rms_norm(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int, kv_heads: int, eps: float
) -> None:
    """See ``norm.head_rms_norm``."""
    split = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    for weight, own in ((q_weight, split[:, :heads]), (k_weight, split[:, heads : heads + kv_heads])):
        own.copy_(rms_norm(own, weight, eps))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``activation.silu_mul``."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
