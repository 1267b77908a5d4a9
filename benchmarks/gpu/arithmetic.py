"""How many bytes and operations a model of the Llama family needs: what measured times are held against."""

from __future__ import annotations

from asyncsched.gpu.models.decoder_config import DecoderConfig


def parameters(config: DecoderConfig) -> int:
    """Numbers in the weights, each once; a tied output projection is the embedding table."""
    layer = _layer_matrices(config) + _layer_vectors(config)
    tables = (1 if config.tied else 2) * config.vocab_size * config.hidden
    return len(config.windows) * layer + tables + config.hidden


def weight_bytes_per_step(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of weights that a step must read: all but an embedding table of which it reads a few rows."""
    unread = 0 if config.tied else config.vocab_size * config.hidden
    return (parameters(config) - unread) * itemsize


def kv_bytes_per_token(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of keys and values of one token, over all layers. For models without sliding windows."""
    return 2 * len(config.windows) * config.kv_heads * config.head_dim * itemsize


def decode_bytes(config: DecoderConfig, rows: int, context: float, itemsize: int) -> float:
    """Bytes that a decode step must read.

    Args:
        config: The model.
        rows: Rows that decode.
        context: Positions each attends to, its own included; the mean if they differ.
        itemsize: Bytes per number of weights and cache.
    """
    return weight_bytes_per_step(config, itemsize) + rows * context * kv_bytes_per_token(config, itemsize)


def prefill_flops(config: DecoderConfig, tokens: int) -> float:
    """Floating-point operations to compute a prompt of so many tokens from nothing, up to one row of logits.

    A multiplication and an addition are two. What comes behind the last layer's attention is counted
    for the last token alone: nothing else needs it, and the model does not compute it. Attention is
    counted where it is causal: half of the square.
    """
    layers = len(config.windows)
    projections = config.hidden * (config.heads + 2 * config.kv_heads) * config.head_dim
    behind = _layer_matrices(config) - projections  # output projection and feed-forward
    pairs = tokens * (tokens + 1) / 2
    attention = 4.0 * config.heads * config.head_dim * pairs
    everywhere = layers * (2.0 * projections * tokens + attention) + (layers - 1) * 2.0 * behind * tokens
    return everywhere + 2.0 * (behind + config.vocab_size * config.hidden)


def _layer_matrices(config: DecoderConfig) -> int:
    projections = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    return config.hidden * (projections + 3 * config.intermediate)


def _layer_vectors(config: DecoderConfig) -> int:
    """Norms and biases."""
    biases = (
        config.qkv_bias * (config.heads + 2 * config.kv_heads) * config.head_dim
        + config.output_bias * config.hidden
        + config.mlp_bias * (2 * config.intermediate + config.hidden)
    )
    return 2 * config.hidden + config.qk_norm * 2 * config.head_dim + biases
