"""Cost of the control plane alone: planning and finishing per decode step, with an executor that answers at once.

Usage: python -m benchmarks.control_plane [--batch 64 256 1024] [--steps 400] [--depth 2] [--json]

The whole engine runs (tasks, bridge, event loop); only the model is missing. Prompts are computed
first; timed are pure decode steps with all requests running and nobody reading tokens. The last line
is the prefix tree alone: matching and inserting prompts of 1,024 tokens, the first half of them shared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import anyio
import numpy as np

import asyncsched
from asyncsched.radix import RadixTree
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


def measure_tree(page_size: int = 16, prompts: int = 2000) -> dict[str, Any]:
    """Median microseconds to match and to insert a prompt whose first half is cached."""
    rng = np.random.default_rng(0)
    tree = RadixTree(page_size, lambda node: (node.last_used, -node.depth))
    shared = rng.integers(0, 50_000, 512).astype(np.int32)
    matching, inserting = [], []
    for step in range(prompts):
        tokens = np.concatenate([shared, rng.integers(0, 50_000, 512).astype(np.int32)]).tobytes()
        pages = np.arange(1024 // page_size, dtype=np.int32)
        started = time.perf_counter()
        node, found = tree.match("", tokens, step)
        matched = time.perf_counter()
        tree.extend(node, tokens[len(found) * page_size * 4 :], pages[len(found) :], step)
        inserted = time.perf_counter()
        matching.append(matched - started)
        inserting.append(inserted - matched)
    return {
        "engine": "asyncsched",
        "prefix_tree": "1024 tokens, half shared",
        "match_us": round(statistics.median(matching) * 1e6, 2),
        "insert_us": round(statistics.median(inserting) * 1e6, 2),
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

    tree = measure_tree()
    print(json.dumps(tree) if options.json else "prefix tree: match {match_us} µs, insert {insert_us} µs".format(**tree))


if __name__ == "__main__":
    main()
