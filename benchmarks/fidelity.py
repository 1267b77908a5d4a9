"""How true the simulator is: simulated against measured vLLM servers, same arrivals, same limits.

Usage: python -m benchmarks.fidelity RUN [RUN ...] [--workload FILE] [--layers N] [--pages N] [--json]

A RUN is a folder of LLMServingSim 2 (casys-kaist): ``requests.jsonl`` (measured stamps), ``meta.json``
(engine arguments, KV blocks) and ``layer-times/`` (the cost model: nothing is fitted to the run itself).
The workload defaults to ``workload*.jsonl`` beside the run folders. Printed are simulated and measured
TTFT, TPOT and end-to-end latency, and their difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from asyncsched.lab.layer_times import read_layer_times
from asyncsched.lab.readers import read_trace
from asyncsched.lab.recorder import RequestRecord
from asyncsched.lab.simulator import Setup, simulate

TTFT, TPOT, E2E = "ttft", "tpot", "e2e"


def measured(path: Path) -> dict[str, list[float]]:
    """Latencies of the measured run, in seconds."""
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        TTFT: [r["first_token_ts"] - r["queued_ts"] for r in requests],
        TPOT: [(r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1) for r in requests if r["output_toks"] > 1],
        E2E: [r["last_token_ts"] - r["queued_ts"] for r in requests],
    }


def simulated(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """The same of a simulation."""
    records = list(records)
    return {name: [value for r in records if (value := getattr(r, name)) is not None] for name in (TTFT, TPOT, E2E)}


def setup_of(run: Path, layers: int, pages: int | None) -> Setup:
    """The server as it was measured."""
    meta = json.loads((run / "meta.json").read_text())
    engine, cache = meta["engine_kwargs"], meta.get("kv_cache") or {}
    block = cache.get("block_size") or 16
    rows = engine["max_num_seqs"]
    length = engine.get("max_model_len") or 32_768
    known = cache.get("num_gpu_blocks")
    return Setup(
        cost=read_layer_times(run / "layer-times", layers),
        # vLLM keeps one block for itself. A run that does not say how many it had is taken to have had enough.
        pages=pages or (known - 1 if known else rows * length // block),
        page_size=block,
        max_rows=rows,
        max_model_len=length,
        max_tokens="exact",
        hint_error=None,
        options={
            "policy": "fcfs",
            "token_budget": engine["max_num_batched_tokens"],
            "reserve": "prompt",
            "max_preemptions": 1_000_000,
            "low_watermark": 0.0,
            "high_watermark": 0.0,
        },
    )


def compare(run: Path, workload: Path, layers: int, pages: int | None) -> list[dict[str, Any]]:
    """One record per figure."""
    result = simulate(read_trace(workload), setup_of(run, layers, pages))
    ours, theirs = simulated(result.requests), measured(run / "requests.jsonl")
    summaries: tuple[tuple[str, Callable[[list[float]], float]], ...] = (
        ("mean", statistics.mean),
        ("p50", statistics.median),
        ("p90", lambda values: statistics.quantiles(values, n=10)[-1]),
    )
    return [
        {
            "run": run.name,
            "figure": f"{summary} {name}",
            "simulated_ms": round(1e3 * reduce(ours[name]), 1),
            "measured_ms": round(1e3 * reduce(theirs[name]), 1),
            "difference": round(reduce(ours[name]) / reduce(theirs[name]) - 1, 4),
        }
        for name in (TTFT, TPOT, E2E)
        for summary, reduce in summaries
    ]


def main() -> None:
    """Parse the command line and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--workload", type=Path, help="arrivals (default: workload*.jsonl in or beside the run)")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model")
    parser.add_argument("--pages", type=int, help="KV blocks, where meta.json does not say")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for run in options.run:
        found = [*run.glob("workload*.jsonl"), *run.parent.glob("workload*.jsonl")]
        if options.workload is None and not found:
            parser.error(f"no workload*.jsonl in {run} or beside it; name one with --workload")
        for record in compare(run, options.workload or found[0], options.layers, options.pages):
            if options.json:
                print(json.dumps(record), flush=True)
            else:
                print(
                    "{run}: {figure:9} simulated {simulated_ms:10} ms, measured {measured_ms:10} ms, {difference:+.1%}".format(
                        **record
                    )
                )


if __name__ == "__main__":
    main()
