"""Which implementation runs a checkpoint."""

from __future__ import annotations

from ...errors import UnsupportedModelError
from .. import kernels as cpu_kernels
from .base import CausalModel, Kernels, Weights
from .decoder import Decoder
from .decoder_config import DecoderConfig


def build_model(
    weights: Weights, max_model_len: int | None, *, dummy: bool = False, kernels: Kernels = cpu_kernels
) -> CausalModel:
    """The built-in decoder for the Llama family, the transformers adapter for everything else.

    Args:
        weights: The checkpoint.
        max_model_len: Longest sequence wanted, in tokens; ``None`` is the model's own.
        dummy: Random weights; only the configuration is read.
        kernels: Those of the device that the weights are put on.

    Raises:
        UnsupportedModelError: neither can run it; the text says why.
        WeightsError: parameters are missing or of the wrong shape.
        ConfigError: the model names no context length and none was passed.
    """
    try:
        config = DecoderConfig.from_hf(weights.config)
    except UnsupportedModelError:
        if weights.hf_folder is None:  # transformers needs a folder of its own format
            raise
    else:
        return Decoder(config, weights, max_model_len, kernels)
    from .transformers_adapter import TransformersModel

    return TransformersModel(weights, max_model_len, dummy=dummy, kernels=kernels)
