"""The GPU's kernels as models call them, for steps of decoding rows and prompt chunks side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedModelError
from .attention_choice import PrefillAttention, triton_prefill
from .kernels import activation, norm
from .kernels.decode_attention import decode_attention
from .kernels.rotary_store import rotary_store_decode, rotary_store_prefill
from .layout import DeviceLayout


class CudaKernels:
    """``models.base.Kernels`` in Triton. Layouts are ``DeviceLayout``.

    Args:
        prefill: Attention of prompts.
    """

    def __init__(self, prefill: PrefillAttention = triton_prefill) -> None:
        self._prefill = prefill

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """See ``kernels.norm``."""
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, /) -> tuple[Tensor, Tensor]:
        """See ``kernels.norm``; ``residual`` is changed in place."""
        return norm.add_rms_norm(x, residual, weight, eps), residual

    def silu_mul(self, gate_up: Tensor, /) -> Tensor:
        """See ``kernels.activation``."""
        return activation.silu_mul(gate_up)

    def rotary_store(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        layout: DeviceLayout,
        k_pool: Tensor,
        v_pool: Tensor,
        heads: int,
        kv_heads: int,
        /,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """See ``kernels.rotary_store``; the queries are a view of ``qkv``."""
        state, decoding, chunks = layout.state, len(layout.rows), layout.chunks
        norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
        pools = (cos_sin, k_pool, v_pool, state.block_table)
        if decoding:
            rotary_store_decode(qkv[:decoding], *pools, layout.rows, state.length, heads, **norms)
        if chunks is not None:
            places = (chunks.rows, chunks.starts, chunks.cu_seqlens)
            rotary_store_prefill(qkv[decoding:], *pools, *places, heads, **norms)
        head_dim = k_pool.shape[3]
        return qkv[:, : heads * head_dim].view(-1, heads, head_dim)

    def store_kv(self, k: Tensor, v: Tensor, layout: DeviceLayout, k_pool: Tensor, v_pool: Tensor, /) -> None:
        """Store keys and values ``[N, kv_heads, head_dim]`` as they are. Not for padded steps."""
        pages, offsets = layout.slots
        k_pool[pages, :, offsets] = k
        v_pool[pages, :, offsets] = v

    def paged_attention(
        self,
        q: Tensor,
        layout: DeviceLayout,
        k_pool: Tensor,
        v_pool: Tensor,
        scale: float,
        /,
        *,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """See ``kernels.decode_attention`` and ``kernels.prefill_attention``; ``[N, heads * head_dim]``.

        Raises:
            UnsupportedModelError: ``softcap`` is not 0.
        """
        if softcap:
            raise UnsupportedModelError("the CUDA kernels lack soft caps on attention scores; use device='cpu'")
        q = q.to(k_pool.dtype)
        tokens, heads, head_dim = q.shape
        out = torch.empty(tokens, heads * head_dim, dtype=k_pool.dtype, device=q.device)
        state, decoding, chunks = layout.state, len(layout.rows), layout.chunks
        pools = (k_pool, v_pool, state.block_table)
        if decoding:
            rows = (layout.rows, state.length, out[:decoding])
            decode_attention(q[:decoding], *pools, *rows, layout.scratch, scale=scale, splits=layout.splits, window=window)
        if chunks is not None:
            self._prefill(q[decoding:], layout, k_pool, v_pool, out[decoding:], scale=scale, window=window)
        return out
