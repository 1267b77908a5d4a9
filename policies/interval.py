"""Prompts in every k-th step only, and nothing but decode in between."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, PrefillBudget, StepReport


@dataclass(eq=False)
class Interval:
    """While rows decode, prompts are computed in at most every ``every``-th step; if nothing decodes, at once.

    The steps in between are pure decode steps: they replay one captured graph, and their length, the
    time per token, is steady. Prompts that come meanwhile are computed together. SGLang's
    ``prefill_decode_interval`` and the prefill interval of LMDeploy's PyTorch engine. Not for long
    prompts: one of several chunks needs ``every`` steps for each, and the first token comes late.

    Args:
        every: Steps from one step with prompts to the next.
        chunk: Most prompt tokens of one request in such a step; ``None`` is the whole step.
    """

    api_version = 1
    every: int = 8
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1 or (self.chunk is not None and self.chunk < 1):
            raise ConfigError("interval: every and chunk must be at least 1; leave chunk out for no limit")
        self._opened = -self.every  # the last step that might compute prompts

    def budget(self, view: EngineView) -> PrefillBudget:
        """The whole step every ``every`` steps, nothing otherwise."""
        if view.decoding and self._opened < view.step < self._opened + self.every:
            return PrefillBudget(0, 1)
        self._opened = view.step
        return PrefillBudget(view.token_budget, self.chunk or view.token_budget)

    def on_step(self, report: StepReport) -> None:
        """Keep the door open if nobody could come in: no row was free, say."""
        if report.step == self._opened and not report.prefill:
            self._opened -= self.every
