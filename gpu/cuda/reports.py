"""Which rows want log-probabilities, of tokens and of prompts, on the GPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...contract import IntArray, StepPlan, TokenLogprobs
from ..prompt_scores import PromptScores, ScoredChunk
from .kernels.logprobs import token_logprobs


class Reports:
    """What rows asked to be told beside their tokens. Compute thread only.

    Prompt tokens are scored while the compute thread waits: a step that does so is not overlapped.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._prompts: dict[int, int] = {}
        self._scores = PromptScores(self)

    def apply(self, plan: StepPlan) -> None:
        """Follow the rows that leave and join."""
        for row in (*plan.leaves, *(join.row for join in plan.joins)):
            self._tokens.pop(row, None)
            self._prompts.pop(row, None)
            self._scores.forget(row)
        for join in plan.joins:
            if join.params.logprobs is not None:
                self._tokens[join.row] = join.params.logprobs
            if join.params.prompt_logprobs is not None:
                self._prompts[join.row] = join.params.prompt_logprobs

    def wanted(self, rows: IntArray) -> dict[int, int]:
        """Those of ``rows`` that want their token's log-probability, and how many likely tokens with it."""
        return {row: self._tokens[row] for row in rows.tolist() if row in self._tokens} if self._tokens else {}

    def wants_prompt_logprobs(self, row: int) -> int | None:
        """See ``PromptSampler``."""
        return self._prompts.get(row)

    def prompt_logprobs(self, logits: Tensor, tokens: IntArray, k: int) -> tuple[TokenLogprobs, ...]:
        """See ``PromptSampler``; waits for the device."""
        given = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)
        found = token_logprobs(logits, given, k).cpu()
        return tuple(found.entry(i, k) for i in range(tokens.size))

    def chunks(self, plan: StepPlan, decoding: int) -> list[ScoredChunk]:
        """The chunks whose tokens are scored; ``decoding`` tokens come before them."""
        return self._scores.chunks(plan, decoding) if self._prompts else []

    def score(
        self, scored: list[ScoredChunk], wanted: NDArray[np.int64], logits: Tensor
    ) -> dict[int, tuple[TokenLogprobs | None, ...]]:
        """Scores by row."""
        return self._scores.score(scored, wanted, logits)
