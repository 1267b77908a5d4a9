"""Skip-join multi-level feedback queue."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, RequestView, StepReport
from ._rota import Rota


@dataclass(eq=False)
class MLFQ:
    """Requests start high and sink level by level as they are served, so that short ones pass long ones unannounced.

    The skip-join queue of FastServe (Wu et al., arXiv 2305.05920, 2023): shortest first without knowing
    lengths, except that the prompt is known. A request joins the first level whose quantum covers the
    uncached part of its prompt, sinks when what was computed for it exceeds its level's quantum, and is
    lifted to the top with a fresh quantum when it has waited ``age_steps`` steps. A waiting request
    takes the row of one at least ``gap`` levels below if it does not fit otherwise; how often one may
    lose its row is the engine's ``max_preemptions``. If pages run out the lowest level gives way.

    Not where prompts are long and answers short, which makes taking rows dear: what was computed
    stays cached only while there is room. ``gap=0`` takes none. Not for lasting overload with a small
    pool, either: every newcomer stands above what runs, so everybody is preempted in turn, computed
    again and again, and little is finished.

    Args:
        quantum: Tokens of service that the top level covers.
        growth: How many times as many each next level covers.
        levels: Number of levels; the last has no end.
        output_weight: What an output token counts, in prompt tokens.
        gap: How many levels lower one must be to lose its row to a waiting request; 0 is never.
        age_steps: Steps after which a waiting request is lifted to the top.
    """

    api_version = 1
    quantum: int = 256
    growth: float = 2.0
    levels: int = 8
    output_weight: float = 2.0
    gap: int = 2
    age_steps: int = 256

    def __post_init__(self) -> None:
        if self.quantum < 1 or self.levels < 1 or self.age_steps < 1 or self.gap < 0:
            raise ConfigError("mlfq: quantum, levels and age_steps must be at least 1, gap at least 0")
        if not self.growth > 1 or not self.output_weight > 0:
            raise ConfigError("mlfq: growth must be above 1 and output_weight above 0")
        self._quanta = [self.quantum * self.growth**level for level in range(self.levels - 1)]
        self._level: dict[int, int] = {}
        self._attained: dict[int, float] = {}
        self._rota = Rota(16)
        if self.gap:  # else there is no such hook: with it the order is asked for in full steps, too
            self.preempt_for = self._lower_levels

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """Highest level first; within one by arrival."""
        level = self._level
        for request in waiting:
            if request.number not in level:
                self.on_submit(request)
        starved = view.step - self.age_steps
        for request in self._rota.next(waiting):
            if request.waiting_since_step <= starved:
                level[request.number], self._attained[request.number] = 0, 0.0
            elif not self._attained[request.number]:
                level[request.number] = self._level_of(request.prompt_tokens - view.cached_prefix(request))
        return sorted(waiting, key=lambda request: level[request.number])

    def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]:
        """Lowest level first, then latest admitted."""
        latest_first = running[::-1]
        return sorted(latest_first, key=lambda request: -self._level.get(request.number, 0))

    def on_submit(self, request: RequestView) -> None:
        """Skip the levels whose quantum its prompt exceeds."""
        self._level[request.number] = self._level_of(request.prompt_tokens)
        self._attained[request.number] = 0.0

    def on_step(self, report: StepReport) -> None:
        """Count what was served, and demote."""
        attained, level, quanta = self._attained, self._level, [*self._quanta, float("inf")]
        served = dict.fromkeys(report.sampled, self.output_weight)
        for number, computed in report.prefill.items():
            served[number] = served.get(number, 0.0) + computed
        for number, tokens in served.items():
            if number in attained:  # else it has ended
                attained[number] += tokens
                if attained[number] > quanta[level[number]]:
                    level[number] = self._level_of(attained[number])

    def on_finish(self, request: RequestView) -> None:
        """Forget the request."""
        self._level.pop(request.number, None)
        self._attained.pop(request.number, None)

    def _level_of(self, tokens: float) -> int:
        return bisect_left(self._quanta, tokens)

    def _lower_levels(self, request: RequestView, running: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        lowest = self._level.get(request.number, 0) + self.gap
        return [one for one in self.victims(running, 0, view) if self._level.get(one.number, 0) >= lowest]
