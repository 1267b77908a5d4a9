"""Cost of the policies: microseconds per planning step with many requests waiting.

Usage: python -m benchmarks.policies [--policies lpm edf …] [--waiting 1000] [--steps 200] [--json]

A whole engine runs, with a device that answers at once; 256 requests run, and as many arrive as end, about
four per step, so that the given number always waits. Timed is what the planner spends on asking: the
order, pulled as far as it is needed, the budget, whom to preempt (asked in every step, whether pages
are missing or not, until 8 would be free), which prefix to evict, who may enter, and telling what has happened. Printed are
medians over the steps that asked for an order. ``fcfs`` and ``lru`` stand in where a policy does not
decide, so that their lines are what asking costs in itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import anyio
import anyio.lowlevel

import asyncsched
from asyncsched.policy_set import HOOKS
from asyncsched.registry import installed_policies, load_policy
from asyncsched.run import Run
from asyncsched.testing import InstantExecutor
from asyncsched.testing.fake_views import COST

ROWS, PAGE, PROMPT, OUTPUT = 256, 16, 256, 64
PAGES = ROWS * (PROMPT + 2 * OUTPUT) // PAGE + 2000
TARGET = 300
MISSING = 8
"""Pages for which victims are asked in every step."""
WARM_UP = 20
NEEDED: dict[str, dict[str, Any]] = {"queue-bounds": {"requests": 1 << 20}, "token-bounds": {"tokens": 1 << 30}}
"""Options of the policies that do nothing without any; large enough to let everybody in."""
DECISIONS = ("order", "budget", "victims")


class Stopwatch:
    """Adds up what is spent on each question during one step.

    Attributes:
        steps: Per step that asked for an order: question → seconds.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = {}

    def attach(self, run: Run) -> None:
        """Time the policies of an engine from now on."""
        host, tree = run.policies, run.state.tree
        told = ("budget", "preempt_for", "admit", "on_submit", "on_step", "on_finish")
        methods = {hook: self._timed(hook, getattr(host, hook)) for hook in told}
        methods["begin_eviction"] = self._timed("evict", host.begin_eviction)
        for hook in ("order", "victims"):
            methods[hook] = self._timed_answer(hook, getattr(host, hook))
        for name, method in methods.items():
            setattr(host, name, method)
        tree.eviction_key = self._timed("evict", tree.eviction_key)
        tree.on_evict = self._timed("evict", tree.on_evict)

    def end_step(self) -> None:
        """A plan is complete."""
        if "order" in self._spent:
            self.steps.append(self._spent)
        self._spent = {}

    def _add(self, hook: str, started: float) -> None:
        self._spent[hook] = self._spent.get(hook, 0.0) + time.perf_counter() - started

    def _timed(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._add(hook, started)

        return timed

    def _timed_answer(self, hook: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def timed(*args: Any) -> Iterator[Any]:
            started = time.perf_counter()
            answer = function(*args)
            while True:
                request = next(answer, None)
                self._add(hook, started)
                if request is None:
                    return
                yield request
                started = time.perf_counter()

        return timed


class AskingExecutor(InstantExecutor):
    """Asks for victims with every plan, since pages are seldom missing, and ends the step's account."""

    def __init__(self, limits: asyncsched.ExecutorLimits, watch: Stopwatch) -> None:
        super().__init__(limits)
        self.run: Run | None = None
        self._watch = watch

    def submit(self, plan: asyncsched.StepPlan) -> None:
        """Ask and answer."""
        if self.run is not None:
            missing = MISSING
            for victim in self.run.policies.victims(self.run.state.running(), missing, self.run.view):
                missing -= victim.own_pages
                if missing <= 0:
                    break
        self._watch.end_step()
        super().submit(plan)


def arguments(random: Random, heads: list[list[int]]) -> dict[str, Any]:
    """A request: half of its prompt is one of a few heads."""
    return {
        "prompt": random.choice(heads) + [random.randrange(50_000) for _ in range(random.randint(16, PROMPT - 128))],
        "params": asyncsched.SamplingParams(max_tokens=random.randint(OUTPUT // 2, OUTPUT * 3 // 2), ignore_eos=True),
        "priority": random.choice((0, 0, 1)),
        "tenant": f"tenant {random.randrange(8)}",
        "deadline": random.choice((None, 3600.0)),
        "ttft_target": random.choice((None, 1.0, 10.0)),
        "tpot_target": random.choice((None, 0.05)),
        "program_id": random.choice((None, f"program {random.randrange(40)}")),
    }


async def measure(options: dict[str, Any], waiting: int, steps: int) -> dict[str, float]:
    """Median microseconds per step by question, with these engine options."""
    random, watch = Random(0), Stopwatch()
    heads = [[random.randrange(50_000) for _ in range(128)] for _ in range(20)]
    limits = asyncsched.ExecutorLimits(max_rows=ROWS, pages=PAGES, page_size=PAGE, max_model_len=1024, vocab_size=50_000)
    executor = AskingExecutor(limits, watch)
    streams: list[asyncsched.TokenStream] = []
    async with asyncsched.Engine(
        backend=asyncsched.Backend(executor, None, "none"), max_rows=ROWS, page_size=PAGE, token_budget=4096,
        reserve="expected", cost_model=COST, strict_policies=True, policy_allowance=60.0, **options,
    ) as engine:  # fmt: skip
        executor.run = engine._running().control
        watch.attach(executor.run)
        for _ in range(steps * 20):  # turns of the loop; a policy that wants few prompts per step takes longer
            streams = [stream for stream in streams if stream.finish_reason is None]
            while len(streams) < waiting + ROWS:
                streams.append(engine.stream(**arguments(random, heads)))
            await anyio.lowlevel.checkpoint()
            if len(watch.steps) >= steps + WARM_UP:
                break
    return medians(watch.steps[WARM_UP:])


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median microseconds by question, of the three decisions together, and of everything."""
    hooks = sorted({hook for spent in steps for hook in spent})
    found = {hook: statistics.median(spent.get(hook, 0.0) for spent in steps) * 1e6 for hook in hooks}
    found["decisions"] = statistics.median(sum(spent.get(hook, 0.0) for hook in DECISIONS) for spent in steps) * 1e6
    found["total"] = statistics.median(sum(spent.values()) for spent in steps) * 1e6
    return {hook: round(microseconds, 1) for hook, microseconds in found.items()}


def engine_options(name: str) -> dict[str, Any]:
    """The engine options that put a policy to use wherever it can decide."""
    policy = load_policy({"name": name, **NEEDED.get(name, {})}, "__init__")
    return {kind: policy for kind, hook in HOOKS.items() if callable(getattr(policy, hook, None))}


def main() -> None:
    """Parse the command line and print one line per policy."""
    names = [info.name for info in installed_policies() if info.distribution == "asyncsched-llm"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=names, metavar="NAME", help="default: all that are bundled")
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    columns = (*DECISIONS, "decisions", "evict", "admit", "total")
    if not arguments.json:
        print(f"µs per step, {arguments.waiting:,} waiting; target for order + budget + victims: {TARGET}")
        print(f"{'policy':<24}" + "".join(f"{column:>11}" for column in columns))
    for name in arguments.policies:
        spent = anyio.run(measure, engine_options(name), arguments.waiting, arguments.steps)
        if arguments.json:
            print(json.dumps({"policy": name, "waiting": arguments.waiting, "target_us": TARGET, "us": spent}), flush=True)
        else:
            over = "  over" if spent["decisions"] > TARGET else ""
            print(f"{name:<24}" + "".join(f"{spent.get(column, 0.0):>11}" for column in columns) + over, flush=True)


if __name__ == "__main__":
    main()
