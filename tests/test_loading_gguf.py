"""GGUF files: names, layouts, quantisation, metadata, and damage. Files are written with the library's writer."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from asyncsched.config import EngineConfig
from asyncsched.errors import UnsupportedModelError, WeightsError
from asyncsched.gpu.loading import Checkpoint, open_checkpoint

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 64, 4, 2, 16, 96, 40
LAYER = "model.layers.0."
SHAPES = {  # GGUF name, Hugging Face name, shape
    "token_embd.weight": ("model.embed_tokens.weight", (VOCAB, HIDDEN)),
    "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
    "blk.0.attn_norm.weight": (LAYER + "input_layernorm.weight", (HIDDEN,)),
    "blk.0.attn_q.weight": (LAYER + "self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)),
    "blk.0.attn_k.weight": (LAYER + "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "blk.0.attn_v.weight": (LAYER + "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "blk.0.attn_output.weight": (LAYER + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)),
    "blk.0.ffn_norm.weight": (LAYER + "post_attention_layernorm.weight", (HIDDEN,)),
    "blk.0.ffn_gate.weight": (LAYER + "mlp.gate_proj.weight", (INNER, HIDDEN)),
    "blk.0.ffn_up.weight": (LAYER + "mlp.up_proj.weight", (INNER, HIDDEN)),
    "blk.0.ffn_down.weight": (LAYER + "mlp.down_proj.weight", (HIDDEN, INNER)),
}


def random(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def values() -> dict[str, NDArray[np.float32]]:
    return {name: random(shape, seed) for seed, (name, (_, shape)) in enumerate(SHAPES.items())}


def interleaved(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from (first half, second half) to alternating, as converters to GGUF do for Llama."""
    out = np.empty_like(matrix)
    size = matrix.shape[0] // heads
    for head in range(heads):
        block = matrix[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = block[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = block[size // 2 :]
    return out


def write(
    path: Path,
    tensors: dict[str, NDArray[np.float32]],
    *,
    architecture: str = "llama",
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        stored = Kind.F32 if tensor.ndim == 1 else kind
        data = tensor if stored == Kind.F32 else gguf.quantize(tensor, stored)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(EngineConfig(model=str(path), **options))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_tensors_come_back_under_their_names_in_half_split_layout(tmp_path: Path, kind: Kind) -> None:
    wanted = values()
    stored = dict(wanted)
    stored["blk.0.attn_q.weight"] = interleaved(wanted["blk.0.attn_q.weight"], HEADS)
    stored["blk.0.attn_k.weight"] = interleaved(wanted["blk.0.attn_k.weight"], KV_HEADS)
    with opened(write(tmp_path / "tiny.gguf", stored, kind=kind), dtype="float32") as checkpoint:
        for name, (hf_name, shape) in SHAPES.items():
            expected = wanted[name]
            if len(shape) > 1 and kind != Kind.F32:  # quantisation works row by row: it commutes with moving rows
                expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
            assert checkpoint.has(hf_name)
            assert torch.equal(checkpoint.tensor(hf_name, shape), torch.from_numpy(expected.copy())), name
        assert not checkpoint.has("lm_head.weight")
        assert not checkpoint.has(LAYER + "self_attn.q_proj.bias")
        assert not checkpoint.has("model.layers.1.mlp.up_proj.weight")
        assert not checkpoint.has("anything")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_only_llama_files_are_interleaved(tmp_path: Path, architecture: str) -> None:
    tensors = values()
    tensors["blk.0.attn_q.bias"] = random((HEADS * HEAD_DIM,), 50)
    tensors["blk.0.attn_q_norm.weight"] = random((HEAD_DIM,), 51)
    tensors["output.weight"] = random((VOCAB, HIDDEN), 52)
    with opened(write(tmp_path / "q.gguf", tensors, architecture=architecture), dtype="float32") as checkpoint:
        assert checkpoint.config["model_type"] == architecture
        assert checkpoint.config["tie_word_embeddings"] is False
        for name, hf_name in (
            ("blk.0.attn_q.weight", LAYER + "self_attn.q_proj.weight"),
            ("blk.0.attn_q.bias", LAYER + "self_attn.q_proj.bias"),
            ("blk.0.attn_q_norm.weight", LAYER + "self_attn.q_norm.weight"),
            ("output.weight", "lm_head.weight"),
        ):
            assert torch.equal(checkpoint.tensor(hf_name, tensors[name].shape), torch.from_numpy(tensors[name]))


def test_llama_biases_are_interleaved_too(tmp_path: Path) -> None:
    bias = random((HEADS * HEAD_DIM,), 50)
    stored = values() | {"blk.0.attn_q.bias": interleaved(bias, HEADS)}
    with opened(write(tmp_path / "b.gguf", stored), dtype="float32") as checkpoint:
        assert checkpoint.config["attention_bias"] is True
        assert torch.equal(checkpoint.tensor(LAYER + "self_attn.q_proj.bias", bias.shape), torch.from_numpy(bias))


def test_configuration_has_hugging_face_keys(tmp_path: Path) -> None:
    metadata = {
        "llama.rope.freq_base": 500000.0,
        "llama.attention.key_length": 24,
        "llama.attention.value_length": 24,
        "llama.rope.dimension_count": 24,
        "llama.attention.sliding_window": 128,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
    }
    checkpoint = opened(write(tmp_path / "named.gguf", values(), metadata=metadata))
    eps = checkpoint.config.pop("rms_norm_eps")
    assert eps == pytest.approx(1e-5)
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 24,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "sliding_window": 128,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "dtype": "bfloat16",
    }
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5]}
    assert (checkpoint.name, checkpoint.dtype, checkpoint.hf_folder, checkpoint.tokenizer) == (
        "named",
        torch.bfloat16,
        None,
        None,
    )


def test_random_weights_of_a_gguf_model(tmp_path: Path) -> None:
    with opened(write(tmp_path / "tiny.gguf", values()), load_format="dummy") as checkpoint:
        assert checkpoint.tensor(LAYER + "mlp.up_proj.weight", (INNER, HIDDEN)).shape == (INNER, HIDDEN)
        assert not checkpoint.has("lm_head.weight")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 4096,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert opened(write(tmp_path / "r.gguf", values(), metadata=metadata)).config["rope_scaling"] == expected


def llama3_table(factor: float) -> NDArray[np.float32]:
    """Divisors of Llama 3.1's rotary frequencies, one by one from their definition."""
    table = []
    for at in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * 500000.0 ** (at / HEAD_DIM)
        if wavelength < 8192 / 4:
            table.append(1.0)
        elif wavelength > 8192 / 1:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


def test_llama3_rope_parameters_are_recovered_from_their_table(tmp_path: Path) -> None:
    theta = {"llama.rope.freq_base": 500000.0}
    good = values() | {"rope_freqs.weight": llama3_table(32.0)}
    assert opened(write(tmp_path / "good.gguf", good, metadata=theta)).config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    table = llama3_table(32.0)
    table[0] = 3.0
    with pytest.raises(UnsupportedModelError, match=r"other than Llama 3\.1"):
        opened(write(tmp_path / "bad.gguf", values() | {"rope_freqs.weight": table}, metadata=theta))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "architecture 'gemma3'; supported: llama, qwen2, qwen3"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rotates 8 of 16 dimensions"),
        ({"metadata": {"llama.feed_forward_length": [96, 64]}}, "feed_forward_length differs between layers"),
        ({"metadata": {"split.count": 3}}, "one of 3 parts"),
        ({"metadata": {"tokenizer.ggml.model": "t5"}}, "tokenizer of kind 't5'"),
    ],
)
def test_what_is_not_supported_says_so(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "u.gguf", values(), **options)
    with pytest.raises(UnsupportedModelError, match=message):
        opened(path)


