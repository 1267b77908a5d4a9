"""What the executor needs of a model, and what a model needs of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.layout import StepLayout

KVPool = tuple[Tensor, Tensor]
"""One layer's keys ``[pages, kv_heads, head_dim, page_size]`` and values ``[pages, kv_heads, page_size, head_dim]``."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one layer stores per token: keys and values of ``kv_heads`` heads of ``head_dim`` each."""

    kv_heads: int
    head_dim: int


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

    def forward(self, tokens: Tensor, layout: StepLayout, pools: Sequence[KVPool], wanted: Tensor) -> Tensor:
        """Compute one packed step and store its keys and values. Compute thread only.

        Args:
            tokens: Input ids, int64 ``[N]``.
            layout: Segments and slots of the ``N`` tokens.
            pools: One per entry of ``cache_shapes``.
            wanted: Ascending packed positions, int64 ``[n]``.

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
    def hf_folder(self) -> Path | None:
        """The Hugging Face folder it was read from, if it was one."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one parameter.

        Raises:
            WeightsError: it is missing or has another shape.
        """
        ...
