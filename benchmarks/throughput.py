"""Output tokens per second of fixed workloads through the public API, one JSON line each.

Usage: python -m benchmarks.throughput [--model MODEL] [--workload NAME ...] [--repeat N] [--json]

All requests of a workload are submitted at once and read as whole answers; greedy, bf16. The first
line is ``startup``: seconds from creating the engine to its first answer (imports included in
``process``). Names of the workloads: see ``benchmarks.workloads``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import anyio

STARTED = time.perf_counter()

import asyncsched  # noqa: E402 - the import is part of what a user waits for

from .peers.report import peak_rss_mb  # noqa: E402
from .workloads import Workload, warm_up_prompts, workloads  # noqa: E402


def emit(record: dict[str, Any], as_json: bool) -> None:
    """Print one measurement."""
    if as_json:
        print(json.dumps(record), flush=True)
    else:
        print("  ".join(f"{key}={value}" for key, value in record.items()), flush=True)


async def run(engine: asyncsched.Engine, workload: Workload) -> float:
    """Seconds for one pass, from an empty prefix cache."""
    await engine.flush_cache()
    started = time.perf_counter()
    results = await engine.generate(workload.prompts, max_tokens=workload.output, temperature=0, ignore_eos=True)
    seconds = time.perf_counter() - started
    assert all(len(result.token_ids) == workload.output for result in results)
    return seconds


async def main(options: argparse.Namespace) -> None:
    """Start an engine, run the workloads, print."""
    created = time.perf_counter()
    async with asyncsched.Engine(
        options.model, dtype=options.dtype, max_rows=64, max_model_len=2048, depth=options.depth
    ) as engine:
        await engine.generate([1, 2, 3], max_tokens=1, temperature=0)
        ready = time.perf_counter()
        emit(
            {
                "engine": "asyncsched",
                "workload": "startup",
                "seconds": round(ready - created, 2),
                "process": round(ready - STARTED, 2),
            },
            options.json,
        )
        await engine.generate(warm_up_prompts(), max_tokens=8, temperature=0, ignore_eos=True)
        for name, workload in workloads().items():
            if options.workload and name not in options.workload:
                continue
            seconds = statistics.median([await run(engine, workload) for _ in range(options.repeat)])
            emit(
                {
                    "engine": "asyncsched",
                    "workload": name,
                    "seconds": round(seconds, 3),
                    "output_throughput": round(workload.output_tokens / seconds, 1),
                    "total_token_throughput": round(workload.total_tokens / seconds, 1),
                },
                options.json,
            )
        emit({"engine": "asyncsched", "workload": "memory", "max_rss_mb": peak_rss_mb()}, options.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--workload", nargs="+", choices=list(workloads()))
    parser.add_argument("--repeat", type=int, default=1, help="passes per workload; the median counts")
    parser.add_argument("--json", action="store_true")
    anyio.run(main, parser.parse_args())