def test_errors_of_single_tensors(tmp_path: Path) -> None:
    with opened(write(tmp_path / "tiny.gguf", values())) as checkpoint:
        with pytest.raises(WeightsError, match=r"'model\.layers\.3\.mlp\.up_proj\.weight' is missing from .*tiny\.gguf"):
            checkpoint.tensor("model.layers.3.mlp.up_proj.weight", (INNER, HIDDEN))
        with pytest.raises(WeightsError, match=r"tiny\.gguf has shape \[96, 64\], expected \[64, 96\]"):
            checkpoint.tensor(LAYER + "mlp.up_proj.weight", (HIDDEN, INNER))
    with pytest.raises(WeightsError, match="closed"):
        checkpoint.tensor(LAYER + "mlp.up_proj.weight", (INNER, HIDDEN))


def test_a_missing_or_senseless_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "k.gguf", values())
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_c0unt"))
    with pytest.raises(WeightsError, match=r"lacks a positive llama\.block_count"):
        opened(path)
    with pytest.raises(WeightsError, match=r"lacks a positive llama\.attention\.head_count"):
        opened(write(tmp_path / "z.gguf", values(), metadata={"llama.attention.head_count": 0}))


def test_a_file_without_embeddings_is_refused(tmp_path: Path) -> None:
    tensors = values()
    del tensors["token_embd.weight"]
    with pytest.raises(WeightsError, match=r"no token_embd\.weight"):
        opened(write(tmp_path / "e.gguf", tensors))


@pytest.mark.parametrize("cut", [0, 3, 20, 100, 400, 900, -1])
def test_a_truncated_file_is_refused_on_opening(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "t.gguf", values())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(WeightsError, match=r"t\.gguf is not a GGUF file, or truncated or corrupt .*download it again"):
        opened(path)


@pytest.mark.parametrize(
    ("at", "content"),
    [
        (0, b"GGML"),
        (8, struct.pack("<Q", 2**60)),  # tensors
        (16, struct.pack("<Q", 2**60)),  # keys
        (24, struct.pack("<Q", 2**63)),  # length of the first key
    ],
)
def test_a_corrupt_header_is_refused_on_opening(tmp_path: Path, at: int, content: bytes) -> None:
    path = write(tmp_path / "c.gguf", values())
    damaged = bytearray(path.read_bytes())
    damaged[at : at + len(content)] = content
    path.write_bytes(damaged)
    with pytest.raises(WeightsError, match="corrupt"):
        opened(path)


def test_other_versions_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "v.gguf", values())
    damaged = bytearray(path.read_bytes())
    damaged[4:8] = struct.pack(">I", 3)
    path.write_bytes(damaged)
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        opened(path)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_every_width_of_regrouped_rows_decodes_alike(tmp_path: Path, kind: Kind) -> None:
    """Rows are regrouped before dequantising; a prime number of blocks allows no grouping but one by one."""
    for vocab in (1, 13, 257, 300):
        table = random((vocab, HIDDEN), vocab)
        tensors = values() | {"token_embd.weight": table}
        with opened(write(tmp_path / "w.gguf", tensors, kind=kind), dtype="float32") as checkpoint:
            expected = gguf.dequantize(gguf.quantize(table, kind), kind)
            assert torch.equal(checkpoint.tensor("model.embed_tokens.weight", table.shape), torch.from_numpy(expected.copy()))
