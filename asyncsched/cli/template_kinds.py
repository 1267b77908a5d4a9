"""What ``new-policy`` writes for each kind of policy: a policy that works, and a test of what it is for.

Templates for ``string.Template``: ``$name`` is the policy, ``$module`` and ``$cls`` its module and class.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """What differs between kinds.

    Attributes:
        option: The engine option.
        does: What the policy that is written does, a sentence.
        example: One of its options with a value, as in a dictionary.
        policy: ``__init__.py``.
        test: Its test module; ``$rules`` is the test that every policy has.
    """

    option: str
    does: str
    example: str
    policy: str
    test: str


_ORDER = Kind(
    "policy",
    "Lower priority numbers go first, and waiting counts, so that nobody starves.",
    '"patience": 50',
    '''\
"""$does"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncsched import ConfigError
from asyncsched.policy import EngineView, RequestView


@dataclass(eq=False)
class $cls:
    """$does

    Args:
        patience: Steps of waiting that make up for one class of priority.
    """

    api_version = 1  # without an annotation, so that it is no option
    patience: int = 100

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError("patience must be at least 1 step")

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """The waiting requests, the next to run first; ties stay in arrival order."""
        # All age alike, so that it is enough to count from the step a wait began in.
        return sorted(waiting, key=lambda r: self.patience * r.priority + r.waiting_since_step)
''',
    '''\
"""Tests of $name."""

import asyncio

from asyncsched import ExecutorLimits
from asyncsched.testing import ScriptedRun, check_policy

from $module import $cls

ONE_ROW = ExecutorLimits(max_rows=1, pages=64, page_size=4, max_model_len=128, vocab_size=1000)


$rules


def test_lower_priority_numbers_go_first() -> None:
    """The first request has the only row while the others come."""

    async def joined() -> list[int]:
        async with ScriptedRun(ONE_ROW, policy="$name") as run:
            streams = [await run.submit([1, 2, 3], max_tokens=2, priority=p) for p in (0, 2, 1)]
            await run.steps(12)
            assert all(stream.finish_reason == "length" for stream in streams)
            return [join.number for plan in run.plans for join in plan.joins]

    assert asyncio.run(joined()) == [1, 3, 2]
''',
)

_BUDGET = Kind(
    "budget_policy",
    "While requests decode, prompts get only a share of each step.",
    '"share": 0.25',
    '''\
"""$does"""

from dataclasses import dataclass

from asyncsched import ConfigError
from asyncsched.policy import EngineView, PrefillBudget


@dataclass(eq=False)
class $cls:
    """$does

    Args:
        share: Part of the step's token budget, above 0 and at most 1.
    """

    api_version = 1  # without an annotation, so that it is no option
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError("share must be above 0 and at most 1")

    def budget(self, view: EngineView) -> PrefillBudget:
        """Most prompt tokens in this step, altogether and of one request."""
        share = self.share if view.decoding else 1.0
        tokens = max(1, int(share * view.token_budget))
        return PrefillBudget(tokens, chunk=tokens)
''',
    '''\
"""Tests of $name."""

import asyncio

from asyncsched.testing import ScriptedRun, check_policy

from $module import $cls


$rules


def test_prompts_get_half_of_a_step_while_a_request_decodes() -> None:
    """Two prompts of 32 tokens: the second comes while the first one is answered."""

    async def chunks() -> list[int]:
        async with ScriptedRun(budget_policy="$name", token_budget=32) as run:
            first = await run.submit(list(range(32)), max_tokens=20)
            await run.steps(4)
            second = await run.submit(list(range(50, 82)), max_tokens=20)
            await run.steps(4)
            assert first.finish_reason is second.finish_reason is None
            return [len(chunk.tokens) for plan in run.plans for chunk in plan.prefill]

    assert asyncio.run(chunks()) == [32, 16, 16]
''',
)

_PREEMPTION = Kind(
    "preemption_policy",
    "Whoever has generated least gives way first, but nobody who is almost done.",
    '"almost_done": 32',
    '''\
