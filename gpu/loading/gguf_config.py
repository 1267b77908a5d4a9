"""From GGUF metadata to what config.json and generation_config.json of the same model would hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError, WeightsError
from .gguf_header import GGUFHeader

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def hf_config(header: GGUFHeader) -> dict[str, Any]:
    """The configuration under Hugging Face names (``rope_theta`` and ``rope_scaling`` for the rotary embedding).

    Raises:
        UnsupportedModelError: another architecture, mixture of experts, or an unknown rotary embedding.
        WeightsError: a required key is absent.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModelError(
            f"{header.path} has architecture {architecture!r}; supported: {known} (which includes Mistral)"
        )
    values = _Metadata(header, architecture)
    if values.get("expert_count", 0):
        raise UnsupportedModelError(f"{header.path} is a mixture of experts, which is not supported; use a dense model")
    hidden, heads = values.need("embedding_length"), values.need("attention.head_count")
    head_dim = values.get("attention.key_length", hidden // heads)
    rope_dims = values.get("rope.dimension_count", head_dim)
    if rope_dims != head_dim or values.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{header.path} rotates {rope_dims} of {head_dim} dimensions or has values of another size than keys, "
            "which is not supported"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{header.path} holds no token_embd.weight; it is not a language model, or incomplete")
    layer_tensors = {name.removeprefix("blk.0.") for name in header.tensors if name.startswith("blk.0.")}
    theta = values.get("rope.freq_base", 10_000.0)
    return {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": values.need("feed_forward_length"),
        "num_hidden_layers": values.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": values.need("context_length"),
        "rms_norm_eps": values.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(values, theta, head_dim),
        "sliding_window": values.get("attention.sliding_window"),
        "attention_bias": "attn_q.bias" in layer_tensors,
        "mlp_bias": "ffn_up.bias" in layer_tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": embedding.shape[0],
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """The start token and every token that ends a generation: end of sequence, of turn, of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [header.metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in header.metadata]
    return {"bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": list(dict.fromkeys(ends))}


class _Metadata:
    """The keys of one architecture."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.header = header
        self._prefix = architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self.header.metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, list):  # one number per layer
            if len(set(value)) != 1:
                raise UnsupportedModelError(f"{self.header.path}: {key} differs between layers, which is not supported")
            return value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if not isinstance(value, (int, float)) or value <= 0:
            raise WeightsError(f"{self.header.path} lacks a positive {self._prefix}.{key}; convert the model again")
        return value


def _rope_scaling(values: _Metadata, theta: float, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in values.header.tensors:
        return _llama3_scaling(values.header, theta, head_dim)
    kind = values.get("rope.scaling.type", "none")
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0))
    if kind == "none" and factor == 1.0:
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor}
    scaling = {"rope_type": kind, "factor": factor}
    original = values.get("rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(header: GGUFHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """The Llama 3.1 parameters behind a table of frequency divisors.

    The file holds the table, the configuration the parameters it came from. Llama 3.1, 3.2 and 3.3 differ
    in one of them, the factor, which is the largest divisor; the table made from it must be the file's.
    """
    tensor = header.tensors["rope_freqs.weight"]
    found: NDArray[np.float32] = np.fromfile(header.path, "<f4", tensor.size // 4, offset=tensor.offset)
    factor = float(found.max(initial=1.0))
    if tensor.kind.name != "F32" or not np.allclose(found, _llama3_divisors(factor, theta, head_dim), rtol=1e-3):
        raise UnsupportedModelError(f"{header.path} has a rotary embedding other than Llama 3.1's, which is not supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _llama3_divisors(factor: float, theta: float, head_dim: int) -> NDArray[np.float64]:
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth), np.float64)
