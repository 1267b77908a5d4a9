"""Arbitrary situations, from a seed: what a policy must be able to cope with."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from ..cost import LinearCost
from .fake_views import COST, FakePrefix, FakeRequest, FakeView
from .rehearsal import Rehearsal

FREE = LinearCost(0.0, 0.0, 0.0, 0.0)
"""Everything costs nothing: what a fitted model says in the beginning."""


def arbitrary_attributes(random: Random, stage: Rehearsal) -> dict[str, Any]:
    """Attributes of a request such as users send."""
    return {
        "prompt_tokens": random.randint(1, 900),
        "max_tokens": random.randint(1, 200),
        "priority": random.choice((0, 0, 0, -2, 1, 3)),
        "tenant": random.choice(("", "a", "b", "c")),
        "deadline": random.choice((None, None, stage.now + random.uniform(0, 60))),
        "ttft_target": random.choice((None, 0.2, 5.0)),
        "tpot_target": random.choice((None, 0.02, 0.2)),
        "program_id": random.choice((None, None, "p", "q", f"program {random.randint(1, 30)}")),
        "hints": random.choice(({}, {"class": "chat", "notes": []})),
    }


def arbitrary_prefix(random: Random, view: FakeView) -> FakePrefix:
    """A cached run that somebody has used."""
    tokens = 16 * random.randint(1, 20)
    created = random.randint(0, view.step)
    return FakePrefix(
        tokens=tokens,
        depth=tokens + 16 * random.randint(0, 100),
        created=created,
        last_used=random.randint(created, view.step),
        used_at=random.uniform(0, view.now),
        hits=random.choice((0, 0, 1, 2, 50)),
        priority=random.choice((0, -2, 3)),
        tenant=random.choice(("", "a")),
        program_id=random.choice((None, "p", "q")),
    )


def arbitrary_view(random: Random, number: int) -> FakeView:
    """A possible situation, however unlikely; the first ones are the extremes."""
    step, now = 80 * number + random.randint(1, 80), 20.0 * number + random.uniform(0.1, 20.0)
    first = 1000 * number  # of its request numbers
    runs = 0 if number in (0, 1) else random.randint(0, 8)
    waits = 0 if number in (0, 2) else random.randint(0, 40)
    running = list(_requests(random, range(first, first + runs), step, now, run=True))
    waiting = list(_requests(random, range(first + runs, first + runs + waits), step, now, run=False))
    return FakeView(
        step=step,
        now=now,
        token_budget=random.choice((1, 64, 1024)),
        total_rows=max(1, len(running)) + random.choice((0, 1, 8)),
        free_pages=random.choice((0, 5, 500)),
        evictable_pages=random.choice((0, 5, 500)),
        total_pages=1100,
        running=tuple(running),
        waiting=tuple(waiting),
        cost=random.choice((COST, FREE)),
        cached={request.number: random.randrange(request.prompt_tokens) for request in waiting},
    )


def _requests(random: Random, numbers: range, step: int, now: float, *, run: bool) -> Iterator[FakeRequest]:
    for number in numbers:
        prompt, limit = random.choice((1, 7, 300, 4000)), random.choice((0, 1, 40, 4000))
        arrived = random.uniform(0, now)
        generated = random.choice((0, 0, limit // 2)) if run else random.choice((0, 0, 0, limit // 3))
        yield FakeRequest(
            number=number,
            prompt_tokens=prompt,
            max_tokens=limit,
            generated_tokens=generated,
            prefill_left=random.choice((0, prompt // 2)) if run else -1,
            own_pages=random.randint(0, 300) if run else 0,
            preemptions=random.choice((0, 0, 1, 5)) if run or generated else 0,
            arrived_at=arrived,
            first_token_at=random.uniform(arrived, now) if generated else None,
            waiting_since_step=random.randint(1, step),
            priority=random.choice((0, 0, -(10**6), 4)),
            tenant=random.choice(("", "a", "b", f"tenant {number}")),
            deadline=random.choice((None, now - 1.0, now, now + 30.0)),
            ttft_target=random.choice((None, 0.0, 1.0)),
            tpot_target=random.choice((None, 0.0, 0.05)),
            program_id=random.choice((None, "p", f"program {number}")),
            hints=random.choice(({}, {"class": "chat"})),
        )
