"""The policy protocols: what a plugin may decide, how often it is asked, and what it must never answer.

A policy gets read-only views (``policy_views``) and returns decisions; the core checks every answer
and owns correctness. All hooks but ``annotate`` and ``run`` are called on the engine's loop thread
and must neither block nor await; they must be deterministic in what the views show (no clock of
their own, no iteration over sets). A policy that raises or answers outside its contract is set aside
for that step: the mistake is counted and logged, and the engine does what it would do without the
policy (``strict_policies=True`` raises instead). One that takes longer than ``policy_allowance``
seconds in a call counts a fault too, and is set aside for a while if it goes on like that.

Options of a policy are the keyword arguments of its class; the bundled ones are dataclasses, whose
fields are the options.

Besides its own hook, every kind of policy may have:

- ``on_submit(request: RequestView)``: a request has entered the waiting set; once per request.
- ``on_step(report: StepReport)``: a step has completed; once per step.
- ``on_finish(request: RequestView)``: a request that was submitted has ended, whatever way; once.
- ``async run(view: EngineView)``: a background coroutine in the engine's task group, started with the
  engine (or with ``set_policy``) and cancelled with it. If it raises, that is reported and the policy
  goes on without it.
- ``parts``: a sequence of further policies that this one wraps; they get these hooks, too.
- ``api_version``: the version of these hooks it was written for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .policy_views import EngineView as EngineView
from .policy_views import PrefixView as PrefixView
from .policy_views import RequestView as RequestView

API_VERSION = 1
"""Raised when a hook changes meaning; additions do not raise it."""


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """How one step's token budget is split between decode and prefill.

    Attributes:
        tokens: Prompt tokens in this step, over all requests. The core lowers it to the token
            budget less one token per decoding row.
        chunk: Most prompt tokens of one request.
        decode: ``False`` leaves the decoding rows out of this step if it computes any prompt
            tokens; their share of the token budget is then free for prompts.
    """

    tokens: int
    chunk: int
    decode: bool = True


@dataclass(frozen=True, slots=True)
class Service:
    """Tokens computed for somebody.

    Attributes:
        prompt_tokens: Prompt tokens, not counting those found in the cache.
        output_tokens: Sampled tokens.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step served; given to ``on_step`` once per completed step.

    Attributes:
        step: Its number.
        seconds: How long the device took.
        prefill: Request number → prompt tokens computed.
        sampled: Numbers of the requests that got an output token.
        tenants: Tenant → what it was served in this step.
    """

    step: int
    seconds: float
    prefill: Mapping[int, int]
    sampled: Sequence[int]
    tenants: Mapping[str, Service]

    @property
    def served(self) -> dict[int, int]:
        """Request number → tokens computed for it, prompt tokens and sampled tokens."""
        served = dict(self.prefill)
        for number in self.sampled:
            served[number] = served.get(number, 0) + 1
        return served


class SchedulingPolicy(Protocol):
    """Who runs next. Only ``order`` is required.

    Optional hooks, looked up once when the policy is loaded:

    - ``budget(view)`` and ``victims(running, pages, view)``: as in ``BudgetPolicy`` and
      ``PreemptionPolicy``; used if the engine was given no such policy of its own.
    - ``preempt_for(request: RequestView, running: Sequence[RequestView], view: EngineView) ->
      Iterable[RequestView]``: called when the first request of the order does not fit for want of a
      row or of pages: who may lose its row for it, first victim first. The core takes as few as
      needed, and none if all of them would not be enough or if a victim was preempted
      ``max_preemptions`` times. Answering nothing lets the request wait.
    """

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """Order the waiting requests for this step.

        Called at most once per planned step, when a row and budget are free (with ``preempt_for``
        also when they are not). ``waiting`` is in arrival order. The answer is pulled lazily until
        the budget is spent or a request does not fit, so it may be a generator. Every answer must be
        one of ``waiting``, none twice; what is left out waits.
        """
        ...


class BudgetPolicy(Protocol):
    """How much prefill goes into a step."""

    def budget(self, view: EngineView) -> PrefillBudget:
        """The split for the step being planned. Called once per planned step that has prompts to compute."""
        ...


class PreemptionPolicy(Protocol):
    """Who gives up its row when pages run out (not with ``reserve="full"``)."""

    def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]:
        """First victim first, when ``pages`` are missing for the rows that decode.

        ``running`` is in order of admission. Those left out follow, latest admitted first, and those
        preempted ``max_preemptions`` times come last. Every answer must be one of ``running``, none twice.
        """
        ...


class EvictionPolicy(Protocol):
    """Which cached prefix goes first. Only ``key`` is required.

    Optional hooks:

    - ``begin(view: EngineView) -> bool``: called before a round of evictions. Answering true has every
      key read again, which costs a call per unused prefix: needed when keys may have shrunk.
    - ``on_evict(prefix: PrefixView)``: a prefix, or its tail, goes.
    """

    def key(self, prefix: PrefixView) -> Any:
        """A sortable key; the smallest is evicted first.

        Asked when a prefix loses its last user and again when it is about to go. If it has grown in
        between the prefix stays; that it has shrunk shows only after ``begin``.
        """
        ...


class AdmissionPolicy(Protocol):
    """Who may enter at all.

    Optional hook: ``async annotate(request: RequestView) -> Mapping[str, Any]`` returns hints to
    attach (a predicted length, say). It runs beside the engine, before the request waits; any kind of
    policy may have it.
    """

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        """``None`` to accept, or the reason for refusing. Called once per submission."""
        ...


class Annotating(Protocol):
    """A policy that attaches hints to requests before they wait."""

    async def annotate(self, request: RequestView) -> Mapping[str, Any]:
        """Hints to merge into ``request.hints``."""
        ...
