"""Tiny random models, scripted sampling and plan driving for the tests of models and executors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncsched.contract import (
    ExecutorLimits,
    IntArray,
    PageAppends,
    PrefillChunk,
    RowJoin,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from asyncsched.errors import WeightsError
from asyncsched.gpu.cpu_executor import CpuExecutor
from asyncsched.gpu.models.base import CausalModel
from asyncsched.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 97

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_transformer(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A random model of transformers with eager attention; biases and norms are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **options)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        models: Any = AutoModelForCausalLM  # transformers annotates it in part
        module = models.from_config(config, dtype=dtype, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                assert name
    return module.requires_grad_(False)


@dataclass
class ModuleWeights:
    """The parameters of a transformers module, as a checkpoint in memory."""

    module: Any
    dtype: torch.dtype = torch.float32
    name: str = "tiny"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    hf_folder: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = self.config or self.module.config.to_dict()
        self._tensors = dict(self.module.state_dict())

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._tensors.get(name)
        if found is None or tuple(found.shape) != shape:
            raise WeightsError(f"{name} {shape}")
        copy: Tensor = found.to(self.dtype).clone()
        return copy


@dataclass(frozen=True)
class Sampled:
    tokens: IntArray
    logprobs: dict[int, TokenLogprobs] | None = None
    failed: dict[int, str] | None = None


class ScriptedSampler:
    """Returns the tokens it was given per row, whatever the logits, and keeps the logits it saw."""

    def __init__(self, scripts: Mapping[int, Sequence[int]] | None = None) -> None:
        self.scripts = {row: list(tokens) for row, tokens in (scripts or {}).items()}
        self.seen: dict[int, list[Tensor]] = {}
        self.scored: list[tuple[Tensor, IntArray, int]] = []
        self.wants: dict[int, int] = {}
        self.events: list[tuple[str, int]] = []

    def join(self, join: RowJoin) -> None:
        self.events.append(("join", join.row))
        self.seen.setdefault(join.row, [])
        if join.params.prompt_logprobs is not None:
            self.wants[join.row] = join.params.prompt_logprobs

    def leave(self, row: int) -> None:
        self.events.append(("leave", row))
        self.wants.pop(row, None)

    def sample(self, logits: Tensor, rows: IntArray) -> Sampled:
        failed = {}
        tokens = np.zeros(rows.size, np.int32)
        for index, row in enumerate(rows.tolist()):
            self.seen[row].append(logits[index].float().clone())
            if not bool(torch.isfinite(logits[index]).all()):
                failed[row] = "not finite"
            elif script := self.scripts.get(row):
                tokens[index] = script.pop(0)
            else:
                tokens[index] = int(logits[index].argmax())
        return Sampled(tokens, failed=failed or None)

    def wants_prompt_logprobs(self, row: int) -> int | None:
        return self.wants.get(row)

    def prompt_logprobs(self, logits: Tensor, tokens: IntArray, k: int) -> tuple[TokenLogprobs, ...]:
        self.scored.append((logits.float().clone(), tokens.copy(), k))
        scores = torch.log_softmax(logits.float(), -1)
        return tuple(TokenLogprobs(float(scores[i, token]), 1) for i, token in enumerate(tokens.tolist()))


def limits_for(model: CausalModel, *, rows: int = 4, pages: int = 64, page_size: int = 16) -> ExecutorLimits:
    return ExecutorLimits(rows, pages, page_size, model.max_model_len, model.vocab_size)


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def tokens_for(seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocab, count)]


def join(row: int, pages: Iterable[int], *, cached: int = 0, params: SamplingParams = GREEDY, number: int = 0) -> RowJoin:
    return RowJoin(row, number or row + 1, ints(*pages), cached, params, seed=row)


def chunk(row: int, start: int, tokens: Sequence[int], *, sample: bool = True) -> PrefillChunk:
    return PrefillChunk(row, start, ints(*tokens), sample)


def appends(*entries: tuple[int, int, int]) -> PageAppends:
    rows, indices, pages = (ints(*column) for column in zip(*entries, strict=True))
    return PageAppends(rows, indices, pages)


def drive(executor: CpuExecutor, plans: Sequence[StepPlan]) -> list[StepResult]:
    """Run plans through the compute thread, all in flight at once; the executor is closed afterwards."""
    results: SimpleQueue[StepResult] = SimpleQueue()
    executor.start(results.put)
    try:
        for plan in plans:
            executor.submit(plan)
        return [results.get(timeout=60) for _ in plans]
    finally:
        executor.close()


def reference(module: Any, tokens: Sequence[int]) -> Tensor:
    """Logits of every position, float32 ``[n, vocab]``, by the module's own forward."""
    with torch.inference_mode():
        logits: Tensor = module(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits.float()
