"""vLLM on the CPU, through its ``LLM`` class and with its defaults.

Usage: PEERS/vllm/bin/python -m benchmarks.peers.vllm_engine --model FOLDER [--workload NAME ...] [--repeat N]
"""

from __future__ import annotations

import os

from .report import run

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class VLLM:
    """vLLM's offline engine; its core runs in a process of its own."""

    def __init__(self, model: str) -> None:
        from vllm import LLM  # type: ignore[import-not-found]  # another environment's

        self._llm = LLM(model=model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64)

    def generate(self, prompts: list[list[int]], output: int) -> list[int]:
        """Answer all prompts in one call."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        results = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(result.outputs[0].token_ids) for result in results]

    def forget(self) -> None:
        """Empty the prefix cache."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")


if __name__ == "__main__":
    run("vllm", VLLM, __doc__)
