"""The attention function that transformers models call: store, then attend over pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UnsupportedModelError
from .. import kernels as cpu_kernels
from .base import CacheShape, Kernels, KVPool, Layout

INTERFACE: Final = "asyncsched_paged"
# What some models add to their scores and this function cannot: attention sinks, position biases, selected keys.
_REFUSED: Final = ("s_aux", "sinks", "position_bias", "attention_bias", "block_mask", "indices", "topk_indices")


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """What one attention layer does: what it caches, and how far back it looks (0: all the way)."""

    cache: CacheShape
    window: int


class PagedStep:
    """The step a model is computing, reachable from its attention layers. One per model.

    Each attention module holds a reference to its own model's instance, so that two engines in one
    process never see each other's step.

    Attributes:
        dtype: Of the pools.
        kernels: Store and attend.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.kernels: Kernels = cpu_kernels
        self._layout: Layout | None = None
        self._pools: Sequence[KVPool] = ()
        self._found: dict[int, FoundLayer] = {}
        self._pool_of_layer: dict[int, int] = {}

    @contextmanager
    def discovering(self) -> Iterator[dict[int, FoundLayer]]:
        """Within: layers report what they would cache, by layer index, and attend to nothing."""
        self._layout = None
        self._found = {}
        yield self._found
        self._pool_of_layer = {layer: pool for pool, layer in enumerate(sorted(self._found))}

    @contextmanager
    def over(self, layout: Layout, pools: Sequence[KVPool]) -> Iterator[None]:
        """Within: layers attend over ``pools``, laid out by ``layout``."""
        self._layout, self._pools = layout, pools
        try:
            yield
        finally:
            self._layout, self._pools = None, ()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        """Attention of one layer. ``query [1, H, N, D]``, ``key, value [1, K, N, D]`` → ``[1, N, H, D]``."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]  # nn.Module types every attribute Tensor | Module
        width = value.shape[-1]
        if self._layout is None:
            return self._discover(module, layer, query, key, value, window)
        keys, values = self._pools[self._pool_of_layer[layer]]
        head_dim, kernels = values.shape[3], self.kernels
        kernels.store_kv(_packed(key, self.dtype, head_dim), _packed(value, self.dtype, head_dim), self._layout, keys, values)
        attended = kernels.paged_attention(
            _packed(query, torch.float32, head_dim), self._layout, keys, values, scale, window=window, softcap=softcap
        )
        return attended.view(1, attended.shape[0], -1, head_dim)[..., :width].to(query.dtype)

    def _discover(self, module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        if layer in self._found:
            raise UnsupportedModelError(f"{type(module).__name__}: layer {layer} attends twice, only once is supported")
        if not getattr(module, "is_causal", True):
            raise UnsupportedModelError(f"{type(module).__name__}: bidirectional attention cannot be decoded over a cache")
        self._found[layer] = FoundLayer(CacheShape(key.shape[1], max(key.shape[3], value.shape[3])), window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _packed(heads: Tensor, dtype: torch.dtype, head_dim: int) -> Tensor:
    """``[1, H, N, d]`` → contiguous ``[N, H, head_dim]``, padded with zeros (they change no score and no sum)."""
    if heads.shape[-1] < head_dim:
        heads = functional.pad(heads, (0, head_dim - heads.shape[-1]))
    return heads[0].transpose(0, 1).to(dtype).contiguous()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention (its ``AttentionInterface`` protocol).

    Raises:
        UnsupportedModelError: the layer wants something added to its scores that pages cannot give.
    """
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} adds a mask or a bias of its own to its attention scores")
    for name in _REFUSED:
        if options.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} needs {name!r} in its attention, which pages cannot give")
    if sliding_window is None and getattr(module, "is_sliding", False):
        sliding_window = getattr(module, "sliding_window", None)
    step: PagedStep = module.asyncsched_step  # type: ignore[assignment]  # set by the model's owner
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return step.attend(module, query, key, value, scale, sliding_window or 0, softcap or 0.0), None


def register() -> None:
    """Make the function known to transformers under ``INTERFACE``. Idempotent.

    An attention function without a mask function of the same name gets no mask, which is what is
    wanted here: causality, windows and segments are in the layout.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(INTERFACE, attention_forward)
