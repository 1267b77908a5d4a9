"""The Llama family: Llama, Mistral, Qwen2, Qwen3. One forward over a packed step, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .. import kernels as cpu_kernels
from ..linear import Linear
from .base import CacheShape, Kernels, KVPool, Layout, Weights
from .decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int


class Decoder:
    """A pre-norm decoder with rotary positions, grouped queries and a gated feed-forward layer.

    Query, key and value projections are one product, gate and up projections another, so that a
    layer is four products and five kernels.

    Args:
        config: Sizes and variants.
        weights: Where the parameters are read from.
        max_model_len: Longest sequence wanted, in tokens; ``None`` or more than the model's own is the model's own.
        kernels: Those of the device that the weights are on.

    Raises:
        WeightsError: a parameter is missing or of the wrong shape.
    """

    graphable = True

    def __init__(
        self, config: DecoderConfig, weights: Weights, max_model_len: int | None = None, kernels: Kernels = cpu_kernels
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._scale = config.head_dim**-0.5
        self._embedding = weights.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden))
        self._layers = [_load_layer(config, weights, index) for index in range(len(config.windows))]
        self._final_norm = weights.tensor("model.norm.weight", (config.hidden,))
        head = self._embedding if config.tied else weights.tensor("lm_head.weight", (config.vocab_size, config.hidden))
        self._head = Linear(head, shared=config.tied)
        self._max_model_len = min(max_model_len or config.max_length, config.max_length)
        self._cos_sin = config.rope.table(config.head_dim, self._max_model_len).to(self._embedding.device)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._config.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence it can compute, in tokens."""
        return self._max_model_len

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of the cache."""
        return self._embedding.dtype

    @property
    def heads(self) -> int:
        """Query heads."""
        return self._config.heads

    @property
    def cache_shapes(self) -> tuple[CacheShape, ...]:
        """One per layer."""
        return (CacheShape(self._config.kv_heads, self._config.head_dim),) * len(self._layers)

    def forward(self, tokens: Tensor, layout: Layout, pools: Sequence[KVPool], wanted: Tensor) -> Tensor:
        """Compute one packed step; see ``CausalModel.forward``. Compute thread only."""
        config, kernels = self._config, self._kernels
        layers = self._layers
        eps, heads, kv_heads = config.eps, config.heads, config.kv_heads
        residual = functional.embedding(tokens, self._embedding)
        normed = kernels.rms_norm(residual, layers[0].attention_norm, eps)
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            keys, values = pools[index]
            query = kernels.rotary_store(
                layer.qkv(normed),
                self._cos_sin,
                layout,
                keys,
                values,
                heads,
                kv_heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
            )
            if index == last and not len(wanted):
                break  # the cache is complete, and nobody asks for the rest
            attended = kernels.paged_attention(query, layout, keys, values, self._scale, window=layer.window)
            if index == last and len(wanted) != len(tokens):
                # Behind the last attention every position is on its own: drop those nobody asks for.
                attended, residual = attended[wanted], residual[wanted]
            normed, residual = kernels.add_rms_norm(layer.output(attended), residual, layer.mlp_norm, eps)
            hidden = layer.down(kernels.silu_mul(layer.gate_up(normed)))
            following = self._final_norm if index == last else layers[index + 1].attention_norm
            normed, residual = kernels.add_rms_norm(hidden, residual, following, eps)
        return self._head(normed[: len(wanted)])


def _load_layer(config: DecoderConfig, weights: Weights, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    hidden, intermediate, head_dim = config.hidden, config.intermediate, config.head_dim
    query, key = config.heads * head_dim, config.kv_heads * head_dim

    def linear(outputs: dict[str, int], inputs: int, bias: bool) -> Linear:
        # Parts that read the same input become one product.
        names = [(prefix + name, size) for name, size in outputs.items()]
        matrix = torch.cat([weights.tensor(f"{name}.weight", (size, inputs)) for name, size in names])
        vector = torch.cat([weights.tensor(f"{name}.bias", (size,)) for name, size in names]) if bias else None
        return Linear(matrix, vector)

    def norm(name: str, size: int) -> Tensor:
        return weights.tensor(f"{prefix}{name}.weight", (size,))

    return _Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=linear({"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}, hidden, config.qkv_bias),
        q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        output=linear({"self_attn.o_proj": hidden}, query, config.output_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear({"mlp.gate_proj": intermediate, "mlp.up_proj": intermediate}, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, intermediate, config.mlp_bias),
        window=config.windows[index],
    )
