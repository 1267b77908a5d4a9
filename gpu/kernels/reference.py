"""Every kernel in plain torch: their definition, and what the tests compare them with.

Same signatures and shapes as the kernels, float32 arithmetic, results rounded once. Slow; any
device that torch computes on.
"""

from __future__ import annotations

import torch

from .layout import StepLayout


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """See :func:`asyncsched.gpu.kernels.rms_norm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + offset)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`asyncsched.gpu.kernels.add_rms_norm`."""
    summed = residual + x
    return rms_norm(summed, weight, eps), summed


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See :func:`asyncsched.gpu.kernels.silu_mul`."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def store_kv(k: torch.Tensor, v: torch.Tensor, layout: StepLayout, k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    """See :func:`asyncsched.gpu.kernels.store_kv`."""
    slots = torch.from_numpy(layout.slots)
    page, offset = slots // layout.page_size, slots % layout.page_size
    k_pool[page, :, :, offset] = k
    v_pool[page, :, offset] = v


def rotary_store(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: StepLayout,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    heads: int,
    kv_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> torch.Tensor:
    """See :func:`asyncsched.gpu.kernels.rotary_store`."""
    split = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    q, k = q.float(), k.float()
    if q_norm is not None:
        q = rms_norm(q, q_norm.float(), eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm.float(), eps)
    cos, sin = cos_sin[torch.from_numpy(layout.positions)].unsqueeze(1).chunk(2, -1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., : cos_sin.shape[1]], x[..., cos_sin.shape[1] :]
        a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
        pair = (a * cos - b * sin, b * cos + a * sin)
        return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], -1)

    store_kv(rotate(k).to(k_pool.dtype), v, layout, k_pool, v_pool)
    return rotate(q)


def paged_attention(
    q: torch.Tensor,
    layout: StepLayout,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See :func:`asyncsched.gpu.kernels.paged_attention`."""
    group = q.shape[1] // k_pool.shape[1]
    out = torch.empty_like(q)
    for row, first, length, start in zip(layout.seg_row, layout.seg_first, layout.seg_len, layout.seg_start, strict=True):
        end = start + length
        pages = torch.from_numpy(layout.table[row, : -(-end // layout.page_size)].astype("int64"))
        keys = k_pool[pages].float().permute(1, 0, 3, 2).flatten(1, 2)[:, :end].repeat_interleave(group, 0)
        values = v_pool[pages].float().permute(1, 0, 2, 3).flatten(1, 2)[:, :end].repeat_interleave(group, 0)
        scores = torch.einsum("nhd,htd->hnt", q[first : first + length], keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        age = torch.arange(start, end).unsqueeze(1) - torch.arange(end)
        hidden = (age < 0) | (age >= window) if window > 0 else age < 0
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first : first + length] = torch.einsum("hnt,htd->nhd", weights, values)
    return out.flatten(1).to(k_pool.dtype)
