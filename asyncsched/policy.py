"""The policy protocols: what a plugin may decide, and what it sees.

A policy gets read-only views and returns decisions; the core checks every answer and owns
correctness. All hooks but ``annotate`` are called on the loop thread and must neither block nor
await; they must be deterministic in what the views show (no clock of their own, no iteration over
sets). A policy that raises or answers outside its contract is set aside for that step: the
mistake is counted and logged, and arrival order is used (``strict_policies=True`` raises instead).

Options of a policy are the keyword arguments of its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

API_VERSION = 1
"""Raised when a hook changes meaning; additions do not raise it."""


class RequestView(Protocol):
    """One request, read-only."""

    @property
    def number(self) -> int:
        """Arrival number; lower arrived earlier."""
        ...

    @property
    def request_id(self) -> str:
        """The caller's id."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most output tokens it may generate."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far."""
        ...

    @property
    def prefill_left(self) -> int:
        """Prompt tokens still to compute (not looking at the cache while it waits)."""
        ...

    @property
    def preemptions(self) -> int:
        """How often it has lost its row."""
        ...

    @property
    def arrived_at(self) -> float:
        """When it was submitted, on the engine's clock (seconds)."""
        ...

    @property
    def waiting_since_step(self) -> int:
        """Number of the step that was next when it began to wait."""
        ...

    @property
    def priority(self) -> int:
        """Lower is served first; 0 by default."""
        ...

    @property
    def tenant(self) -> str:
        """Who pays; empty by default."""
        ...

    @property
    def deadline(self) -> float | None:
        """When it must have finished, on the engine's clock."""
        ...

    @property
    def program_id(self) -> str | None:
        """Requests of one program (agent session, say) share it."""
        ...

    @property
    def hints(self) -> Mapping[str, Any]:
        """Whatever the caller or ``annotate`` attached."""
        ...


class EngineView(Protocol):
    """The engine at a planning moment, read-only."""

    @property
    def step(self) -> int:
        """Number of the step being planned."""
        ...

    @property
    def now(self) -> float:
        """The engine's clock, seconds."""
        ...

    @property
    def token_budget(self) -> int:
        """Most tokens this step may compute."""
        ...

    @property
    def decoding(self) -> int:
        """Rows that decode in this step, one token each."""
        ...

    @property
    def free_rows(self) -> int:
        """Rows a new request could take."""
        ...

    @property
    def free_pages(self) -> int:
        """Pages that are free now."""
        ...

    @property
    def evictable_pages(self) -> int:
        """Pages of cached prefixes that nobody uses."""
        ...

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a row, in order of admission."""
        ...

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        ...

    def cached_prefix(self, request: RequestView) -> int:
        """Prompt tokens of a waiting request that are in the cache now."""
        ...


class PrefixView(Protocol):
    """A run of cached pages, read-only."""

    @property
    def depth(self) -> int:
        """Tokens from the start of the prompt to the end of this run."""
        ...

    @property
    def last_used(self) -> int:
        """Step of the last hit."""
        ...

    @property
    def created(self) -> int:
        """Step that computed it."""
        ...

    @property
    def hits(self) -> int:
        """How often it was matched."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """How much prefill one step may do.

    Attributes:
        tokens: Prompt tokens in this step, over all requests. The core lowers it to the token
            budget less one token per decoding row.
        chunk: Most prompt tokens of one request.
    """

    tokens: int
    chunk: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step served; given to ``on_step`` once per completed step.

    Attributes:
        step: Its number.
        served: Request number → tokens computed for it (prompt tokens and sampled tokens).
    """

    step: int
    served: Mapping[int, int]


class SchedulingPolicy(Protocol):
    """Who runs next. Only ``order`` is required.

    Optional hooks, looked up once when the policy is loaded:

    - ``budget(view: EngineView) -> PrefillBudget``: called once per planned step.
    - ``victims(running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]``:
      who gives up its row, first victim first, when ``pages`` are missing (only with
      ``reserve="expected"``). Pulled as far as needed; those left out follow, latest admitted first.
    - ``on_submit(request: RequestView)``, ``on_step(report: StepReport)``,
      ``on_finish(request: RequestView)``: bookkeeping.
    """

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """Order the waiting requests for this step.

        Called when a row and budget are free. ``waiting`` is in arrival order. The answer is
        pulled lazily until the budget is spent or a request does not fit, so it may be a
        generator. Every answer must be one of ``waiting``, none twice; what is left out waits.
        """
        ...


class EvictionPolicy(Protocol):
    """Which cached prefix goes first."""

    def key(self, prefix: PrefixView) -> Any:
        """A sortable key; the smallest is evicted first.

        Asked when a prefix loses its last user and again when it is about to go; it may grow in
        between, but must not shrink.
        """
        ...


class AdmissionPolicy(Protocol):
    """Who may enter at all.

    Optional hook: ``async annotate(request: RequestView) -> Mapping[str, Any]`` returns hints to
    attach (a predicted length, say). It runs beside the engine, before the request waits.
    """

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        """``None`` to accept, or the reason for refusing."""
        ...
