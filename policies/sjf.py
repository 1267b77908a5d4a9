"""Shortest job first, with ageing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..policy import RequestView
from ._keyed import KeyedOrder, KeyedQueue
from ._output_length import annotator, expected_output


@dataclass(eq=False)
class SJF(KeyedOrder):
    """The request that is expected to need least goes first, which makes the mean latency as small as an order can.

    Shortest job first by predicted output length, as in Fu et al. (vllm-ltr, NeurIPS 2024), who rank
    requests by a small model, and Qiu et al. (SSJF, 2024). The length is the hint ``output_tokens``, else
    what ``predictor`` says, else ``max_tokens``. The gain stands and falls with the prediction: by
    ``max_tokens`` alone it is an order by what callers ask for, not by what they get. With free rows
    for everybody no order changes anything.

    Not for where the longest answers matter most: they pay for the others, within the bound that
    ``age_tokens`` sets.

    Args:
        prompt_weight: Output tokens that a prompt token counts for; prompts are computed many tokens
            at a time, so one costs much less than an output token.
        age_tokens: Output tokens by which a request counts as shorter for each step it waits. A request
            is overtaken only by those that come within (difference in size) / ``age_tokens`` steps.
        predictor: ``async (RequestView) -> float``, the expected output tokens, or its dotted path
            ``"package.module:function"``. Asked once, before the request waits.
    """

    api_version = 1
    prompt_weight: float = 0.1
    age_tokens: float = 1.0
    predictor: Any = None

    def __post_init__(self) -> None:
        if not self.age_tokens > 0:
            raise ConfigError("sjf: age_tokens must be above 0, or long requests would starve")
        if not self.prompt_weight >= 0:
            raise ConfigError("sjf: prompt_weight must be at least 0; 0 looks at the output only")
        if self.predictor is not None:  # without one there is no such hook, which would cost every request a turn
            self.annotate = annotator(self.predictor, "sjf")
        self._queue = KeyedQueue(self._key)

    def _key(self, request: RequestView) -> float:
        # All age alike, so that the order of two requests never changes and the key need not be renewed.
        size = expected_output(request) + self.prompt_weight * request.prompt_tokens
        return size + self.age_tokens * request.waiting_since_step
