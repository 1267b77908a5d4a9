"""Refusing, before any thread starts, what a paged cache cannot answer rightly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, UnsupportedModelError
from ..kernels.layout import StepLayout
from ..pool import allocate_pools
from .paged_interface import INTERFACE, FoundLayer

if TYPE_CHECKING:
    from .transformers_adapter import TransformersModel

_LAYERS = ("full_attention", "sliding_attention")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
_PAGE = 16


def longest_sequence(config: Any, wanted: int | None) -> int:
    """The smaller of ``wanted`` and the model's own context length.

    Raises:
        ConfigError: neither is known.
    """
    own = next((int(value) for name in _LENGTHS if isinstance(value := getattr(config, name, None), int)), None)
    lengths = [length for length in (own, wanted) if length]
    if not lengths:
        raise ConfigError(f"the configuration of {config.model_type!r} names no context length; pass max_model_len")
    return min(lengths)


def check_config(config: Any, max_model_len: int) -> None:
    """Look for what is known not to work.

    Raises:
        UnsupportedModelError: found some; the text names it.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind!r} is an encoder-decoder; only decoders are supported")
    if getattr(config, "alibi", False) or kind in ("bloom", "mpt"):
        raise UnsupportedModelError(f"{kind!r} adds ALiBi biases to its attention scores, which is not supported")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS))
    if others:
        raise UnsupportedModelError(f"{kind!r} has layers of type {', '.join(others)}; supported: {', '.join(_LAYERS)}")
    for rope in _rope_parameters(config):
        scaling = rope.get("rope_type", "default")
        if scaling == "dynamic":
            raise UnsupportedModelError(f"{kind!r} scales its rope by the longest sequence of the batch ('dynamic')")
        original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if scaling == "longrope" and original and max_model_len > original:
            raise UnsupportedModelError(
                f"{kind!r} changes its rope for the whole batch beyond {original} tokens ('longrope'); "
                f"pass max_model_len={original} or less"
            )


def check_layers(config: Any, found: Mapping[int, FoundLayer]) -> None:
    """Compare what the attention layers told with what the configuration says.

    Raises:
        UnsupportedModelError: a layer bypasses the interface, or hides its sliding window from it.
    """
    kind, layers = config.model_type, int(config.num_hidden_layers)
    if len(found) != layers:
        raise UnsupportedModelError(
            f"{kind!r}: {len(found)} of {layers} layers use the attention interface of transformers; "
            "the others keep state that has no place in a paged cache"
        )
    for layer, type_ in enumerate(getattr(config, "layer_types", None) or ()):
        if type_ == "sliding_attention" and not found[layer].window:
            raise UnsupportedModelError(f"{kind!r}: layer {layer} has a sliding window that only its mask knows")


def compare_with_eager(model: TransformersModel, module: Any) -> None:
    """Compute two short sequences in chunks over pages and compare with the model's eager attention.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding.
    """
    vocab = model.vocab_size
    sequences = [torch.arange(1, 7) * 7 % vocab, torch.arange(1, 5) * 11 % vocab]
    with torch.inference_mode():
        paged = _paged_logits(model, sequences)
        module.set_attn_implementation("eager")
        try:
            plain = [module(input_ids=ids[None], use_cache=False).logits[0, -1].float() for ids in sequences]
        finally:
            module.set_attn_implementation(INTERFACE)
    tolerance = 1e-3 if model.dtype is torch.float32 else 0.1
    for ours, theirs in zip(paged, plain, strict=True):
        error = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-6))
        if error > tolerance:  # false for NaN: broken weights are not the interface's fault
            raise UnsupportedModelError(
                f"{type(module).__name__} over pages differs from its own eager attention by {error:.1%}; "
                "its attention does more than the interface carries"
            )


def _paged_logits(model: TransformersModel, sequences: list[Tensor]) -> list[Tensor]:
    pools = allocate_pools(model.cache_shapes, len(sequences), _PAGE, model.cache_dtype)
    table = np.arange(len(sequences), dtype=np.int32)[:, None]
    rows = np.arange(len(sequences), dtype=np.int32)
    split = 3
    heads = [ids[:split] for ids in sequences]
    tails = [ids[split:] for ids in sequences]
    logits = torch.empty(0)
    for parts, start in ((heads, 0), (tails, split)):
        sizes = np.array([len(ids) for ids in parts], np.int32)
        layout = StepLayout.build(table, rows, sizes, np.full_like(sizes, start), _PAGE)
        ends = torch.from_numpy(np.cumsum(sizes, dtype=np.int64) - 1)
        logits = model.forward(torch.cat(parts), layout, pools, ends)
    return list(logits.float())


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
