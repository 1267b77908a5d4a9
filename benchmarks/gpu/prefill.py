"""One long prompt of Llama-3.1-8B's shape against the rate of a large matrix product."""

from __future__ import annotations

import numpy as np

from asyncsched import PrefillChunk, RowJoin, SamplingParams, StepPlan

from .arithmetic import prefill_flops
from .lab import LLAMA_8B, Lab
from .loaded import Loaded
from .records import Record

TARGET = 0.55
"""Share of the matrix rate."""
_ROUNDS = 4


def run(lab: Lab) -> None:
    """Compute the prompt a few times; the first does not count."""
    loaded, tokens = lab.model(LLAMA_8B), lab.sizes.prefill_tokens
    rate = lab.matrix_rate()
    seconds = [prompt_seconds(loaded, tokens, seed) for seed in range(_ROUNDS)]
    best, flops = min(seconds[1:]), prefill_flops(loaded.shape, tokens)
    details = {"seconds": seconds, "flops": flops, "tflop_per_s": flops / best / 1e12, "tokens_per_s": tokens / best}
    figure = f"8B prefill of {tokens:,} tokens, share of the matrix rate"
    lab.emit(Record("prefill", figure, flops / best / rate, TARGET, details=details))


def prompt_seconds(loaded: Loaded, tokens: int, seed: int) -> float:
    """Device seconds of one step that computes a prompt of random tokens and samples."""
    limits = loaded.reusable.limits
    pages = np.arange(-(-(tokens + 1) // limits.page_size), dtype=np.int32)
    join = RowJoin(0, 0, pages, 0, SamplingParams(temperature=0.0), seed=0)
    prompt = np.random.default_rng(seed).integers(0, limits.vocab_size, tokens, np.int32)
    (result,) = loaded.reusable.launch([StepPlan(0, joins=(join,), prefill=(PrefillChunk(0, 0, prompt, True),))])
    return result.completed_at - result.launched_at
