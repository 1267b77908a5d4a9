"""transformers' continuous batching, what its ``generate_batch`` is made of, on a model with the same random weights."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncsched.gpu.loading.dummy import DummyWeights

_NO_TOKEN = -1  # as the end-of-sequence token: nothing stops early
_STOPPING = 30.0  # seconds
_WARM_UP = 4  # sequences, and tokens of each


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One run of the other engine.

    Attributes:
        version: Of transformers.
        attention: The implementation that it chose.
        sequences: Submitted.
        finished: Of those, run to their end.
        tokens: Generated, those of unfinished sequences too.
        seconds: From the submission to the end.
        capped: It was stopped because it took too long.
    """

    version: str
    attention: str
    sequences: int
    finished: int
    tokens: int
    seconds: float
    capped: bool

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds


def continuous_batching(
    folder: Path, prompts: Sequence[list[int]], outputs: Sequence[int], device: torch.device, dtype: str, longest: float
) -> PeerRun:
    """Run all sequences, greedy, for ``longest`` seconds at most.

    ``generate_batch`` takes one output length for all prompts; its manager takes one for each, so that is
    used as ``generate_batch`` uses it. A run that is stopped misses its end, where few sequences are left, and
    the step that it ends with counts: its rate is, if anything, too high.

    Raises:
        RuntimeError: sequences failed.
        Exception: whatever transformers raises where it cannot run.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers
    from transformers.generation.continuous_batching.utils import WorkloadHints

    model = random_model(folder, device, getattr(torch, dtype))
    generation: Any = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=max(outputs), eos_token_id=_NO_TOKEN, pad_token_id=0
    )
    hints = WorkloadHints(max(map(len, prompts)), max(outputs), len(prompts))
    managing = model.continuous_batching_context_manager(generation_config=generation, timeout=_STOPPING, workload_hints=hints)
    with managing as manager:
        attention = str(model.config._attn_implementation)
        few = [prompt[: len(prompt) // 2 + 1] for prompt in prompts[:_WARM_UP]]
        _collect(manager, few, [_WARM_UP] * len(few), _STOPPING, "warm-up")
        started = time.monotonic()
        counts = _collect(manager, prompts, outputs, longest, "request")
        seconds = time.monotonic() - started
        finished = len(counts)
        capped = finished < len(prompts)
        if capped:
            manager.stop(block=True, timeout=_STOPPING, hard_stop=True)
        while capped and (result := manager.get_result(timeout=0.1)) is not None:  # unfinished ones say how far they came
            counts[result.request_id] = len(result.generated_tokens)
    return PeerRun(transformers.__version__, attention, len(prompts), finished, sum(counts.values()), seconds, capped)


def random_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' own model of a configuration, with the weights that ``load_format="dummy"`` gives ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    models: Any = AutoModelForCausalLM  # transformers annotates it in part
    config = AutoConfig.from_pretrained(folder)
    weights = DummyWeights(json.loads((folder / "config.json").read_text("utf-8")))
    with device:
        model = models.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name, tuple(parameter.shape), dtype, device))
    return model.requires_grad_(False)


def _collect(manager: Any, prompts: Sequence[list[int]], outputs: Sequence[int], longest: float, name: str) -> dict[str, int]:
    """Submit, and wait for the results for so many seconds; generated tokens by request."""
    started = time.monotonic()
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        manager.add_request(prompt, request_id=f"{name} {i}", max_new_tokens=output, eos_token_id=_NO_TOKEN)
    counts: dict[str, int] = {}
    while len(counts) < len(prompts) and time.monotonic() - started < longest:
        result = manager.get_result(timeout=0.5)
        if result is None:
            if not manager.is_running():
                raise RuntimeError(f"its thread has ended: {manager.background_thread_status.fatal_error}")
        elif result.error is not None:
            raise RuntimeError(f"{result.request_id} failed: {result.error}")
        elif result.is_finished():
            counts[result.request_id] = len(result.generated_tokens)
    return counts
