"""What the engine scripts share: command line, passes over the workloads, JSON lines, peak memory.

Only the standard library and ``benchmarks.workloads``: every engine's own Python can import it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..workloads import Workload, warm_up_prompts, workloads

STARTED = time.perf_counter()  # the scripts import this module before their engine


class PeerEngine(Protocol):
    """One loaded engine: bf16, greedy, no early stop."""

    def generate(self, prompts: list[list[int]], output: int) -> Sequence[int]:
        """Answer all prompts.

        Args:
            prompts: Token ids per request, all there at once.
            output: Tokens to generate per request.

        Returns:
            The number of tokens generated per request.
        """

    def forget(self) -> None:
        """Empty the prefix cache, if there is one."""


def emit(engine: str, workload: str, **figures: float) -> None:
    """Print one measurement as a JSON line."""
    print(json.dumps({"engine": engine, "workload": workload, **figures}), flush=True)


def timed_pass(engine: PeerEngine, workload: Workload) -> float:
    """Seconds for all requests of a workload, from an empty prefix cache."""
    engine.forget()
    started = time.perf_counter()
    counts = engine.generate(workload.prompts, workload.output)
    seconds = time.perf_counter() - started
    if list(counts) != [workload.output] * len(workload.prompts):
        raise RuntimeError(f"{workload.name}: each request should have {workload.output} tokens, got {sorted(set(counts))}")
    return seconds


def family(pid: int) -> list[int]:
    """A process and its living descendants."""
    members = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread or child that has ended meanwhile
            for child in (thread / "children").read_text().split():
                members += family(int(child))
    return members


def peak_rss_mb() -> float:
    """Peak resident memory of this process and its living descendants, in MB of 2**20 bytes.

    Memory that processes share counts once for each. From ``VmHWM``: ``getrusage`` would miss descendants
    that still run, and starts from the parent's peak.
    """
    kib = 0
    for pid in family(os.getpid()):
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            kib += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return round(kib / 1024, 1)


def run(name: str, load: Callable[[str], PeerEngine], description: str | None) -> None:
    """The whole script: load, warm up, run the workloads, print.

    Args:
        name: The engine's name in the records.
        load: Starts the engine with a model (``--model``).
        description: Help text of the command line.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model's folder or file")
    parser.add_argument("--workload", nargs="+", choices=list(workloads()))
    parser.add_argument("--repeat", type=int, default=1, help="passes per workload; the median counts")
    options = parser.parse_args()

    created = time.perf_counter()
    engine = load(options.model)
    engine.generate([[1, 2, 3]], 1)
    ready = time.perf_counter()
    emit(name, "startup", seconds=round(ready - created, 2), process=round(ready - STARTED, 2))
    engine.generate(warm_up_prompts(), 8)
    for workload in workloads().values():
        if options.workload and workload.name not in options.workload:
            continue
        seconds = statistics.median([timed_pass(engine, workload) for _ in range(options.repeat)])
        emit(
            name,
            workload.name,
            seconds=round(seconds, 3),
            output_throughput=round(workload.output_tokens / seconds, 1),
            total_token_throughput=round(workload.total_tokens / seconds, 1),
        )
    emit(name, "memory", max_rss_mb=peak_rss_mb())


def aligned(rows: Sequence[Sequence[Any]]) -> str:
    """Rows of cells as a text table: the first column to the left, the others to the right, a rule below the head."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
