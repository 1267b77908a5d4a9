"""Early rejection of what could not be in time anyway."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost import StepWork
from ..errors import ConfigError
from ..policy import EngineView, RequestView


@dataclass(eq=False)
class Deadline:
    """Refuses a request at once if, by the forecast, its ``ttft_target`` or its ``deadline`` cannot be met.

    The prediction-based early rejection of Mooncake (Qin et al., FAST 2025): a refusal now is worth
    more to the caller than an answer too late, and the work saved lets others be in time. The forecast
    is for one engine that serves in arrival order and mixes prompts into decode steps: the prompts
    ahead and its own at the rate that the cost model predicts, or the time until a row is free if
    that is longer, then its output at that decode speed. Outputs are taken to be as long as those of
    the requests that finished last, on average.

    While the cost model has seen nothing it refuses nobody, and before anything has finished it takes
    outputs for short. Not for traffic that hits the cache most of the time, as cached prefixes are not
    deducted, nor with an order that lets urgent requests overtake the others.

    Args:
        factor: Refuse when the forecast is over this many times the time that is left; above 1 gives
            the benefit of the doubt.
        window: About how many finished requests the mean output length is taken over.
    """

    api_version = 1
    factor: float = 1.0
    window: int = 128

    def __post_init__(self) -> None:
        if self.factor <= 0 or self.window < 1:
            raise ConfigError("deadline: factor must be above 0 and window at least 1")
        self._output = 1.0  # mean output tokens
        self._finished = 0
        self._mark = (-1, -1, -1)  # step, free and decoding rows when the following was looked up
        self._prefill = 0  # prompt tokens that the running requests have left
        self._generated: list[int] = []  # and their outputs so far, longest first

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        """Refuse what is forecast to be late."""
        cost = view.cost  # asked for whoever comes: a fitted model learns from the first question on
        if request.ttft_target is None and request.deadline is None:
            return None
        mark = view.step, view.free_rows, view.decoding
        if mark != self._mark:  # of a burst between two steps only the first need look at all that run
            running = view.running
            self._mark = mark
            self._prefill = sum(other.prefill_left for other in running)
            self._generated = sorted((other.generated_tokens for other in running), reverse=True)
        rowless = max(view.waiting_count + 1 - view.free_rows, 0)  # who needs a row that is taken now
        rows = view.total_rows if rowless else view.decoding + 1
        context = int(rows * (view.context_tokens / view.decoding if view.decoding else request.prompt_tokens))
        chunk = max(view.token_budget - rows, 1)
        decode = cost.seconds(StepWork(rows, context))
        mixed = cost.seconds(StepWork(rows, context, ((0, chunk),)))
        prompts = view.waiting_tokens + request.prompt_tokens + self._prefill
        prompt_steps = prompts / chunk
        steps = max(prompt_steps, self._until_row(rowless) + request.prompt_tokens / chunk)
        first = steps * decode + prompt_steps * (mixed - decode)
        now, arrived = view.now, request.arrived_at
        if request.ttft_target is not None:
            late = self._late("first token", first, arrived + request.ttft_target - now)
            if late is not None:
                return late
        if request.deadline is not None:
            output = min(self._output, request.max_tokens)
            return self._late("end", first + output * decode, request.deadline - now)
        return None

    def on_finish(self, request: RequestView) -> None:
        """Learn from its length."""
        if request.generated_tokens:
            self._finished = min(self._finished + 1, self.window)
            self._output += (request.generated_tokens - self._output) / self._finished

    def _until_row(self, rowless: int) -> float:
        """Steps until the last of ``rowless`` requests gets a row, if every request generates as much as the mean."""
        generated = self._generated
        if not rowless or not generated:
            return 0.0
        turns, place = divmod(rowless - 1, len(generated))
        return turns * self._output + max(self._output - generated[place], 1.0)

    def _late(self, what: str, seconds: float, left: float) -> str | None:
        if seconds <= self.factor * left or not seconds:
            return None
        return f"its {what} is forecast in {seconds:.3g} s, but must come in {left:.3g} s; retry later or allow more time"
