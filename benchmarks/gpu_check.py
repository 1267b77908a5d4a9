"""Whether the CUDA backend computes the right thing on the GPU at hand, and whether it is as fast as it is to be.

Usage: python -m benchmarks.gpu_check --out DIR [--part NAME ...] [--quick] [--minutes 8]

Needs a GPU, and neither a network nor weights: models have the shapes of Llama-3.1-8B, Qwen3-0.6B and
Qwen3-14B, and random numbers in them. Parts:

- ``kernels``: every kernel against its definition in torch, over head sizes, groups, page sizes and types;
- ``equality``: greedy tokens of a small float32 model with CUDA graphs and without, at depth 0, 1 and 2, on the CPU;
- ``attention``: paged decode attention alone, against the bandwidth of a copy on the device;
- ``decode``: decode steps of 1, 64 and 256 rows, against the time their bytes take at that bandwidth;
- ``prefill``: one prompt of 8,192 tokens, against the rate of a large matrix product;
- ``engine``: 256 streams with a live reader each, against a bare loop over the same plans;
- ``overlap``: their throughput with two steps in flight, over that with none;
- ``serving``: 256 sequences of random lengths, against transformers' continuous batching.

The parts run in a process of their own; after one that fails, hangs or brings the device down a new process
goes on with the next. The last thing printed is a table; ``DIR/gpu_check.json`` has that and all details, and
is up to date while the check runs. Exit status: 0 if everything ran and reached its target, 1 if not, 2
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from .gpu.journal import LEAST_SECONDS, Journal, Story

NAMES = ("kernels", "equality", "attention", "decode", "prefill", "engine", "overlap", "serving")
DONE, FAILED, NO_GPU, GO_ON = 0, 1, 2, 3
"""Exit statuses; the last one of a process that measures, for another one to take over behind a part that failed."""
_GRACE = 30.0  # seconds behind the deadline until a process is killed that should have ended itself
_PAUSE = 1.0  # seconds between two looks at the journal


class Process(Protocol):
    """What is needed of ``subprocess.Popen``."""

    def poll(self) -> int | None:
        """Exit status, ``None`` while it runs."""
        ...

    def kill(self) -> None:
        """End it."""
        ...

    def wait(self) -> int:
        """Block until it has ended."""
        ...


def supervise(
    names: Sequence[str],
    out: Path,
    deadline: float,
    start: Callable[[Sequence[str]], Process],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Have all parts measured, by as many processes as it takes, and keep ``gpu_check.json`` up to date.

    Args:
        names: Parts, in order.
        out: The folder.
        deadline: On ``clock``.
        start: Starts a process that measures some parts.
        clock, sleep: Seconds.
    """
    journal = Journal(out / "gpu_check.jsonl")
    rest = list(names)
    while rest:
        began = clock()
        if deadline - began < LEAST_SECONDS:
            for name in rest:
                journal.write("skip", {"part": name, "why": "the time was over"})
            break
        process = start(rest)
        try:
            while process.poll() is None:
                if clock() > deadline + _GRACE:
                    process.kill()
                    process.wait()
                else:
                    sleep(_PAUSE)
                save(out, journal.read())
        except BaseException:
            process.kill()
            raise
        status, story = process.poll(), journal.read()
        if status == NO_GPU and not story.parts:
            return NO_GPU
        if status == DONE:
            break
        broken = story.running or (rest[0] if rest[0] not in story.parts else None)
        if broken is not None:  # it had no time to say so itself
            journal.write("end", {"part": broken, "seconds": round(clock() - began, 1), "why": post_mortem(out, status)})
        rest = [name for name in names if name not in journal.read().parts]
    story = journal.read()
    save(out, story)
    print("\n" + story.summary())
    return DONE if story.good else FAILED


def post_mortem(out: Path, status: int | None) -> str:
    """Why a process ended in the middle of a part."""
    stacks = out / "stacks.txt"
    where = stacks.read_text("utf-8", "replace") if stacks.exists() else ""
    return f"{where}\nthe process ended with status {status} (see above for where it was)"


def save(out: Path, story: Story) -> None:
    """Write ``gpu_check.json``, whole or not at all, once there is something to write."""
    if not story.parts:
        return
    part = out / "gpu_check.json.part"
    part.write_text(json.dumps(story.as_json(), indent=1) + "\n", "utf-8")
    part.replace(out / "gpu_check.json")


def measure(options: argparse.Namespace) -> int:
    """In a process of its own: measure, and report to the journal."""
    from asyncsched import ConfigError

    try:
        from .gpu import parts
    except ImportError as error:
        print(f"gpu_check needs torch and triton: {error}; install asyncsched-llm[gpu]", file=sys.stderr)
        return NO_GPU
    from .gpu.sizes import FULL, QUICK

    journal = Journal(options.out / "gpu_check.jsonl")
    try:
        done = parts.main(options.part, options.out, journal, QUICK if options.quick else FULL, options.until)
    except ConfigError as error:
        print(f"gpu_check needs a GPU: {error}", file=sys.stderr)
        return NO_GPU
    return DONE if done else GO_ON


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go; made if it is not there")
    parser.add_argument("--part", nargs="+", choices=NAMES, default=list(NAMES), help="which parts (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    parser.add_argument("--minutes", type=float, default=8.0, help="parts that have not begun by then are skipped")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # given to the processes that measure
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print the table, return the exit status."""
    options = parse(arguments)
    if options.until is not None:
        status = measure(options)
        sys.stdout.flush()
        os._exit(status)  # a thread of a part that failed may never end
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("gpu_check.jsonl", "gpu_check.json", "stacks.txt"):
        (options.out / name).unlink(missing_ok=True)
    deadline = time.time() + 60 * options.minutes
    names = [name for name in NAMES if name in options.part]
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(options.out), "--until", str(deadline)]
    command += ["--quick"] if options.quick else []
    return supervise(names, options.out, deadline, lambda rest: subprocess.Popen([*command, "--part", *rest]))


if __name__ == "__main__":
    sys.exit(main())
