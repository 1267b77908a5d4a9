"""How soon a cancelled request's row and pages are free, and how long closing takes with many streams open.

Usage: python -m benchmarks.cancel [--requests 400] [--streams 1000] [--json]

Cancels requests of all ages at depths 0 to 3 on the simulated device, one at a time, and counts the
steps that complete until nothing of them is held. Then opens many streams and closes the engine.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter

import anyio

import asyncsched
from asyncsched.testing import ScriptedRun, SimulatedExecutor


async def steps_until_free(depth: int, requests: int) -> Counter[int]:
    """Steps from a cancel to a free row and free pages, over requests cancelled at random ages."""
    rng, counts = random.Random(depth), Counter[int]()
    for _ in range(requests):
        async with ScriptedRun(depth=depth, token_budget=16, chunk_cap=8, prefix_cache=False) as run:
            stream = await run.submit([rng.randrange(100) for _ in range(rng.randrange(1, 40))], max_tokens=30, ignore_eos=True)
            await run.steps(rng.randrange(0, 12))
            stream.close()
            steps = 0
            while (
                numbers := run.engine.statistics()
            ).free_rows < numbers.total_rows or numbers.free_pages < numbers.total_pages:
                await run.steps()
                steps += 1
            counts[steps] += 1
    return counts


async def close_with(streams: int) -> tuple[float, int]:
    """Seconds to close an engine under load, and how many readers were told why."""
    limits = asyncsched.ExecutorLimits(max_rows=256, pages=8192, page_size=16, max_model_len=512, vocab_size=1000)
    told = 0

    async def read(stream: asyncsched.TokenStream) -> None:
        nonlocal told
        try:
            async for _ in stream:
                pass
        except asyncsched.EngineClosedError:
            told += 1

    engine = await asyncsched.Engine(
        backend=asyncsched.Backend(SimulatedExecutor(limits, latency=0.005), None, "simulated")
    ).start()
    async with anyio.create_task_group() as readers:
        for seed in range(streams):
            readers.start_soon(read, engine.stream([seed % 1000, 2, 3], max_tokens=500, seed=seed))
        await anyio.sleep(0.5)
        started = time.perf_counter()
        await engine.aclose()
    return time.perf_counter() - started, told


async def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    for depth in range(4):
        counts = await steps_until_free(depth, options.requests)
        record = {
            "depth": depth,
            "cancelled": sum(counts.values()),
            "most_steps_until_free": max(counts),
            "steps": dict(sorted(counts.items())),
        }
        print(json.dumps(record) if options.json else record, flush=True)
    seconds, told = await close_with(options.streams)
    record = {"streams_open": options.streams, "close_seconds": round(seconds, 3), "readers_told": told}
    print(json.dumps(record) if options.json else record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    anyio.run(main, parser.parse_args())
