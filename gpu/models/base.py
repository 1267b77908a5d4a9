"""What the executor needs of a model, and what a model needs of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

Layout = Any
"""Which token of a packed step is whose, and where its key and value go: whatever the device's kernels take."""

KVPool = tuple[Tensor, Tensor]
"""One layer's keys and values: on the CPU ``[pages, kv_heads, head_dim, page_size]`` and
``[pages, kv_heads, page_size, head_dim]``, on a GPU the latter for both."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one layer stores per token: keys and values of ``kv_heads`` heads of ``head_dim`` each."""

    kv_heads: int
    head_dim: int


class Kernels(Protocol):
    """What a device computes between the matrix products; ``gpu.kernels`` says what each does."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Root-mean-square norm."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, /) -> tuple[Tensor, Tensor]:
        """The norm of ``residual + x``, and that sum."""
        ...

    def silu_mul(self, gate_up: Tensor, /) -> Tensor:
        """``silu(gate) * up``."""
        ...

    def rotary_store(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        layout: Layout,
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
        """Norm and rotate queries and keys, store keys and values; the queries as ``paged_attention`` takes them."""
        ...

    def store_kv(self, k: Tensor, v: Tensor, layout: Layout, k_pool: Tensor, v_pool: Tensor, /) -> None:
        """Store keys and values as they are."""
        ...

    def paged_attention(
        self,
        q: Tensor,
        layout: Layout,
        k_pool: Tensor,
        v_pool: Tensor,
        scale: float,
        /,
        *,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Causal attention of every new token over its own context."""
        ...


class CausalModel(Protocol):
    """A decoder that computes packed steps over a paged cache."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence it can compute, in tokens."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of the cache."""
        ...

    @property
    def cache_shapes(self) -> tuple[CacheShape, ...]:
        """One per layer that has a cache."""
        ...

    @property
    def heads(self) -> int:
        """Query heads, of the layer that has most."""
        ...

    @property
    def graphable(self) -> bool:
        """True if a step launches the same kernels whatever the values: a CUDA graph can hold it."""
        ...

    def forward(self, tokens: Tensor, layout: Layout, pools: Sequence[KVPool], wanted: Tensor) -> Tensor:
        """Compute one packed step and store its keys and values. Compute thread only.

        Args:
            tokens: Input ids, int64 or int32 ``[N]``.
            layout: Segments and slots of the ``N`` tokens.
            pools: One per entry of ``cache_shapes``.
            wanted: Ascending packed positions, int64 or int32 ``[n]``.

        Returns:
            Logits ``[n, vocab_size]`` in ``dtype`` or float32.
        """
        ...


class Weights(Protocol):
    """A checkpoint: Hugging Face configuration and parameter names, whatever file they come from."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of ``config.json``."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of every tensor handed out."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors are put."""
        ...

    @property
    def hf_folder(self) -> Path | None:
        """The Hugging Face folder it was read from, if it was one."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one parameter.

        Raises:
            WeightsError: it is missing or has another shape.
        """
        ...
