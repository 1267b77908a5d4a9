"""Any other causal model of transformers, through its attention interface.

The model's own modules run unchanged, with one exception: its attention layers call a function
that stores keys and values into the paged pools and attends over the block tables. transformers is
imported when the first such model is loaded, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError, UnsupportedModelError
from .. import kernels as cpu_kernels
from .base import CacheShape, Kernels, KVPool, Layout, Weights
from .paged_interface import PagedStep, register
from .transformers_checks import check_config, check_layers, compare_with_eager, longest_sequence
from .transformers_loading import load_config, load_module


class TransformersModel:
    """A causal language model of transformers over paged pools.

    Loading finds out which layers cache what by a first forward, and compares a second one, in
    chunks over pages, with the model's own eager attention, so that a model whose attention does
    more than this interface carries is refused here and not answered wrongly later. That is done on the
    CPU; a model for another device moves there afterwards.

    Args:
        weights: The checkpoint.
        max_model_len: Longest sequence wanted, in tokens; ``None`` or more than the model's own is the model's own.
        dummy: Random weights; only the configuration is read.
        kernels: Those of the device that the weights are for.

    Raises:
        UnsupportedModelError: the model cannot run over a paged cache; the text says why.
        WeightsError: parameters are missing or of the wrong shape.
    """

    graphable = False  # what its modules launch may depend on values

    def __init__(
        self, weights: Weights, max_model_len: int | None = None, *, dummy: bool = False, kernels: Kernels = cpu_kernels
    ) -> None:
        register()
        whole = load_config(weights)
        config = whole.get_text_config(decoder=True)
        self._max_model_len = longest_sequence(config, max_model_len)
        check_config(whole, self._max_model_len)
        check_config(config, self._max_model_len)
        module = load_module(weights, whole, dummy=dummy)
        self._module = module
        self._dtype = weights.dtype
        self._vocab_size = int(config.vocab_size)
        self._heads = int(config.num_attention_heads)
        trial = torch.float32 if weights.dtype is torch.float16 else weights.dtype  # the CPU has no float16 kernels
        self._step = PagedStep(trial)
        for part in module.modules():
            if hasattr(part, "layer_idx"):
                part.asyncsched_step = self._step
        try:
            self._cache_shapes = self._discover(config)
            compare_with_eager(self, module)
        except ModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"{type(module).__name__} failed a trial run over pages: {error}") from error
        module.to(weights.device)
        self._step.dtype, self._step.kernels = weights.dtype, kernels

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence it can compute, in tokens."""
        return self._max_model_len

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of the cache."""
        return self._dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the cache; while it is tried out on the CPU not always that of activations."""
        return self._step.dtype

    @property
    def heads(self) -> int:
        """Query heads, of the layer that has most."""
        return self._heads

    @property
    def cache_shapes(self) -> tuple[CacheShape, ...]:
        """One per attention layer."""
        return self._cache_shapes

    def forward(self, tokens: Tensor, layout: Layout, pools: Sequence[KVPool], wanted: Tensor) -> Tensor:
        """Compute one packed step; see ``CausalModel.forward``. Compute thread only."""
        positions = torch.as_tensor(layout.positions).long()
        with self._step.over(layout, pools):
            return self._call(tokens, positions, wanted)

    def _call(self, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        if not len(wanted):
            # No logits are asked for; slicing to none would still run the head, so run the body alone.
            self._module.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
            return torch.empty(0, self._vocab_size, dtype=self._dtype, device=tokens.device)
        output = self._module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted)
        logits: Tensor = output.logits[0]
        return logits

    def _discover(self, config: Any) -> tuple[CacheShape, ...]:
        tokens = torch.arange(2)
        with torch.inference_mode(), self._step.discovering() as found:
            logits = self._call(tokens, tokens, tokens[-1:])
        if logits.shape != (1, self._vocab_size):
            raise UnsupportedModelError(
                f"{config.model_type!r} gives logits of shape {tuple(logits.shape)} for one position; "
                f"a vocabulary of {self._vocab_size} tokens was expected"
            )
        check_layers(config, found)
        return tuple(found[index].cache for index in sorted(found))
