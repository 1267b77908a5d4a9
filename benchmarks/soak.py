"""Random traffic for a long time on the simulated device: nothing may leak, hang, or come out wrong.

Usage: python -m benchmarks.soak [--minutes 10] [--seed 0] [--json]

Each round runs the real engine in virtual time (trio's ``MockClock``) with a random configuration:
depth 0–3, page sizes, full or expected reservation on a pool small enough to force preemption,
fcfs or lpm, chunked or not. A fifth of the requests is cancelled in one of several ways; one step in
250 raises, which ends about one request in twenty, and one in twenty takes long; some prompts make
the tokenizer fail. Every token is compared with the oracle, every round ends with the invariants at
idle. A round that makes no progress for an hour of virtual time counts as a hang.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import dataclass, field

import anyio
import trio.testing
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import asyncsched
from asyncsched.testing import ByteTokenizer, SimulatedExecutor, check_invariants, expected_tokens

REQUESTS = 300


@dataclass
class Tally:
    """What all rounds together amounted to."""

    rounds: int = 0
    requests: int = 0
    cancelled: int = 0
    failed_as_planned: int = 0
    steps: int = 0
    row_steps: int = 0
    preemptions: int = 0
    virtual_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    hangs: int = 0


class FailingTokenizer(ByteTokenizer):
    """Raises on prompts that contain a bell character."""

    def encode(self, texts, *, add_special_tokens, limit):  # type: ignore[no-untyped-def]
        """As ``ByteTokenizer.encode``."""
        if any("\a" in text for text in texts):
            raise ValueError("unreadable")
        return super().encode(texts, add_special_tokens=add_special_tokens, limit=limit)


class FaultyExecutor(SimulatedExecutor):
    """Raises in one step of ``one_in``."""

    def __init__(self, rng: random.Random, one_in: int, limits: asyncsched.ExecutorLimits, budget: int) -> None:
        super().__init__(
            limits, token_budget=budget, latency=lambda plan: 0.02 if rng.random() < 0.95 else rng.uniform(0.02, 5.0)
        )
        self._rng = rng
        self._one_in = one_in

    def submit(self, plan: asyncsched.StepPlan) -> None:
        """Decide this step's fate."""
        if self._rng.randrange(self._one_in) == 0:
            self._faults[plan.step] = RuntimeError("scripted fault")
        super().submit(plan)


