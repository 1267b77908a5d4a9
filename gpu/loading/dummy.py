"""Random weights, for runs that only need the shapes of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# Drawing eight billion normals takes a minute, copying them seconds: a large tensor repeats one block.
# Its length is a prime over the size of common vocabularies, so that no two rows are equal.
_BLOCK = 262_139


class DummyWeights:
    """Random weights that depend on the tensor's name and shape only. Worker thread only.

    Matrices are normal with variance 1 / inputs, which keeps activations and logits near unit size;
    norms are ones; biases are small. NumPy draws the numbers: the same on every machine.
    """

    stored_dtype = "bfloat16"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def has(self, name: str) -> bool:
        """Whether a model of this configuration has such a parameter."""
        config = self._config
        if name == "lm_head.weight":
            return not config.get("tie_word_embeddings", False)
        kind = config.get("model_type")
        if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
            return kind == "qwen2" or bool(config.get("attention_bias", False))
        if name.endswith("o_proj.bias"):
            return kind != "qwen2" and bool(config.get("attention_bias", False))
        if name.endswith(("gate_proj.bias", "up_proj.bias", "down_proj.bias")):
            return bool(config.get("mlp_bias", False))
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return kind == "qwen3"
        return name.endswith(".weight")

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See ``WeightSource.read``; never fails."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        scale = 0.02 if len(shape) < 2 else shape[-1] ** -0.5
        out = torch.empty(shape, dtype=dtype, device=device)
        flat = out.view(-1)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        drawn = np.random.default_rng(seed).standard_normal(min(_BLOCK, flat.numel()), dtype=np.float32) * np.float32(scale)
        block = torch.from_numpy(drawn).to(device, dtype)
        whole = flat.numel() // _BLOCK
        if whole:
            flat[: whole * _BLOCK].view(whole, _BLOCK).copy_(block)
        rest = flat[whole * _BLOCK :]
        rest.copy_(block[: rest.numel()])
        return out

    def close(self) -> None:
        """Nothing is held open."""
