"""Weights of a GGUF file, under the names and in the layout of the Hugging Face model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, QuantError, dequantize
from numpy.typing import NDArray

from ...errors import UnsupportedModelError, WeightsError
from .gguf_header import GGUFHeader, GGUFTensor
from .shapes import check_shape, missing

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_FLOATS = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2", GGMLQuantizationType.F64: "<f8"}
# The library dequantises 16 rows at a time. Blocks are independent, so rows of this many values are
# formed first: the work per call then outweighs the call (two to three times faster for small models).
_ROW_VALUES = 8192


class GGUFWeights:
    """The tensors of one GGUF file. Worker thread only.

    Args:
        header: The file's header.
        config: The Hugging Face configuration made from it.
    """

    stored_dtype = "bfloat16"

    def __init__(self, header: GGUFHeader, config: Mapping[str, Any]) -> None:
        self._header = header
        self._heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        # GGUF files of this architecture hold q and k for rotary pairs (0, 1), (2, 3) …; Hugging Face
        # models pair the first half of a head with the second.
        self._interleaved = config["model_type"] == "llama"
        self._closed = False

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return _gguf_name(name) in self._header.tensors

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See ``WeightSource.read``."""
        tensor = self._header.tensors.get(_gguf_name(name))
        if tensor is None:
            raise missing(name, self._header.path)
        check_shape(name, self._header.path, shape, tensor.shape)
        stored = self._stored(tensor).reshape(tensor.shape[0], -1)
        base = tensor.name.split(".")[-2]
        if self._interleaved and base in self._heads:
            stored = stored[_half_split_rows(tensor.shape[0], self._heads[base])]
        return torch.from_numpy(self._decode(tensor, stored)).to(device, dtype)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._closed = True

    def _stored(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        path = self._header.path
        if self._closed:
            raise WeightsError(f"{path} has been closed; read every tensor before closing the checkpoint")
        try:
            # Read, not mapped: mapped pages would count as this process's memory until the last tensor is loaded.
            stored = np.fromfile(path, np.uint8, tensor.size, offset=tensor.offset)
        except OSError as error:
            raise WeightsError(f"tensor {tensor.name!r} cannot be read from {path} ({error}); download it again") from error
        if stored.size < tensor.size:
            raise WeightsError(f"{path} ends within tensor {tensor.name!r}; download it again")
        return stored

    def _decode(self, tensor: GGUFTensor, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
        plain = _FLOATS.get(tensor.kind)
        if plain is not None:
            return stored.reshape(-1).view(plain).astype(np.float32).reshape(tensor.shape)
        per_block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        blocks = tensor.size // block_bytes
        width = max(1, min(_ROW_VALUES // per_block, blocks))
        while blocks % width:
            width -= 1
        try:
            values = dequantize(stored.reshape(-1, width * block_bytes), tensor.kind)
        except (NotImplementedError, QuantError) as error:
            raise UnsupportedModelError(
                f"tensor {tensor.name!r} in {self._header.path} has type {tensor.kind.name}, which cannot be dequantised here; "
                "use a Q4, Q5, Q6, Q8, F16, BF16 or F32 file"
            ) from error
        return values.astype(np.float32, copy=False).reshape(tensor.shape)


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return ""
    return f"blk.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def _half_split_rows(rows: int, heads: int) -> NDArray[np.intp]:
    """For each row of the half-split layout, its row in the interleaved one."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
