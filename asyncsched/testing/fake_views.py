"""What policies see, made by hand: for unit tests of a policy without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..cost import CostModel, LinearCost
from ..policy_views import PrefixView, RequestView

COST = LinearCost(fixed=5e-3, per_decode_row=2e-5, per_context_token=1e-8, per_prefill_token=2e-5, per_attention_pair=1e-9)
"""Step times in the range of a small model on one device."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FakeRequest:
    """A request as ``policy_views.RequestView``, with every attribute at will.

    Like the real ones it is compared by identity.

    Example::

        short, long = FakeRequest(number=1, prompt_tokens=10), FakeRequest(number=2, prompt_tokens=9000)
        assert list(policy.order([short, long], FakeView())) == [short, long]
    """

    number: int
    prompt_tokens: int = 16
    max_tokens: int = 16
    generated_tokens: int = 0
    prefill_left: int = -1  # the whole prompt, and what was generated
    own_pages: int = 0
    preemptions: int = 0
    arrived_at: float = 0.0
    first_token_at: float | None = None
    waiting_since_step: int = 1
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None
    program_id: str | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""

    def __post_init__(self) -> None:
        if self.prefill_left < 0:
            change(self, prefill_left=self.prompt_tokens + self.generated_tokens)
        change(self, hints=MappingProxyType(dict(self.hints)), request_id=self.request_id or f"request-{self.number}")


@dataclass(frozen=True, eq=False, kw_only=True)
class FakePrefix:
    """A cached run as ``policy_views.PrefixView``, with every attribute at will; compared by identity."""

    tokens: int = 16
    depth: int = 16
    last_used: int = 0
    used_at: float = 0.0
    priority: int = 0
    tenant: str = ""
    program_id: str | None = None
    created: int = 0
    hits: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class FakeView:
    """An engine at a planning moment as ``policy_views.EngineView``, with every attribute at will.

    Rows, decoding requests and sums follow from ``running`` and ``waiting``.

    Attributes:
        cached: Request number → what ``cached_prefix`` answers; 0 for others.
        paths: Request number → what ``prefixes`` answers; nothing for others.
        shared: Two request numbers, ascending → what ``shared_prefix`` answers; for others what is cached of both.
    """

    step: int = 1
    now: float = 0.0
    token_budget: int = 1024
    total_rows: int = 8
    free_pages: int = 64
    evictable_pages: int = 0
    total_pages: int = 64
    page_size: int = 16
    running: Sequence[FakeRequest] = ()
    waiting: Sequence[FakeRequest] = ()
    max_model_len: int = 4096
    cost: CostModel = COST
    cached: Mapping[int, int] = field(default_factory=dict)
    paths: Mapping[int, Sequence[PrefixView]] = field(default_factory=dict)
    shared: Mapping[tuple[int, int], int] = field(default_factory=dict)
    decoding: int = field(init=False)
    context_tokens: int = field(init=False)
    free_rows: int = field(init=False)
    waiting_count: int = field(init=False)
    waiting_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        decoding = [request for request in self.running if not request.prefill_left]
        change(
            self,
            decoding=len(decoding),
            context_tokens=sum(request.prompt_tokens + request.generated_tokens for request in decoding),
            free_rows=max(0, self.total_rows - len(self.running)),
            waiting_count=len(self.waiting),
            waiting_tokens=sum(request.prompt_tokens for request in self.waiting),
        )

    def cached_prefix(self, request: RequestView) -> int:
        """Prompt tokens of a request that are cached."""
        return self.cached.get(request.number, 0)

    def prefixes(self, request: RequestView) -> Sequence[PrefixView]:
        """The cached runs that a request would hit."""
        return self.paths.get(request.number, ())

    def shared_prefix(self, first: RequestView, second: RequestView) -> int:
        """Leading tokens that two requests have in common."""
        known = self.shared.get((min(first.number, second.number), max(first.number, second.number)))
        return min(self.cached_prefix(first), self.cached_prefix(second)) if known is None else known


def change(view: FakeRequest | FakePrefix | FakeView, **values: Any) -> None:
    """Let time pass for a view: policies cannot write to it, but what it shows may change between two questions."""
    for name, value in values.items():
        object.__setattr__(view, name, value)
