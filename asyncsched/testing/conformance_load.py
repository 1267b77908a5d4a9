"""The checks of ``check_policy`` under load: who is served in a flood, and what a step costs with many waiting."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from .arbitrary import arbitrary_attributes, arbitrary_prefix
from .conformance_checks import Subject
from .rehearsal import CacheRehearsal, Rehearsal

Flood = tuple[str, dict[str, Any], Callable[[int, Rehearsal], dict[str, Any]]]

FLOODS: tuple[Flood, ...] = (
    ("shorter", {"prompt_tokens": 1500, "max_tokens": 100}, lambda n, stage: {"prompt_tokens": 8, "max_tokens": 2}),
    ("better cached", {"prompt_tokens": 64}, lambda n, stage: {"prompt_tokens": 64, "cached": 48}),
    ("of a higher class", {"priority": 5}, lambda n, stage: {"priority": -5}),
    ("of new tenants", {"tenant": "old"}, lambda n, stage: {"tenant": f"tenant {n}"}),
    ("of another tenant", {"tenant": "old"}, lambda n, stage: {"tenant": "favourite"}),
    ("of new programs", {"program_id": "old"}, lambda n, stage: {"program_id": f"program {n}"}),
    (
        "of earlier deadlines",
        {"deadline": 1e6, "ttft_target": 1e5},
        lambda n, stage: {"deadline": stage.now + 0.5, "ttft_target": 0.1, "tpot_target": 0.02},
    ),
)
"""How newcomers may be more favourable: in words, the attributes of the one that waits, and those of newcomer ``n``."""


def starvation(subject: Subject) -> list[str]:
    """A request that waits from the start is served although favourable newcomers never end."""
    if not {"policy", "budget_policy", "preemption_policy"}.intersection(subject.kinds):
        return []
    return [found for flood in FLOODS if (found := _flooded(subject, flood)) is not None]


def cost(subject: Subject) -> dict[str, float]:
    """Median microseconds per step of each hook, and in all, with ``waiting`` requests waiting and 256 running.

    ``admit`` is per call, and not in the sum: how often it is called has nothing to do with steps.
    """
    policy = subject.questions()
    random = Random(f"{subject.seed} cost")
    stage, cache = Rehearsal(policy, rows=256, token_budget=4096), CacheRehearsal(policy, subject.waiting)
    for _ in range(subject.waiting + 256):
        stage.submit(cached=random.choice((0, 64)), **arbitrary_attributes(random, stage))
    for _ in range(subject.waiting if policy.evicts else 0):
        cache.use(arbitrary_prefix(random, stage.view()), 0, 0.0)
    for _ in range(200):
        if len(stage.running) == 256 or not stage.waiting:
            break
        stage.tick()
    steps: list[dict[str, float]] = []
    for _ in range(31):
        policy.spent.clear()
        arrivals = max(4, subject.waiting + 4 - len(stage.waiting))
        for _ in range(arrivals):
            stage.submit(**arbitrary_attributes(random, stage))
        calls = {"admit": policy.spent["admit"] / arrivals} if "admit" in policy.spent else {}
        for request in list(stage.running.values())[:4]:
            stage.end(request)
        for _ in range(4 if policy.evicts else 0):
            cache.use(arbitrary_prefix(random, stage.view()), stage.step, stage.now)
        policy.spent.clear()
        stage.tick()
        policy.victims(list(stage.running.values()), 8, stage.view())
        if policy.evicts:
            cache.evict(stage.view())
        steps.append({**policy.spent, **calls, "total": sum(policy.spent.values())})
    hooks = sorted({hook for spent in steps for hook in spent})
    return {hook: round(median(spent.get(hook, 0.0) for spent in steps) * 1e6, 2) for hook in hooks}


def _flooded(subject: Subject, flood: Flood) -> str | None:
    """What is wrong if newcomers of this sort never end, or ``None``."""
    words, attributes, newcomer = flood
    stage = Rehearsal(subject.questions(), rows=2, token_budget=96)
    arrived = 0

    def arrive() -> None:
        nonlocal arrived
        arrived += 1
        stage.submit(**{"prompt_tokens": 32, "max_tokens": 3, **newcomer(arrived, stage)})

    for _ in range(3):  # the one that waits has been served before, so that accounts know its tenant and program
        stage.submit(**{"prompt_tokens": 32, "max_tokens": 3, **attributes})
    for _ in range(40):
        stage.tick()
    for _ in range(4):
        arrive()
    stage.tick()
    cold = stage.submit(**{"prompt_tokens": 32, "max_tokens": 3, **attributes})
    for _ in range(subject.patience):
        for _ in range(12 - len(stage.waiting)):
            arrive()
        stage.tick()
        if cold.number in stage.ended or cold.number not in stage.cached:  # served, or refused
            return None
    return (
        f"a request was not served within {subject.patience} steps of a flood of newcomers {words} ({arrived} of them); let "
        'requests age, or say why not in a class attribute: starvation = "waived: …"'
    )
