"""Other causal models of transformers over paged pools, against their own eager attention."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncsched.config import EngineConfig
from asyncsched.contract import StepPlan
from asyncsched.errors import ConfigError, UnsupportedModelError, WeightsError
from asyncsched.gpu.cpu_executor import CpuExecutor
from asyncsched.gpu.models.registry import build_model
from asyncsched.gpu.models.transformers_adapter import TransformersModel

from .models_helpers import (
    TINY,
    VOCAB,
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

GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.2,
}
PHI = {key: value for key, value in TINY.items() if key != "head_dim"} | {
    "hidden_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "partial_rotary_factor": 0.5,
}
GEMMA2 = TINY | {
    "sliding_window": 6,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 8.0,
    "query_pre_attn_scalar": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gemma": ("gemma", TINY),
    "gemma2": ("gemma2", GEMMA2),
    "phi": ("phi", PHI),
    "yarn": ("llama", TINY | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "olmo2": ("olmo2", {key: value for key, value in TINY.items() if key != "head_dim"} | {"hidden_size": 96}),
}


def save(module: Any, folder: Path) -> ModuleWeights:
    """A folder as the hub has it, and the checkpoint that points there."""
    module.save_pretrained(folder)
    return ModuleWeights(module, module.dtype, hf_folder=folder, config=json.loads((folder / "config.json").read_text("utf-8")))


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_decode_equal_the_eager_forward(name: str, tmp_path: Path) -> None:
    kind, options = MODELS[name]
    module = tiny_transformer(kind, **options)
    model = build_model(save(module, tmp_path), None)
    assert isinstance(model, TransformersModel)
    assert model.vocab_size == VOCAB
    assert model.max_model_len == module.config.max_position_embeddings
    prompts = {0: tokens_for(1, 23), 1: tokens_for(2, 4)}
    outputs = {0: tokens_for(3, 4), 1: tokens_for(4, 4)}
    sampler = ScriptedSampler(outputs)
    plans = [
        StepPlan(1, joins=(join(0, [7]),), prefill=(chunk(0, 0, prompts[0][:9], sample=False),)),
        StepPlan(
            2,
            joins=(join(1, [4]),),
            pages=appends((0, 1, 2)),
            prefill=(chunk(1, 0, prompts[1]), chunk(0, 9, prompts[0][9:])),
        ),
        *(StepPlan(step, decode=True) for step in (3, 4, 5)),
    ]
    results = drive(CpuExecutor(model, sampler, limits_for(model)), plans)
    assert [result.error for result in results] == [None] * 5
    for row, prompt in prompts.items():
        truth = reference(module, [*prompt, *outputs[row]])[len(prompt) - 1 : len(prompt) + 3]
        seen = torch.stack(sampler.seen[row])
        assert float(truth.abs().max()) > 0.5
        assert float((seen - truth).abs().max()) <= 1e-4 * max(1.0, float(truth.abs().max()))


def test_bfloat16(tmp_path: Path) -> None:
    module = tiny_transformer("gpt2", dtype=torch.bfloat16, **GPT2)
    model = TransformersModel(save(module, tmp_path))
    assert model.dtype is torch.bfloat16
    prompt = tokens_for(1, 12)
    sampler = ScriptedSampler({0: [5]})
    plans = [StepPlan(1, joins=(join(0, [1]),), prefill=(chunk(0, 0, prompt),)), StepPlan(2, decode=True)]
    drive(CpuExecutor(model, sampler, limits_for(model)), plans)
    truth = reference(module, [*prompt, 5])[-2:]
    assert float((torch.stack(sampler.seen[0]) - truth).norm()) < 0.05 * float(truth.norm())


def test_two_models_in_turns_keep_their_steps_apart(tmp_path: Path) -> None:
    modules = [tiny_transformer("gpt2", seed=seed, **GPT2) for seed in (1, 2)]
    models = [TransformersModel(save(module, tmp_path / str(i))) for i, module in enumerate(modules)]
    prompt = tokens_for(1, 5)
    plans = [StepPlan(1, joins=(join(0, [1]),), prefill=(chunk(0, 0, prompt),))]
    samplers = [ScriptedSampler({0: [1]}) for _ in models]
    executors = [CpuExecutor(model, sampler, limits_for(model)) for model, sampler in zip(models, samplers, strict=True)]
    for executor in executors:
        drive(executor, plans)
    for module, sampler in zip(modules, samplers, strict=True):
        truth = reference(module, prompt)[-1]
        assert torch.allclose(sampler.seen[0][0], truth, atol=1e-4)


def test_random_weights_need_the_configuration_only(tmp_path: Path) -> None:
    module = tiny_transformer("gpt2", **GPT2)
    weights = save(module, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = torch.random.get_rng_state()
    model = build_model(weights, 50, dummy=True)
    assert torch.equal(state, torch.random.get_rng_state()), "the application's random numbers were touched"
    assert model.max_model_len == 50
    assert [(shape.kv_heads, shape.head_dim) for shape in model.cache_shapes] == [(4, 16)] * 2


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("t5", {"vocab_size": VOCAB, "d_model": 32, "num_layers": 1, "num_heads": 2}, "encoder-decoder"),
        ("bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 1, "n_head": 2}, "ALiBi"),
        ("mamba", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}, "mamba"),
        ("llama", TINY | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("bert", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, "idirectional"),
        ("no-such-model", {"vocab_size": VOCAB}, "no-such-model"),
    ],
)
def test_what_cannot_work_is_refused_before_it_runs(kind: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    class Configuration(ModuleWeights):
        def __post_init__(self) -> None: ...

    weights = Configuration(None, hf_folder=tmp_path, config={"model_type": kind, **options})
    with pytest.raises(UnsupportedModelError, match=words):
        build_model(weights, 64, dummy=True)


def test_an_attention_that_does_more_than_it_says_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    plain: Any = modeling_gpt2.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return plain(module, query, key * torch.linspace(0.1, 3.0, key.shape[2])[:, None], value, mask, **options)

    weights = save(tiny_transformer("gpt2", **GPT2), tmp_path)
    monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", biased)
    with pytest.raises(UnsupportedModelError, match="differs from its own eager attention"):
        TransformersModel(weights)


def test_long_rope_is_limited_to_the_short_context(tmp_path: Path) -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors, "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    weights = save(tiny_transformer("llama", **TINY | {"rope_parameters": rope}), tmp_path)
    with pytest.raises(UnsupportedModelError, match="max_model_len=64"):
        TransformersModel(weights)
    assert TransformersModel(weights, 64).max_model_len == 64


def test_broken_weights_are_named(tmp_path: Path) -> None:
    weights = save(tiny_transformer("gpt2", **GPT2), tmp_path)
    wider = replace(weights, config=weights.config | {"n_embd": 32})
    with pytest.raises(WeightsError):
        TransformersModel(wider)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(WeightsError):
        TransformersModel(weights)


def test_a_gguf_file_of_another_family_is_refused() -> None:
    weights = ModuleWeights(tiny_transformer("gpt2", **GPT2))
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        build_model(weights, None)


def test_a_model_without_a_length_needs_one(tmp_path: Path) -> None:
    class Configuration(ModuleWeights):
        def __post_init__(self) -> None: ...

    options = {"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1}
    with pytest.raises(ConfigError, match="max_model_len"):
        build_model(Configuration(None, hf_folder=tmp_path, config=options), None, dummy=True)


def test_the_llama_family_does_not_import_transformers(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    program = f"""
import sys
from asyncsched.config import EngineConfig
from asyncsched.gpu.cpu import load
backend = load(EngineConfig(model={str(tmp_path)!r}, load_format="dummy", dtype="float32", max_rows=2, pages=4))
assert backend.tokenizer is None
assert backend.executor.limits.max_model_len == 256
backend.executor.close()
assert "transformers" not in sys.modules, "transformers was imported"
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert EngineConfig().device == "auto"
