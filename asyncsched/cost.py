"""How long a step takes: the work in it, and models that turn work into seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes, as far as its time depends on it.

    Attributes:
        decode_rows: Rows that decode, one token each.
        context_tokens: Tokens those rows attend to, summed.
        prefill: ``(start, size)`` of each prompt chunk: ``size`` tokens after ``start`` computed ones.
        contexts: Shortest and longest context among the decoding rows, if they are known: uneven rows
            make attention kernels wait for the longest.
    """

    decode_rows: int
    context_tokens: int
    prefill: Sequence[tuple[int, int]] = ()
    contexts: tuple[int, int] | None = None

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens, summed over the chunks."""
        return sum(size for _, size in self.prefill)

    @property
    def prefill_attention(self) -> float:
        """Pairs of a prompt token and a token it attends to, summed over the chunks."""
        return sum(size * (start + (size + 1) / 2) for start, size in self.prefill)

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        """What a linear model weighs, in the order of ``LinearCost``'s fields; 1 for the fixed part."""
        return 1.0, self.decode_rows, self.context_tokens, self.prefill_tokens, self.prefill_attention


class CostModel(Protocol):
    """Predicts step times. Pure, and quick: policies may ask several times per step."""

    def seconds(self, work: StepWork) -> float:
        """Time of a step with this work."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Step time as a linear function of the work: five numbers, in seconds (per row, token or pair).

    The form that serving papers use (Sarathi-Serve, OSDI 2024; Vidur, MLSys 2024): a fixed part, the
    products per row or token, and the attention per token of context.
    """

    fixed: float
    per_decode_row: float
    per_context_token: float
    per_prefill_token: float
    per_attention_pair: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Time of a step with this work."""
        seconds = self.fixed + self.per_decode_row * work.decode_rows + self.per_context_token * work.context_tokens
        if work.prefill:
            seconds += self.per_prefill_token * work.prefill_tokens + self.per_attention_pair * work.prefill_attention
        return seconds


class StepCosts:
    """The cost model that policies see: the one given, or one fitted to the running engine once anybody asks."""

    def __init__(self, given: CostModel | None) -> None:
        self._given = given
        self._fitted: FittedCost | None = None

    def model(self) -> CostModel:
        """The model. Before the first step a fitted one predicts 0 for everything."""
        if self._given is not None:
            return self._given
        if self._fitted is None:
            self._fitted = FittedCost()
        return self._fitted

    @property
    def learning(self) -> FittedCost | None:
        """The model that wants to be told of measured steps, if any."""
        return self._fitted


_SCALE = np.array([1.0, 1e-2, 1e-4, 1e-3, 1e-6])  # brings the five features to the same order of magnitude
_WIDEST = 5e3  # trace of the spread at the start


class FittedCost:
    """A ``LinearCost`` fitted to the steps of the running engine, step by step.

    Recursive least squares with exponential forgetting (Haykin, Adaptive Filter Theory, chapter 9).
    Coefficients are kept from going below zero, so that more work never looks cheaper.

    Args:
        forget: Weight of an observation one step later, just below 1.
    """

    def __init__(self, forget: float = 0.999) -> None:
        self.observed = 0
        self._forget = forget
        self._theta: NDArray[np.float64] = np.zeros(5)
        self._spread: NDArray[np.float64] = np.eye(5) * 1e3

    def observe(self, work: StepWork, seconds: float) -> None:
        """Take one measured step into account."""
        features = _features(work)
        # What the work does not vary must not be forgotten without end: the spread would grow beyond all bounds.
        forget = self._forget if np.trace(self._spread) < _WIDEST else 1.0
        gain = self._spread @ features
        gain /= forget + features @ gain
        self._theta += gain * (seconds - features @ self._theta)
        spread = (self._spread - np.outer(gain, features @ self._spread)) / forget
        self._spread = (spread + spread.T) / 2
        self.observed += 1

    def seconds(self, work: StepWork) -> float:
        """Time of a step with this work; 0 before anything was observed."""
        return float(_features(work) @ np.maximum(self._theta, 0.0))

    def linear(self) -> LinearCost:
        """The present fit as a fixed model."""
        return LinearCost(*(np.maximum(self._theta, 0.0) * _SCALE).tolist())


def _features(work: StepWork) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = np.array(work.features) * _SCALE
    return scaled
