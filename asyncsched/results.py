"""What a caller gets back: chunks while it streams, completions and a result at the end."""

from __future__ import annotations

from dataclasses import dataclass

from .contract import TokenLogprobs
from .request import FinishReason, Request, Submission


@dataclass(slots=True)  # not frozen: that would be a tenth of what a streamed token costs
class Chunk:
    """News of one completion since the last chunk; unread news merges.

    Attributes:
        index: Which of the ``n`` completions.
        text: New text; may be empty while a character or a possible stop string is incomplete.
        token_ids: New tokens. Text boundaries need not fall on token boundaries.
        logprobs: One entry per token, if asked for.
        finish_reason: Set on the last chunk of this completion.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion.

    Attributes:
        index: Which of the ``n``.
        text: Its whole text.
        token_ids: Its tokens, the stop token included.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        stop_reason: The stop string or stop token id that ended it; ``None`` for end-of-sequence.
        logprobs: One entry per token, if asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: prompt, found in the prefix cache, and generated (over all completions)."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completions."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to the first completion, in seconds on the engine's clock (``None``: they did not)."""

    arrived: float
    admitted: float | None
    first_token: float | None
    finished: float | None

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def e2e(self) -> float | None:
        """From submission to the end, seconds."""
        return None if self.finished is None else self.finished - self.arrived


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request.

    Attributes:
        request_id: The caller's id, or the one the engine made up.
        prompt_token_ids: The prompt as tokens.
        completions: ``n`` of them, by index.
        usage: Tokens.
        times: Stamps.
        prompt_logprobs: One entry per prompt token (``None`` for the first), if asked for.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    usage: Usage
    times: RequestTimes
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first completion."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.completions[0].finish_reason


def usage_of(submission: Submission) -> Usage:
    """Tokens so far."""
    requests = submission.requests
    return Usage(
        prompt_tokens=len(requests[0].prompt) if requests else 0,
        cached_tokens=requests[0].cached if requests else 0,
        completion_tokens=sum(request.received for request in requests),
    )


def times_of(submission: Submission) -> RequestTimes:
    """Stamps so far."""
    first: Request | None = submission.requests[0] if submission.requests else None
    if first is None:
        return RequestTimes(submission.arrived_at, None, None, None)
    return RequestTimes(submission.arrived_at, first.admitted_at, first.first_token_at, first.finished_at)