async def one_request(engine: asyncsched.Engine, rng: random.Random, shared: list[int], tally: Tally, vocab: int) -> None:
    """Submit, perhaps cancel, and compare."""
    prompt = shared[: rng.randrange(len(shared))] + [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
    count, seed = rng.choice([0, 1, 8, 30, 80, 110]), rng.randrange(1 << 40)
    stop = (rng.randrange(vocab),) if rng.random() < 0.3 else ()
    expected = expected_tokens(prompt, seed, min(count, engine.limits.max_model_len - len(prompt)), vocab, stop)
    tally.requests += 1
    got: list[int] = []
    how = rng.choice(["read", "read", "read", "read", "cancel", "break", "abort", "drop"] if rng.random() < 0.4 else ["read"])
    limit = rng.randrange(0, 20)
    try:
        if rng.random() < 0.02:
            await engine.generate("\a", max_tokens=1)
        stream = engine.stream(prompt, seed=seed, max_tokens=count, stop_token_ids=stop, ignore_eos=True, detokenize=False)
        if how == "drop":
            tally.cancelled += 1
            return
        with anyio.move_on_after(rng.uniform(0, 3) if how == "cancel" else None) as scope:
            async with stream:
                async for chunk in stream:
                    got += chunk.token_ids
                    if rng.random() < 0.1:
                        await anyio.sleep(rng.uniform(0, 2))
                    if how == "break" and len(got) > limit:
                        break
                    if how == "abort" and len(got) > limit:
                        engine.abort(stream.request_id)
        if how != "read":
            tally.cancelled += scope.cancelled_caught or stream.finish_reason == "abort"
            if got != expected[: len(got)]:
                tally.wrong.append(f"cancelled request {stream.request_id}")
        elif got != expected:
            tally.wrong.append(f"request {stream.request_id}: {got[:8]} instead of {expected[:8]}")
    except (asyncsched.StepFailedError, asyncsched.TokenizeError):
        tally.failed_as_planned += 1
        if got != expected[: len(got)]:
            tally.wrong.append("failed request")


async def one_round(rng: random.Random, tally: Tally) -> None:
    """One engine, a few hundred requests."""
    page_size = rng.choice([1, 4, 16])
    limits = asyncsched.ExecutorLimits(
        max_rows=rng.choice([4, 16, 64]), pages=rng.choice([256, 400, 2000]) // page_size, page_size=page_size,
        max_model_len=200, vocab_size=256 + 8,
    )  # fmt: skip
    budget = rng.choice([64, 96, 256])
    executor = FaultyExecutor(rng, 250, limits, budget)
    shared = [rng.randrange(256) for _ in range(80)]
    engine = asyncsched.Engine(
        backend=asyncsched.Backend(executor, FailingTokenizer(), "simulated"),
        depth=rng.randrange(4), token_budget=budget, chunk_cap=rng.choice([None, 8, 32]), chunked_prefill=rng.random() < 0.8,
        prefix_cache=rng.random() < 0.8, reserve=rng.choice(["full", "expected", "expected"]),
        policy=rng.choice(["fcfs", "lpm"]), strict_policies=True,
    )  # fmt: skip
    started = anyio.current_time()
    async with engine:
        with anyio.move_on_after(3600) as scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(REQUESTS):
                    tasks.start_soon(one_request, engine, rng, shared, tally, limits.vocab_size)
                    await anyio.sleep(rng.expovariate(1 / rng.choice([0.001, 0.02, 0.2])))
            gc.collect()
            await engine.drain()
            await engine.pause()
        if scope.cancelled_caught:
            tally.hangs += 1
        else:
            try:
                check_invariants(engine, idle=True)
            except AssertionError as exc:
                tally.leaks.append(str(exc))
        statistics = engine.statistics()
    tally.rounds += 1
    tally.steps += statistics.steps
    tally.row_steps += statistics.generated_tokens + statistics.dropped_tokens
    tally.preemptions += statistics.preemptions
    tally.virtual_seconds += anyio.current_time() - started


def resident_kib() -> int:
    """Resident memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def main() -> int:
    """Run rounds until the time is over; 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    tally = Tally()
    deadline = time.monotonic() + options.minutes * 60
    memory: list[tuple[float, int]] = []
    with Progress(
        TextColumn("soak"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), disable=options.json
    ) as bar:
        task = bar.add_task("", total=options.minutes * 60)
        begun = time.monotonic()
        while time.monotonic() < deadline:
            rng = random.Random(f"{options.seed}/{options.first + tally.rounds}")  # each round can be repeated alone
            before = len(tally.wrong) + len(tally.leaks)
            trio.run(one_round, rng, tally, clock=trio.testing.MockClock(autojump_threshold=0))
            if len(tally.wrong) + len(tally.leaks) > before:
                print(f"round {options.first + tally.rounds - 1} went wrong", file=sys.stderr)
            gc.collect()
            memory.append((time.monotonic() - begun, resident_kib()))
            bar.update(
                task, completed=time.monotonic() - begun, description=f"{tally.rounds} rounds, {tally.row_steps:,} row-steps"
            )
    half = memory[len(memory) // 2 :]
    seconds = half[-1][0] - half[0][0]
    slope = (half[-1][1] - half[0][1]) / 1024 / (seconds / 60) if seconds > 0 else 0.0
    report = {
        "rounds": tally.rounds, "requests": tally.requests, "cancelled": tally.cancelled,
        "failed_as_planned": tally.failed_as_planned, "steps": tally.steps, "row_steps": tally.row_steps,
        "preemptions": tally.preemptions,
        "virtual_hours": round(tally.virtual_seconds / 3600, 2), "wrong": len(tally.wrong), "leaks": len(tally.leaks),
        "hangs": tally.hangs,
        "rss_mib": round(memory[-1][1] / 1024, 1), "rss_slope_mib_per_minute": round(slope, 3),
    }  # fmt: skip
    print(json.dumps(report) if options.json else "\n".join(f"{key:26} {value}" for key, value in report.items()))
    for line in (tally.wrong + tally.leaks)[:10]:
        print(line, file=sys.stderr)
    return 1 if tally.wrong or tally.leaks or tally.hangs else 0


if __name__ == "__main__":
    sys.exit(main())
