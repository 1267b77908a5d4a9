"""Reading a Hugging Face configuration of the Llama family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedModelError, WeightsError
from .rope import RopeConfig

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and variants of a model of the Llama family.

    Attributes:
        vocab_size: Rows of the embedding table.
        hidden: Width of the residual stream.
        intermediate: Width of the feed-forward layer.
        heads: Query heads.
        kv_heads: Key and value heads; divides ``heads``.
        head_dim: Width of one head.
        windows: Sliding window per layer, in tokens; 0 sees everything.
        eps: Of every RMSNorm.
        qkv_bias: Query, key and value projections add a bias.
        output_bias: The attention's output projection adds a bias.
        mlp_bias: The feed-forward projections add a bias.
        qk_norm: Queries and keys are normalised per head before rotation.
        tied: The embedding table is also the output projection.
        max_length: Longest sequence the model was made for.
        rope: Rotary embedding.
    """

    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    max_length: int
    rope: RopeConfig

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the content of a ``config.json``, of transformers 4 or 5.

        Raises:
            UnsupportedModelError: not of the family, or a variant of it that the decoder lacks.
            WeightsError: a size is missing or not a positive whole number.
        """
        family = _family(config)
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(f"activation {activation!r} is not supported by the built-in decoder, only silu")
        heads = _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", heads)
        hidden = _size(config, "hidden_size")
        head_dim = _size(config, "head_dim", 128 if family == "qwen3" else hidden // heads)
        if heads % kv_heads:
            raise WeightsError(f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias", False))
        max_length = _size(config, "max_position_embeddings", 2048)
        return cls(
            vocab_size=_size(config, "vocab_size"),
            hidden=hidden,
            intermediate=_size(config, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            windows=_windows(config, family, _size(config, "num_hidden_layers")),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied=bool(config.get("tie_word_embeddings", False)),
            max_length=max_length,
            rope=RopeConfig.from_hf(config, head_dim, max_length),
        )


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or ()
    family = _ARCHITECTURES.get(architectures[0], "") if architectures else config.get("model_type", "")
    if family not in _FAMILIES:
        named = architectures[0] if architectures else config.get("model_type")
        raise UnsupportedModelError(f"architecture {named!r} is not one of the built-in decoder's: {', '.join(_ARCHITECTURES)}")
    return str(family)


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WeightsError(f"config.json: {key}={value!r} must be a positive whole number")
    return value


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window") or 0
    if family == "llama" or (family != "mistral" and not config.get("use_sliding_window", False)):
        window = 0
    if family == "mistral" or not window:
        return (window,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
