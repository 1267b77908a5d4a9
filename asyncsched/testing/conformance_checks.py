"""The checks of ``check_policy`` on what a policy answers and keeps.

Each returns what it has seen and what to do about it, one text per finding.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from .arbitrary import arbitrary_attributes, arbitrary_prefix, arbitrary_view
from .fake_views import FakePrefix
from .questions import Questions
from .rehearsal import CacheRehearsal, Rehearsal


@dataclass(frozen=True, slots=True)
class Subject:
    """The policy under examination.

    Attributes:
        make: Makes a fresh one.
        kinds: The engine options that it is used for.
        patience: Steps within which every request must be served.
        waiting: How many requests wait while time is measured.
        seed: Of everything random.
    """

    make: Callable[[], Any]
    kinds: tuple[str, ...]
    patience: int
    waiting: int
    seed: int

    def questions(self, *, watch: bool = False) -> Questions:
        """A fresh policy, ready to be asked."""
        return Questions(self.make(), self.kinds, watch=watch)


def answers(subject: Subject) -> list[str]:
    """Whatever the situation, the answers are possible ones; nothing was announced before."""
    policy = subject.questions()
    for number in range(120):
        random = Random(f"{subject.seed} answers {number}")
        view = arbitrary_view(random, number)
        policy.step = view.step
        list(policy.order(view.waiting, view))
        for _ in policy.order(view.waiting, view):  # the engine stops pulling when it has enough
            break
        policy.victims(view.running, 3, view)
        if view.waiting:
            policy.preempt_for(view.waiting[0], view.running, view)
        policy.budget(view)
        for request in view.waiting:
            policy.admit(request, view)
        if policy.evicts:
            policy.begin(view)
            prefixes = [arbitrary_prefix(random, view) for _ in range(20)]
            _sorted(policy, prefixes)
            policy.on_evict(prefixes[0])
        for request in (*view.waiting, *view.running):
            policy.tell("on_finish", request)
    return list(policy.problems.values())


def determinism(subject: Subject) -> list[str]:
    """Two fresh instances answer alike, whatever a third has been through in between."""
    first = subject.questions()
    _play(first, subject.seed)
    _play(subject.questions(), subject.seed + 1)
    second = subject.questions()
    _play(second, subject.seed)
    for index, (one, other) in enumerate(zip(first.answers, second.answers, strict=False)):
        if one != other:
            return [
                f"answer {index} of two instances that saw the same was {one} and {other}; decide by what the views show "
                "alone: no random numbers (or seeded by an option), no clock but view.now, no iteration over sets, no state in "
                "the class"
            ]
    if len(first.answers) != len(second.answers):
        return [f"two instances that saw the same were asked {len(first.answers)} and {len(second.answers)} times"]
    return []


def purity(subject: Subject) -> list[str]:
    """Nothing a policy is shown is different afterwards."""
    policy = subject.questions(watch=True)
    _play(policy, subject.seed)
    return list(policy.changes.values())


def lifecycle(subject: Subject) -> list[str]:
    """Requests that are cancelled and preempted confuse nobody, and when no more come, all that wait are served."""
    policy = subject.questions()
    stage = _play(policy, subject.seed)
    for _ in range(subject.patience):
        if not stage.waiting and not stage.running:
            break
        stage.tick()
    found = list(policy.problems.values())
    if stage.waiting or stage.running:
        left = [*stage.waiting.values(), *stage.running.values()]
        lost = sum(request.preemptions > 0 for request in left)
        found.append(
            f"{len(left)} requests ({lost} of them preempted before) were not served within {subject.patience} steps although "
            "no others came; order what is given in `waiting`, not what on_submit has told of: a preempted request waits again"
        )
    return found


def memory(subject: Subject) -> list[str]:
    """What has ended is forgotten."""
    policy = subject.questions()
    stage, cache, sizes = Rehearsal(policy, rows=32, token_budget=2048), CacheRehearsal(policy, 16), [0]
    for number in range(6):
        _come_and_go(stage, cache, 1000)
        stage.pass_time(100_000, 3600.0)  # whatever is kept for a while has run out by now …
        _come_and_go(stage, cache, 50)  # … and here is the occasion to notice
        sizes.append(footprint(policy.members))
        if number and sizes[-1] - sizes[-2] < 4096:
            return []
    return [
        f"its state grew from {sizes[1]:,} to {sizes[-1]:,} bytes while 5,000 requests of as many tenants and programs came "
        "and went; forget them in on_finish (reports of a request may come to on_step later than that)"
    ]


def _play(policy: Questions, seed: int) -> Rehearsal:
    """A busy hour in small: arrivals, cancellations, preemptions; ends with requests still waiting and running."""
    random = Random(f"{seed} play")
    stage, cache = Rehearsal(policy, rows=6, pages=24), CacheRehearsal(policy, 12)
    for _ in range(120):
        attributes = {**arbitrary_attributes(random, stage), "prompt_tokens": random.randint(1, 100)}
        length = random.randint(1, min(40, attributes["max_tokens"]))
        stage.submit(length=length, cached=random.choice((0, 0, 16, 48)), **attributes)
        live = [*stage.waiting.values(), *stage.running.values()]
        if live and random.random() < 0.15:
            stage.end(random.choice(live))
        for _ in range(random.choice((0, 1, 4, 9))):
            stage.tick()
        if policy.evicts:
            cached = list(cache.prefixes)
            again = cached and random.random() < 0.5
            prefix = random.choice(cached) if again else arbitrary_prefix(random, stage.view())
            cache.use(prefix, stage.step, stage.now)
            policy.answers.append(("evicted", *((gone.created, gone.depth) for gone in cache.evict(stage.view()))))
    return stage


def _come_and_go(stage: Rehearsal, cache: CacheRehearsal, requests: int) -> None:
    for number in range(requests):
        who: dict[str, Any] = {"tenant": f"tenant {stage.step} {number}", "program_id": f"program {stage.step} {number}"}
        request = stage.submit(prompt_tokens=20 + number % 50, max_tokens=2, **who)
        if number % 7 == 0:
            stage.end(request)
        if number % 9 == 0 and stage.running:
            stage.preempt(next(iter(stage.running.values())))
        if number % 4 == 0:
            stage.tick()
        if stage.policy.evicts:
            prefix = FakePrefix(created=stage.step, depth=16 * (1 + number % 9), program_id=who["program_id"])
            cache.use(prefix, stage.step, stage.now)
            cache.evict(stage.view())
    for _ in range(requests + 200):
        if not stage.waiting and not stage.running:
            break
        stage.tick()
    for request in [*stage.waiting.values(), *stage.running.values()]:
        stage.end(request)  # whatever the policy lets wait
    stage.tick()


def _sorted(policy: Questions, prefixes: list[FakePrefix]) -> None:
    keys = [policy.key(prefix) for prefix in prefixes]
    try:
        keys.sort()
    except Exception as exc:
        policy.problem("key", f"answered keys that cannot be compared with each other: {exc}")


def footprint(*roots: Any) -> int:
    """Bytes of everything that can be reached from ``roots``, but for classes, functions and modules."""
    seen: set[int] = set()
    found, total = list(roots), 0
    while found:
        item = found.pop()
        if id(item) in seen or isinstance(item, type | FunctionType | BuiltinFunctionType | ModuleType):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        found += gc.get_referents(item)
    return total
