"""What a GPU must offer a model, found out before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedModelError
from ..models.decoder_config import DecoderConfig
from .device import check_memory
from .kernels.pool_shape import check_head_dim

if TYPE_CHECKING:
    from ..loading.checkpoint import Checkpoint


def check_model(checkpoint: Checkpoint, free: int) -> None:
    """See that the kernels compute the model and that its weights fit into ``free`` bytes.

    Models that only transformers knows are checked when they are built.

    Raises:
        UnsupportedModelError: a head size that the kernels lack.
        NotEnoughMemoryError: the weights do not fit; the text says how much is missing.
    """
    config = _decoder_config(checkpoint.config)
    if config is None:
        return
    check_head_dim(config.head_dim)
    check_memory(f"the weights of {checkpoint.name}", parameters(config) * checkpoint.dtype.itemsize, free)


def attention_shape(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Query heads, key heads and head size; ``None`` for models that only transformers knows."""
    found = _decoder_config(config)
    return None if found is None else (found.heads, found.kv_heads, found.head_dim)


def weight_bytes(checkpoint: Checkpoint) -> int | None:
    """Bytes of all parameters; ``None`` for models that only transformers knows."""
    config = _decoder_config(checkpoint.config)
    return None if config is None else parameters(config) * checkpoint.dtype.itemsize


def parameters(config: DecoderConfig) -> int:
    """Numbers in the weights of a model of the Llama family, without biases."""
    projections = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    layer = config.hidden * (projections + 3 * config.intermediate + 2)
    tables = (1 if config.tied else 2) * config.vocab_size * config.hidden
    return len(config.windows) * layer + tables + config.hidden


def _decoder_config(config: Mapping[str, Any]) -> DecoderConfig | None:
    try:
        return DecoderConfig.from_hf(config)
    except UnsupportedModelError:
        return None
