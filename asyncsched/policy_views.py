"""What policies see: requests, the engine and cached prefixes, read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .cost import CostModel


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
    def own_pages(self) -> int:
        """Pages that only it holds: what it would free by losing its row (0 while it waits)."""
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
    def first_token_at(self) -> float | None:
        """When its first token arrived, on the engine's clock."""
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
    def ttft_target(self) -> float | None:
        """Seconds from submission in which the first token should come."""
        ...

    @property
    def tpot_target(self) -> float | None:
        """Seconds that each further token should take at most."""
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
    def total_rows(self) -> int:
        """Rows of the engine."""
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
    def context_tokens(self) -> int:
        """Tokens that the decoding rows attend to, summed."""
        ...

    @property
    def waiting(self) -> Sequence[RequestView]:
        """Requests that wait, in arrival order."""
        ...

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait, cached or not."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        ...

    @property
    def cost(self) -> CostModel:
        """Predicts step times: the engine's ``cost_model``, or one fitted to its steps as they come."""
        ...

    def cached_prefix(self, request: RequestView) -> int:
        """Prompt tokens of a waiting request that are in the cache now."""
        ...

    def prefixes(self, request: RequestView) -> Sequence[PrefixView]:
        """The cached runs that a waiting request would hit now, from the start of its prompt."""
        ...

    def shared_prefix(self, first: RequestView, second: RequestView) -> int:
        """Leading tokens that two requests have in common and may share through the cache, cached or not.

        It stays the same while both wait or have their prompts computed; 0 if one of them does not.
        """
        ...


class PrefixView(Protocol):
    """A run of cached pages, read-only."""

    @property
    def tokens(self) -> int:
        """Tokens in this run."""
        ...

    @property
    def depth(self) -> int:
        """Tokens from the start of the prompt to the end of this run."""
        ...

    @property
    def last_used(self) -> int:
        """Step of the last hit."""
        ...

    @property
    def used_at(self) -> float:
        """Time of the last use, on the engine's clock."""
        ...

    @property
    def priority(self) -> int:
        """Priority of the request that used it last."""
        ...

    @property
    def tenant(self) -> str:
        """Tenant of the request that used it last."""
        ...

    @property
    def program_id(self) -> str | None:
        """Program of the request that used it last."""
        ...

    @property
    def created(self) -> int:
        """Step that computed it."""
        ...

    @property
    def hits(self) -> int:
        """How often it was matched."""
        ...
