"""Prefill first: prompts are computed alone, and rows decode when no prompt can be."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, PrefillBudget


@dataclass(eq=False)
class PrefillFirst:
    """While prompts wait and rows are free, steps compute prompts and nothing else.

    What vLLM v0 did and SGLang does by default; Sarathi-Serve (Agrawal et al., OSDI 2024) counts Orca
    (Yu et al., OSDI 2022) among these schedulers, too. Rows fill up as fast as they can, so that first
    tokens come early and decode steps are large. Not for interactive streams: each prompt stalls
    everybody's next token (see ``decode-first``).

    Args:
        max_prefill_steps: After so many steps of prompts in a row, the rows decode once. Neither vLLM
            nor SGLang has such a bound by default, and a flood of prompts stops their streams; a very
            large number does as they do.
    """

    api_version = 1
    max_prefill_steps: int = 16

    def __post_init__(self) -> None:
        if self.max_prefill_steps < 1:
            raise ConfigError("prefill-first: max_prefill_steps must be at least 1; a large number is no bound")
        self._run = 0  # steps in a row in which prompts went first
        self._last = 0  # the last of them

    def budget(self, view: EngineView) -> PrefillBudget:
        """The whole step, without the rows that decode, unless it is their turn."""
        whole = view.token_budget
        if view.step > self._last + 1:  # not asked in between: a step without prompts
            self._run = 0
        if view.decoding and self._run >= self.max_prefill_steps:
            return PrefillBudget(0, 1)  # leaves `_last` behind, which begins a new run
        self._run = self._run + 1 if view.decoding else 0
        self._last = view.step
        return PrefillBudget(whole, whole, decode=False)