"""$does"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncsched import ConfigError
from asyncsched.policy import EngineView, RequestView


@dataclass(eq=False)
class $cls:
    """$does

    Args:
        almost_done: Tokens still to generate at which a request is spared.
    """

    api_version = 1  # without an annotation, so that it is no option
    almost_done: int = 8

    def __post_init__(self) -> None:
        if self.almost_done < 0:
            raise ConfigError("almost_done must be at least 0 tokens")

    def victims(
        self, running: Sequence[RequestView], pages: int, view: EngineView
    ) -> Iterable[RequestView]:
        """The running requests, first victim first; of equals, the latest admitted."""
        latest_first = running[::-1]
        return sorted(latest_first, key=self._loss)

    def _loss(self, request: RequestView) -> tuple[bool, int]:
        left = request.max_tokens - request.generated_tokens
        return left <= self.almost_done, request.generated_tokens
''',
    '''\
"""Tests of $name."""

import asyncio

from asyncsched import ExecutorLimits
from asyncsched.testing import ScriptedRun, check_policy

from $module import $cls

FEW_PAGES = ExecutorLimits(max_rows=2, pages=16, page_size=4, max_model_len=128, vocab_size=1000)


$rules


def test_a_request_that_is_almost_done_is_spared() -> None:
    """The engine itself would preempt the second request, which came last."""

    async def joined() -> list[int]:
        policy = {"name": "$name", "almost_done": 8}
        async with ScriptedRun(FEW_PAGES, reserve="prompt", preemption_policy=policy) as run:
            first = await run.submit(list(range(20)), max_tokens=40)
            await run.steps(12)
            second = await run.submit(list(range(50, 70)), max_tokens=8)
            await run.steps(60)
            assert first.finish_reason == second.finish_reason == "length"
            return [join.number for plan in run.plans for join in plan.joins]

    assert asyncio.run(joined()) == [1, 2, 1]
''',
)

_EVICTION = Kind(
    "eviction_policy",
    "Least recently used prefixes go first, and each hit makes one look younger.",
    '"hit_steps": 256',
    '''\
"""$does"""

from dataclasses import dataclass

from asyncsched import ConfigError
from asyncsched.policy import PrefixView


@dataclass(eq=False)
class $cls:
    """$does

    Args:
        hit_steps: Steps by which a hit makes a prefix look younger.
        most_hits: Hits that count, so that former favourites go in the end.
    """

    api_version = 1  # without an annotation, so that it is no option
    hit_steps: int = 64
    most_hits: int = 16

    def __post_init__(self) -> None:
        if self.hit_steps < 0 or self.most_hits < 0:
            raise ConfigError("hit_steps and most_hits must not be below 0")

    def key(self, prefix: PrefixView) -> tuple[int, int]:
        """The smallest is evicted first; of equals, the deeper one."""
        hits = min(prefix.hits, self.most_hits)
        return prefix.last_used + self.hit_steps * hits, -prefix.depth
''',
    '''\
"""Tests of $name."""

import asyncio

from asyncsched import ExecutorLimits
from asyncsched.testing import ScriptedRun, check_policy

from $module import $cls

FEW_PAGES = ExecutorLimits(max_rows=2, pages=16, page_size=4, max_model_len=128, vocab_size=1000)


$rules


def test_a_popular_prefix_stays() -> None:
    """The engine itself would evict the first prompt, which was used longest ago."""
    popular, once = list(range(20)), list(range(50, 70))

    async def cached() -> int | None:
        async with ScriptedRun(FEW_PAGES, eviction_policy="$name") as run:
            for prompt in (popular, popular, once, list(range(100, 130)), popular):
                stream = await run.submit(prompt, max_tokens=1)
                await run.steps(2)
            return (await stream.result()).usage.cached_tokens

    assert asyncio.run(cached()) == 16
''',
)

_ADMISSION = Kind(
    "admission_policy",
    "Refuses requests while too many prompt tokens wait already.",
    '"tokens": 20000',
    '''\
"""$does"""

from dataclasses import dataclass

from asyncsched import ConfigError
from asyncsched.policy import EngineView, RequestView


@dataclass(eq=False)
class $cls:
    """$does

    Args:
        tokens: Waiting prompt tokens from which on nobody is let in.
    """

    api_version = 1  # without an annotation, so that it is no option
    tokens: int = 100_000

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError("tokens must be at least 1")

    def admit(self, request: RequestView, view: EngineView) -> str | None:
        """``None`` lets the request in; a text refuses it and tells the caller why."""
        if view.waiting_tokens < self.tokens:
            return None
        return f"{view.waiting_tokens} prompt tokens wait already; retry later"
''',
    '''\
"""Tests of $name."""

import asyncio

from asyncsched import AdmissionRejectedError, ExecutorLimits
from asyncsched.testing import ScriptedRun, check_policy

from $module import $cls

ONE_ROW = ExecutorLimits(max_rows=1, pages=64, page_size=4, max_model_len=128, vocab_size=1000)


$rules


def test_refuses_when_enough_waits() -> None:
    """The first request gets the row, the second waits, the third is one too many."""

    async def refusal() -> str:
        policy = {"name": "$name", "tokens": 20}
        async with ScriptedRun(ONE_ROW, admission_policy=policy) as run:
            streams = [await run.submit([1] * 20, max_tokens=2) for _ in range(3)]
            await run.steps(8)
            await streams[0].result()
            await streams[1].result()
            try:
                await streams[2].result()
            except AdmissionRejectedError as exc:
                return str(exc)
            return "nothing was refused"

    assert "20 prompt tokens wait already" in asyncio.run(refusal())
''',
)

KINDS = {
    "order": _ORDER,
    "budget": _BUDGET,
    "preemption": _PREEMPTION,
    "eviction": _EVICTION,
    "admission": _ADMISSION,
}
"""By what such a policy decides."""

RULES = '''\
def test_keeps_the_rules() -> None:
    """On a quiet machine, leave ``cost=False`` out to have its time measured, too."""
    check_policy($cls, kind="$option", cost=False)'''
"""The test of every policy."""
