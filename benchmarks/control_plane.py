"""Cost of the control plane alone: decode steps, streaming and admission, with an executor that answers at once.

Usage: python -m benchmarks.control_plane [--batch 64 256 1024 4096] [--streamed 0 10 100] [--steps 400]
[--depth 2] [--json]

The whole engine runs (tasks, bridge, event loop); only the model is missing. Prompts are computed
first; timed are pure decode steps with all requests running, while the given share of them, in percent,
is read token by token as text. The last two lines are admission: requests with prompts of 16 tokens and
one token of output, submitted and finished 256 at a time, given as token ids and as text.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from itertools import pairwise
from typing import Any

import anyio

import asyncsched
from asyncsched.testing import ByteTokenizer, InstantExecutor

PROMPT = 256
WARM_UP = 20
STREAMED_STEPS, STREAMED_TOKENS = 50, 100_000
"""With readers at least so many steps, and otherwise no more than so many tokens."""

ADMITTED, BATCHES, SHORT_PROMPT = 256, 40, 16


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


class Readers:
    """Counts what the readers got."""

    def __init__(self) -> None:
        self.chunks = 0
        self.characters = 0

    async def read(self, stream: asyncsched.TokenStream) -> None:
        """Take one stream's text as it comes."""
        async for chunk in stream:
            self.chunks += 1
            self.characters += len(chunk.text)


async def decode(batch: int, steps: int, depth: int, streamed: int) -> dict[str, Any]:
    """Microseconds per decode step at ``batch`` running requests, ``streamed`` percent of them read as text."""
    rng, readers, live = random.Random(0), Readers(), round(batch * streamed / 100)
    if live:
        steps = min(steps, max(STREAMED_STEPS, STREAMED_TOKENS // batch))
    output = steps + WARM_UP
    length = PROMPT + output + 16
    limits = asyncsched.ExecutorLimits(
        max_rows=batch, pages=batch * (-(-length // 16) + 1), page_size=16, max_model_len=length + 1, vocab_size=50_000
    )
    executor = TimedExecutor(limits)
    backend = asyncsched.Backend(executor, ByteTokenizer(), "none")
    async with (
        asyncsched.Engine(backend=backend, depth=depth, token_budget=batch * PROMPT + batch) as engine,
        anyio.create_task_group() as tasks,
    ):
        for index in range(batch):
            prompt = [rng.randrange(100, 40_000) for _ in range(PROMPT)]
            stream = engine.stream(prompt, max_tokens=output, temperature=0, ignore_eos=True)
            tasks.start_soon(readers.read if index < live else asyncsched.TokenStream.result, stream)
    stamps = executor.stamps
    costs = [after - before for (before, pure_before), (after, pure_after) in pairwise(stamps) if pure_before and pure_after]
    costs = costs[WARM_UP:]
    median = statistics.median(costs) * 1e6
    return {
        "engine": "asyncsched",
        "batch": batch,
        "depth": depth,
        "streamed": streamed,
        "steps": len(costs),
        "us_per_step": round(median, 1),
        "us_per_request_step": round(median / batch, 4),
        "mean_us_per_request_step": round(statistics.fmean(costs) * 1e6 / batch, 4),
        "tokens_per_chunk": round(readers.characters / readers.chunks, 3) if live else None,
    }


async def admission(prompts: str, depth: int) -> dict[str, Any]:
    """Requests per second that are submitted, admitted, prefilled and finished; median over batches of 256."""
    rng, tokenizer = random.Random(0), ByteTokenizer()
    limits = asyncsched.ExecutorLimits(
        max_rows=ADMITTED, pages=8 * ADMITTED, page_size=16, max_model_len=64, vocab_size=tokenizer.vocab_size
    )
    backend = asyncsched.Backend(InstantExecutor(limits), tokenizer, "none")
    rates = []
    async with asyncsched.Engine(backend=backend, depth=depth, token_budget=ADMITTED * SHORT_PROMPT) as engine:
        for _ in range(BATCHES):
            ids = [[rng.randrange(97, 123) for _ in range(SHORT_PROMPT)] for _ in range(ADMITTED)]
            batch = ids if prompts == "ids" else [bytes(one[1:]).decode() for one in ids]  # the tokenizer adds a first token
            started = time.perf_counter()
            await engine.generate(batch, max_tokens=1, temperature=0)
            rates.append(ADMITTED / (time.perf_counter() - started))
    return {
        "engine": "asyncsched",
        "admission": prompts,
        "depth": depth,
        "batch": ADMITTED,
        "admission_per_s": round(statistics.median(rates)),
    }


def main() -> None:
    """Parse the command line and print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--streamed", type=int, nargs="+", default=[0, 10, 100], help="percent of the requests that are read")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (default: a table)")
    options = parser.parse_args()
    line = "batch {batch:5d}, {streamed:3d} % read: {us_per_step:8} µs per step, {us_per_request_step:7} µs per request-step"
    for streamed in options.streamed:
        for batch in options.batch:
            result = anyio.run(decode, batch, options.steps, options.depth, streamed)
            print(json.dumps(result) if options.json else line.format(**result), flush=True)
    for prompts in ("ids", "text"):
        result = anyio.run(admission, prompts, options.depth)
        line = "admission, prompts as {admission}: {admission_per_s} requests per second"
        print(json.dumps(result) if options.json else line.format(**result))


if __name__ == "__main__":
    main()
