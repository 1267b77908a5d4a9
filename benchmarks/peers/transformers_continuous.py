"""Hugging Face transformers, ``generate_batch``: continuous batching on a paged cache, with PyTorch's attention.

Usage: python -m benchmarks.peers.transformers_continuous --model FOLDER [--workload NAME ...] [--repeat N]

Cache and scheduler are kept from call to call; left alone, ``generate_batch`` makes them anew and would
mostly be timed doing that. Their size is that of the other engines: 64 requests of 2,048 tokens.
"""

from __future__ import annotations

import os

from .report import run

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROWS = 64
PAGE = 256  # tokens
NO_TOKEN = -1  # as the end-of-sequence token: nothing stops early


class ContinuousBatch:
    """transformers' own scheduler and paged cache."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")

    def generate(self, prompts: list[list[int]], output: int) -> list[int]:
        """Answer all prompts in one call."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        results = self._model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                do_sample=False, max_new_tokens=output, eos_token_id=NO_TOKEN, pad_token_id=self._model.config.eos_token_id
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=ROWS * 2048 // PAGE, max_batch_tokens=1024, max_requests_per_batch=ROWS
            ),
            persistent_manager=True,
        )
        return [len(result.generated_tokens) for result in results.values()]

    def forget(self) -> None:
        """Make cache and scheduler anew: that alone empties the prefix cache."""
        self._model.destroy_cached_continuous_batching_manager()
        self.generate([[1, 2, 3]], 1)


if __name__ == "__main__":
    run("transformers-continuous", ContinuousBatch, __doc__)
