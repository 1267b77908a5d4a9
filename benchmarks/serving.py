"""Latency and goodput of requests that arrive over time, each read by a consumer of its own.

Usage: python -m benchmarks.serving [--rate R ...] [--requests N] [--arrivals poisson|gamma|trace] [--json]

One run per rate, each from an empty prefix cache, with the same prompts (random tokens) and greedy
sampling without early stop. Everything is timed where a user would see it: in the consumer's task, as
chunks come out of ``async for``, in the engine's own event loop. A request is good if it met both
targets. What the figures mean: ``benchmarks.latency``; with ``--json`` they are named as in the
result file of ``vllm bench serve``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import asyncsched

from .arrivals import Arrival, mean_rate, read_trace, scaled, synthetic
from .latency import Targets, Timeline, report

WARM_UP = Arrival(0.0, 20, 8)

COLUMNS = (
    ("rate", "{request_rate:.4g}"),
    ("good/s", "{request_goodput:.2f}"),
    ("req/s", "{request_throughput:.2f}"),
    ("out tok/s", "{output_throughput:.0f}"),
    ("TTFT p50", "{p50_ttft_ms:.0f}"),
    ("p99 ms", "{p99_ttft_ms:.0f}"),
    ("TPOT p50", "{p50_tpot_ms:.1f}"),
    ("p99 ms", "{p99_tpot_ms:.1f}"),
    ("ITL p99 ms", "{p99_itl_ms:.1f}"),
    ("E2EL p50", "{p50_e2el_ms:.0f}"),
    ("p99 ms", "{p99_e2el_ms:.0f}"),
    ("at once", "{max_concurrent_requests}"),
    ("hit rate", "{hit_rate:.2f}"),
)
"""Headings and formats of the table."""


def draw_prompts(arrivals: Sequence[Arrival], vocabulary: Sequence[int], shared_prefix: int, seed: int) -> list[list[int]]:
    """A prompt of random tokens for each arrival, behind ``shared_prefix`` tokens that are the same in all."""
    rng, tokens = np.random.default_rng([seed, 2]), np.asarray(vocabulary)
    shared: list[int] = rng.choice(tokens, shared_prefix).tolist()
    return [shared + rng.choice(tokens, arrival.input_len).tolist() for arrival in arrivals]


async def consume(engine: asyncsched.Engine, prompt: list[int], output_len: int, timeline: Timeline) -> None:
    """Send one request and note in ``timeline`` when its tokens come."""
    try:
        async with engine.stream(prompt, max_tokens=output_len, temperature=0, ignore_eos=True) as stream:
            async for chunk in stream:
                if chunk.token_ids:
                    timeline.stamps.append(anyio.current_time())
                    timeline.output_tokens += len(chunk.token_ids)
    except asyncsched.AsyncschedError as error:
        timeline.error = f"{type(error).__name__}: {error}"


async def serve(
    engine: asyncsched.Engine, arrivals: Sequence[Arrival], prompts: Sequence[list[int]]
) -> tuple[list[Timeline], float]:
    """Send every request when it is due; returns what their consumers saw, and the seconds until the last has ended."""
    timelines: list[Timeline] = []
    started = anyio.current_time()
    async with anyio.create_task_group() as consumers:
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            timeline = Timeline(started + arrival.at, len(prompt))
            timelines.append(timeline)
            await anyio.sleep_until(timeline.due)
            consumers.start_soon(consume, engine, prompt, arrival.output_len, timeline)
    return timelines, anyio.current_time() - started


async def measure(
    engine: asyncsched.Engine, arrivals: Sequence[Arrival], prompts: Sequence[list[int]], targets: Targets
) -> dict[str, Any]:
    """One run from an empty prefix cache: the figures of ``benchmarks.latency`` and ``hit_rate`` (0 … 1)."""
    await engine.flush_cache()
    before = engine.statistics()
    timelines, duration = await serve(engine, arrivals, prompts)
    after = engine.statistics()
    errors = [timeline.error for timeline in timelines if timeline.error is not None]
    if errors:
        print(f"{len(errors)} of {len(timelines)} requests failed, the first one with {errors[0]}", file=sys.stderr)
    looked_up, found = after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens
    return {**report(timelines, duration, targets), "hit_rate": found / looked_up if looked_up else 0.0}


def runs(options: argparse.Namespace) -> list[tuple[float, list[Arrival]]]:
    """Rate and arrivals of each run; the lengths are the same in all of them."""
    if options.arrivals == "trace":
        trace = read_trace(options.trace, options.requests)
        return [(mean_rate(trace) * factor, scaled(trace, factor)) for factor in options.scale_rate]
    lengths = options.input_len, options.output_len, options.range_ratio
    return [(rate, synthetic(options.requests, rate, options.burstiness, *lengths, options.seed)) for rate in options.rate]


def as_json(record: dict[str, Any]) -> str:
    """One line; numbers rounded, and infinity as ``"inf"``, which JSON has no number for."""

    def plain(value: Any) -> Any:
        if not isinstance(value, float):
            return value
        return "inf" if math.isinf(value) else round(value, 4)

    return json.dumps({name: plain(value) for name, value in record.items()})


def table_line(record: dict[str, Any]) -> str:
    """One line of the table; a dash where no request had the metric."""
    cells = []
    for heading, form in COLUMNS:
        try:
            cell = form.format(**record)
        except TypeError:  # None
            cell = "–"
        cells.append(cell.rjust(max(len(heading), 6)))
    return "  ".join(cells)


async def main(options: argparse.Namespace) -> None:
    """Start an engine, send the load at each rate, print."""
    loads = runs(options)
    targets = Targets(options.ttft_target, options.tpot_target)
    engine_options = {name: getattr(options, name) for name in ("policy", "max_rows", "token_budget", "depth")}
    async with asyncsched.Engine(options.model, **engine_options) as engine:
        special = set() if engine.tokenizer is None else engine.tokenizer.special_ids
        vocabulary = [token for token in range(engine.limits.vocab_size) if token not in special]
        prompts = draw_prompts(loads[0][1], vocabulary, options.shared_prefix, options.seed)
        few = [WARM_UP] * 8
        await serve(engine, few, draw_prompts(few, vocabulary, 0, options.seed + 1))
        if not options.json:
            print("  ".join(heading.rjust(6) for heading, _ in COLUMNS), flush=True)
        for rate, arrivals in loads:
            record = {
                "engine": "asyncsched",
                "model_id": engine.model_name,
                **engine_options,
                "arrivals": options.arrivals,
                "burstiness": options.burstiness,
                "ttft_target": targets.ttft,
                "tpot_target": targets.tpot,
                "num_prompts": len(arrivals),
                "request_rate": rate,
                **await measure(engine, arrivals, prompts, targets),
            }
            print(as_json(record) if options.json else table_line(record), flush=True)


def positive(text: str) -> float:
    """A number above 0; ``inf`` is one."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def whole(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=whole, default=48, help="requests per run; of a trace, the first so many")
    load.add_argument("--arrivals", choices=("poisson", "gamma", "trace"), default="poisson")
    load.add_argument(
        "--rate", type=positive, nargs="+", default=[2, 4, 8, math.inf], help="requests per second; inf: all at once"
    )
    load.add_argument("--burstiness", type=positive, help="of gamma arrivals: 1 is Poisson, less is burstier")
    load.add_argument("--trace", type=Path, help="file to replay: Azure .csv, or .jsonl (see benchmarks.arrivals)")
    load.add_argument("--scale-rate", type=positive, nargs="+", default=[1.0], help="replay a trace so many times as fast")
    load.add_argument("--input-len", type=whole, default=128, help="mean prompt length in tokens")
    load.add_argument("--output-len", type=whole, default=32, help="mean output length in tokens")
    load.add_argument("--range-ratio", type=float, default=0.5, help="lengths are uniform within mean × (1 ± this)")
    load.add_argument("--shared-prefix", type=int, default=0, help="tokens that every prompt begins with, beside its own")
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--ttft-target", type=positive, default=1.0, help="seconds to the first token; inf: no target")
    load.add_argument("--tpot-target", type=positive, default=0.1, help="seconds per token after it; inf: no target")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--policy", default="fcfs")
    engine.add_argument("--max-rows", type=int, default=64)
    engine.add_argument("--token-budget", type=int, default=1024)
    engine.add_argument("--depth", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (default: a table)")
    options = parser.parse_args(arguments)
    if (options.arrivals == "gamma") != (options.burstiness is not None):
        parser.error("--arrivals gamma and --burstiness go together")
    if (options.arrivals == "trace") != (options.trace is not None):
        parser.error("--arrivals trace and --trace go together")
    if options.arrivals == "poisson":
        options.burstiness = 1.0
    return options


if __name__ == "__main__":
    anyio.run(main, parse())
