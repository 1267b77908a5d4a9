"""Log-probabilities of prompt tokens, across the chunks of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..contract import IntArray, StepPlan, TokenLogprobs

_BLOCK = 128  # positions per call, so that the float32 copy of the logits stays small


class PromptSampler(Protocol):
    """The part of the sampler this needs."""

    def wants_prompt_logprobs(self, row: int) -> int | None:
        """How many of the most likely tokens the row wants per prompt position; ``None`` for nothing."""
        ...

    def prompt_logprobs(self, logits: Tensor, tokens: IntArray, k: int) -> tuple[TokenLogprobs, ...]:
        """Score ``tokens[i]`` under ``logits[i]``."""
        ...


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk whose tokens are scored: packed positions ``first … first + len(tokens) - 1``."""

    row: int
    start: int
    first: int
    tokens: IntArray
    top: int


class PromptScores:
    """Scores prompt tokens under the logits of the position before each. Compute thread only.

    The first token of a later chunk is scored under the last logits of the chunk before, which are
    kept here in between.

    Args:
        sampler: Knows which rows asked, and scores.
    """

    def __init__(self, sampler: PromptSampler) -> None:
        self._sampler = sampler
        self._before: dict[int, Tensor] = {}

    def forget(self, row: int) -> None:
        """The row left or joined anew."""
        self._before.pop(row, None)

    def chunks(self, plan: StepPlan, decoding: int) -> list[ScoredChunk]:
        """The chunks of this step whose rows asked for it; ``decoding`` packed tokens come before the first."""
        scored = []
        first = decoding
        for chunk in plan.prefill:
            top = self._sampler.wants_prompt_logprobs(chunk.row)
            if top is not None:
                scored.append(ScoredChunk(chunk.row, chunk.start, first, chunk.tokens, top))
            first += chunk.tokens.size
        return scored

    def score(
        self, chunks: list[ScoredChunk], wanted: NDArray[np.int64], logits: Tensor
    ) -> dict[int, tuple[TokenLogprobs | None, ...]]:
        """Scores by row. ``logits[i]`` belongs to packed position ``wanted[i]`` (ascending, holds every chunk's positions)."""
        return {chunk.row: self._score(chunk, int(np.searchsorted(wanted, chunk.first)), logits) for chunk in chunks}

    def _score(self, chunk: ScoredChunk, at: int, logits: Tensor) -> tuple[TokenLogprobs | None, ...]:
        count = chunk.tokens.size
        own = logits[at : at + count]
        scores: list[TokenLogprobs | None] = []
        before = self._before.get(chunk.row) if chunk.start else None
        if before is None:
            scores.append(None)
        else:
            scores.extend(self._sampler.prompt_logprobs(before, chunk.tokens[:1], chunk.top))
        for low in range(0, count - 1, _BLOCK):
            high = min(low + _BLOCK, count - 1)
            scores.extend(self._sampler.prompt_logprobs(own[low:high], chunk.tokens[low + 1 : high + 1], chunk.top))
        self._before[chunk.row] = own[-1:].clone()
        return tuple(scores)


def wanted_positions(sampled_at: NDArray[np.int64], chunks: list[ScoredChunk]) -> NDArray[np.int64]:
    """Packed positions whose logits are needed, ascending: the sampled ones and every scored one."""
    if not chunks:
        return sampled_at
    ranges = [np.arange(chunk.first, chunk.first + chunk.tokens.size, dtype=np.int64) for chunk in chunks]
    return np.unique(np.concatenate([sampled_at, *ranges]))


def select(logits: Tensor, wanted: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
    """The rows of ``logits`` (of positions ``wanted``) that belong to ``positions``."""
    if wanted.size == positions.size:
        return logits
    return logits[torch.from_numpy(np.searchsorted(wanted, positions)).to(logits.device)]
