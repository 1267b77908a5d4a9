"""Cost of the control plane alone: planning and finishing per decode step, with an executor that answers at once.

Usage: python -m benchmarks.control_plane [--batch 64 256 1024] [--steps 400] [--json]

The whole engine runs (tasks, bridge, event loop); only the model is missing. Prompts are computed
first; timed are pure decode steps with all requests running and nobody reading tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import anyio

import asyncsched
from asyncsched.testing import InstantExecutor

PROMPT = 256
WARM_UP = 20


class TimedExecutor(InstantExecutor):
    """Notes when each plan arrives."""

    def __init__(self, limits: asyncsched.ExecutorLimits) -> None:
        super().__init__(limits)
        self.stamps: list[tuple[float, bool]] = []

    def submit(self, plan: asyncsched.StepPlan) -> None:
        """Stamp and answer."""
        pure = plan.decode and not plan.prefill and not plan.joins and not plan.leaves
        self.stamps.append((time.perf_counter(), pure))
        super().submit(plan)


async def measure(batch: int, steps: int, depth: int) -> dict[str, Any]:
    """Median microseconds per decode step at ``batch`` running requests."""
    rng = random.Random(0)
    length = PROMPT + steps + WARM_UP + 16
    limits = asyncsched.ExecutorLimits(
        max_rows=batch, pages=batch * (-(-length // 16) + 1), page_size=16, max_model_len=length + 1, vocab_size=50_000
    )
    executor = TimedExecutor(limits)
    backend = asyncsched.Backend(executor, None, "none")
    async with asyncsched.Engine(
        backend=backend, depth=depth, token_budget=batch * PROMPT + batch, max_rows=batch, page_size=16
    ) as engine:
        prompts = [[rng.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(batch)]
        await engine.generate(prompts, max_tokens=steps + WARM_UP, temperature=0, ignore_eos=True)
    pairs = list(zip(executor.stamps, executor.stamps[1:], strict=False))
    costs = [after - before for (before, pure_before), (after, pure_after) in pairs if pure_before and pure_after][WARM_UP:]
    median = statistics.median(costs) * 1e6
    return {
        "engine": "asyncsched",
        "batch": batch,
        "depth": depth,
        "steps": len(costs),
        "us_per_step": round(median, 1),
        "us_per_request_step": round(median / batch, 4),
    }


def main() -> None:
    """Parse the command line and print one line per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (default: a table)")
    options = parser.parse_args()
    for batch in options.batch:
        result = anyio.run(measure, batch, options.steps, options.depth)
        if options.json:
            print(json.dumps(result), flush=True)
        else:
            print("batch {batch:5d}: {us_per_step:8} µs per step, {us_per_request_step:7} µs per request-step".format(**result))


if __name__ == "__main__":
    main()
