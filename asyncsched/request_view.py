"""The read-only face of a request that policies see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .request import Request


class RequestFace:
    """A request as ``policy_views.RequestView``; what never changes is a slot, which sorts faster than a property."""

    __slots__ = (
        "_request", "arrived_at", "deadline", "max_tokens", "number", "priority", "program_id", "prompt_tokens", "request_id",
        "tenant", "tpot_target", "ttft_target",
    )  # fmt: skip

    _request: Request
    number: int
    request_id: str
    prompt_tokens: int
    max_tokens: int
    arrived_at: float
    priority: int
    tenant: str
    deadline: float | None
    ttft_target: float | None
    tpot_target: float | None
    program_id: str | None

    def __init__(self, request: Request) -> None:
        write = super().__setattr__
        submission, options = request.submission, request.submission.options
        write("_request", request)
        write("number", request.number)
        write("request_id", submission.request_id)
        write("prompt_tokens", len(request.prompt))
        write("max_tokens", request.max_new)
        write("arrived_at", submission.arrived_at)
        write("deadline", None if options.deadline is None else submission.arrived_at + options.deadline)
        for name in ("priority", "tenant", "ttft_target", "tpot_target", "program_id"):
            write(name, getattr(options, name))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"policies cannot change requests: {name} is read-only")

    def __repr__(self) -> str:
        return f"<request {self.number} {self.request_id!r}: {self.prompt_tokens} + {self.generated_tokens}/{self.max_tokens}>"

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far."""
        return self._request.received

    @property
    def prefill_left(self) -> int:
        """Prompt tokens still to compute."""
        return len(self._request.fill) - self._request.computed

    @property
    def own_pages(self) -> int:
        """Pages that only it holds."""
        return self._request.own_pages

    @property
    def preemptions(self) -> int:
        """How often it has lost its row."""
        return self._request.preemptions

    @property
    def first_token_at(self) -> float | None:
        """When its first token arrived."""
        return self._request.first_token_at

    @property
    def waiting_since_step(self) -> int:
        """Number of the step that was next when it began to wait."""
        return self._request.waiting_since_step

    @property
    def hints(self) -> Mapping[str, Any]:
        """Whatever the caller or a policy attached."""
        return self._request.hints
