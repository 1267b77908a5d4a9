"""The built-in decoder computes what transformers computes, however the tokens are cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncsched.config import EngineConfig
from asyncsched.contract import StepPlan
from asyncsched.errors import UnsupportedModelError, WeightsError
from asyncsched.gpu.cpu_executor import CpuExecutor
from asyncsched.gpu.models.decoder import Decoder
from asyncsched.gpu.models.decoder_config import DecoderConfig
from asyncsched.gpu.models.rope import RopeConfig

from .models_helpers import (
    TINY,
    ModuleWeights,
    ScriptedSampler,
    appends,
    chunk,
    drive,
    join,
    limits_for,
    reference,
    tiny_transformer,
    tokens_for,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WITHOUT_HEAD_DIM = {key: value for key, value in TINY.items() if key != "head_dim"} | {"hidden_size": 96}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", TINY),
    "llama-biases-tied": ("llama", TINY | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-no-groups": ("llama", TINY | {"num_key_value_heads": 6}),
    "llama3-rope": ("llama", TINY | {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", TINY | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral-window": ("mistral", TINY | {"sliding_window": 11}),
    "mistral-no-window": ("mistral", TINY | {"sliding_window": None}),
    "qwen2": ("qwen2", WITHOUT_HEAD_DIM | {"sliding_window": 8}),
    "qwen2-window": ("qwen2", WITHOUT_HEAD_DIM | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", TINY),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    kind, options = MODELS[name]
    module = tiny_transformer(kind, dtype=dtype, **options)
    weights = ModuleWeights(module, dtype)
    return module, Decoder(DecoderConfig.from_hf(weights.config), weights)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    scale = float(theirs.abs().max())
    assert scale > 0.5, "logits this small prove nothing"
    assert float((ours - theirs).abs().max()) <= tolerance * max(scale, 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_chunks_and_decode_equal_transformers(name: str) -> None:
    module, model = build(name)
    prompts = {0: tokens_for(1, 37), 1: tokens_for(2, 5)}
    outputs = {0: tokens_for(3, 6), 1: tokens_for(4, 6)}
    sampler = ScriptedSampler(outputs)
    plans = [
        # Row 0 in three chunks, row 1 whole in the second step and decoding beside the third chunk.
        StepPlan(1, joins=(join(0, [9, 3]),), prefill=(chunk(0, 0, prompts[0][:20], sample=False),)),
        StepPlan(
            2,
            joins=(join(1, [5]),),
            pages=appends((0, 2, 7)),
            prefill=(chunk(0, 20, prompts[0][20:21], sample=False), chunk(1, 0, prompts[1])),
        ),
        StepPlan(3, prefill=(chunk(0, 21, prompts[0][21:]),), decode=True),
        *(StepPlan(step, decode=True) for step in range(4, 8)),
        StepPlan(8, leaves=(1,), decode=True),
    ]
    results = drive(CpuExecutor(model, sampler, limits_for(model)), plans)
    assert [result.error for result in results] == [None] * 8
    assert [result.rows.tolist() for result in results] == [[], [1], [1, 0], [0, 1], [0, 1], [0, 1], [0, 1], [0]]
    for row, prompt in prompts.items():
        seen = torch.stack(sampler.seen[row])
        truth = reference(module, [*prompt, *outputs[row]])
        close(seen, truth[len(prompt) - 1 : len(prompt) - 1 + len(seen)])


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_page_sizes_and_shared_pages_in_the_same_step(page_size: int) -> None:
    module, model = build("llama")
    shared = tokens_for(5, 32)
    tails = {0: tokens_for(6, 4), 1: tokens_for(7, 9)}
    outputs = {0: tokens_for(8, 3), 1: tokens_for(9, 3)}
    sampler = ScriptedSampler(outputs)
    common = list(range(40, 40 + 32 // page_size))
    own = {row: list(range(10 * row, 10 * row + -(-12 // page_size))) for row in (0, 1)}
    first = join(0, [*common, *own[0]])
    # The second request reads pages that the first one writes in this very step.
    second = join(1, [*common, *own[1]], cached=32)
    plans = [
        StepPlan(1, joins=(first, second), prefill=(chunk(1, 32, tails[1]), chunk(0, 0, shared + tails[0]))),
        StepPlan(2, decode=True),
        StepPlan(3, decode=True),
    ]
    results = drive(CpuExecutor(model, sampler, limits_for(model, pages=80, page_size=page_size)), plans)
    assert [result.rows.tolist() for result in results] == [[1, 0], [0, 1], [0, 1]]
    assert results[0].tokens.tolist() == [outputs[1][0], outputs[0][0]]
    for row, tail in tails.items():
        truth = reference(module, [*shared, *tail, *outputs[row]])
        close(torch.stack(sampler.seen[row]), truth[32 + len(tail) - 1 : 32 + len(tail) + 2])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_bfloat16_stays_within_its_precision(name: str) -> None:
    module, model = build(name, torch.bfloat16)
    prompt, output = tokens_for(1, 40), tokens_for(2, 4)
    sampler = ScriptedSampler({0: output})
    plans = [
        StepPlan(1, joins=(join(0, range(4)),), prefill=(chunk(0, 0, prompt[:30], sample=False),)),
        StepPlan(2, prefill=(chunk(0, 30, prompt[30:]),)),
        *(StepPlan(step, decode=True) for step in (3, 4, 5)),
    ]
    drive(CpuExecutor(model, sampler, limits_for(model)), plans)
    ours = torch.stack(sampler.seen[0])
    exact = reference(module.float(), [*prompt, *output])[len(prompt) - 1 : len(prompt) + 3]
    theirs = reference(module.bfloat16(), [*prompt, *output])[len(prompt) - 1 : len(prompt) + 3]
    # As near to the exact answer as transformers is in the same precision, give or take.
    assert float((ours - exact).norm()) <= 1.5 * float((theirs - exact).norm()) + 0.01 * float(exact.norm())


def test_logits_are_computed_where_they_are_wanted_only() -> None:
    module, model = build("llama")
    ids = tokens_for(3, 20)
    from asyncsched.gpu.pool import allocate_pools

    pools = allocate_pools(model.cache_shapes, 2, 16, model.dtype)
    layout = _one_segment(20, [1, 0])
    truth = reference(module, ids)
    for wanted in ([], [19], [0, 7, 19], list(range(20))):
        with torch.inference_mode():
            logits = model.forward(torch.tensor(ids), layout, pools, torch.tensor(wanted, dtype=torch.int64))
        assert logits.shape == (len(wanted), model.vocab_size)
        if wanted:
            close(logits, truth[wanted])


def _one_segment(count: int, pages: list[int]) -> Any:
    from asyncsched.gpu.kernels.layout import StepLayout

    from .models_helpers import ints

    return StepLayout.build(ints(*pages)[None], ints(0), ints(count), ints(0), 16)


def test_configurations_of_transformers_4_read_the_same() -> None:
    new = TINY | {"model_type": "llama", "rope_parameters": LLAMA3}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = TINY | {"architectures": ["LlamaForCausalLM"], "rope_theta": 500.0, "rope_scaling": scaling}
    assert DecoderConfig.from_hf(new) == DecoderConfig.from_hf(old)
    linear = DecoderConfig.from_hf(TINY | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear.rope == RopeConfig(1e4, "linear", 2.0, original_length=256)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "gelu"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "0.5"),
    ],
)
def test_variants_it_lacks_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        DecoderConfig.from_hf(TINY | options)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_impossible_sizes_are_named(key: str) -> None:
    with pytest.raises(WeightsError, match=key):
        DecoderConfig.from_hf(TINY | {"model_type": "llama", key: 0})


def test_longest_sequence_is_the_smaller_of_two() -> None:
    weights = ModuleWeights(tiny_transformer("llama", **TINY))
    config = DecoderConfig.from_hf(weights.config)
    assert Decoder(config, weights).max_model_len == 256
    assert Decoder(config, weights, 100).max_model_len == 100
    assert Decoder(config, weights, 1000).max_model_len == 256


def test_missing_weights_are_named() -> None:
    weights = ModuleWeights(tiny_transformer("llama", **TINY))
    config = DecoderConfig.from_hf(weights.config | {"attention_bias": True})
    with pytest.raises(WeightsError, match=r"q_proj\.bias"):
        Decoder(config, weights)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_saved_folder_answers_the_same(kind: str, tmp_path: Path) -> None:
    from asyncsched.gpu.loading import open_checkpoint
    from asyncsched.gpu.models.registry import build_model

    module = tiny_transformer(kind, **TINY)
    module.save_pretrained(tmp_path)
    with open_checkpoint(EngineConfig(model=str(tmp_path), max_model_len=64)) as checkpoint:
        model = build_model(checkpoint, 64)
    assert isinstance(model, Decoder)
    assert model.max_model_len == 64
    prompt = tokens_for(1, 9)
    sampler = ScriptedSampler({0: [4]})
    drive(CpuExecutor(model, sampler, limits_for(model)), [StepPlan(1, joins=(join(0, [0]),), prefill=(chunk(0, 0, prompt),))])
    close(torch.stack(sampler.seen[0]), reference(module, prompt)[-1:])
