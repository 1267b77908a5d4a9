"""Chunks as large as the strictest time-per-token target allows."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost import StepWork
from ..errors import ConfigError
from ..policy import EngineView, PrefillBudget


@dataclass(eq=False)
class SLO:
    """Each step computes as many prompt tokens as the tightest ``tpot_target`` of the decoding rows leaves time for.

    A row gets one token per step, so a step must take no longer than the target. The cost model says
    how long a step with a given chunk takes; bisection finds the largest that is short enough. Chunk
    sizes from a target are how Sarathi-Serve (Agrawal et al., OSDI 2024, section 4.3) picks its token
    budget, offline and once; here it is found anew for every step, as rows and contexts change.

    Not without targets: a step with no target to meet is filled up with prompts. A target that even
    decoding alone misses cannot be met by any chunk; prompts then go on at ``least`` tokens per step.

    Args:
        tpot_target: Seconds per token for requests that bring no target of their own; ``None`` sets none.
        chunk: Prompt tokens per step while the cost model does not know what prompts cost.
        least: Prompt tokens that every step may compute, so that prompts never starve.
    """

    api_version = 1
    tpot_target: float | None = None
    chunk: int = 256
    least: int = 32

    def __post_init__(self) -> None:
        if self.tpot_target is not None and self.tpot_target <= 0:
            raise ConfigError("slo: tpot_target must be above 0 seconds; leave it out for no target")
        if self.chunk < 1 or self.least < 1:
            raise ConfigError("slo: chunk and least must be at least 1 token")

    def budget(self, view: EngineView) -> PrefillBudget:
        """The largest prefill whose step still meets the target."""
        cost = view.cost  # also asked for when nobody has a target: a fitted model learns from then on
        most = max(view.token_budget - view.decoding, 1)
        target, start = self._situation(view)
        if target is None:
            return PrefillBudget(most, most)
        rows, context = view.decoding, view.context_tokens
        if cost.seconds(StepWork(0, 0, ((0, most),))) <= cost.seconds(StepWork(0, 0)):
            return PrefillBudget(self.chunk, self.chunk)  # prompts that cost nothing: the model has seen none yet
        low, high = min(self.least, most), most
        if cost.seconds(StepWork(rows, context, ((start, high),))) <= target:
            low = high
        while high - low > view.page_size:
            middle = (low + high) // 2
            if cost.seconds(StepWork(rows, context, ((start, middle),))) <= target:
                low = middle
            else:
                high = middle
        return PrefillBudget(low, low)

    def _situation(self, view: EngineView) -> tuple[float | None, int]:
        """The tightest target of the rows that decode; how much is computed of the first prompt that is under way."""
        target, start = None, 0
        running = view.running
        for request in running:
            wanted = self.tpot_target if request.tpot_target is None else request.tpot_target
            if wanted is not None and (target is None or wanted < target) and not request.prefill_left:
                target = wanted
        for request in reversed(running):  # prompts are computed in order of admission: those under way are the last
            left = request.prefill_left
            if not left:
                break
            start = request.prompt_tokens + request.generated_tokens - left
        return target, start
