"""Hugging Face transformers, ``generate``: one static batch, padded on the left.

Usage: python -m benchmarks.peers.transformers_generate --model FOLDER [--workload NAME ...] [--repeat N]
"""

from __future__ import annotations

import os

from .report import run

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class StaticBatch:
    """All prompts of a call run as one batch until the last is done."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._pad = self._model.config.eos_token_id

    def generate(self, prompts: list[list[int]], output: int) -> list[int]:
        """Answer all prompts in one batch."""
        import torch

        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[self._pad] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        answers = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=output,
            max_new_tokens=output,
            pad_token_id=self._pad,
        )
        return [len(answer) - longest for answer in answers]

    def forget(self) -> None:
        """Nothing outlives a call."""


if __name__ == "__main__":
    run("transformers-generate", StaticBatch, __doc__)
