"""What overlapping control and compute gains: how long the device waits, by the number of steps in flight.

Usage: python -m benchmarks.overlap [--part steady blocked own_loop model] [--step-ms 2 5 10 20]
[--rows 64 256 1024] [--depth 0 1 2 3] [--switch-ms 5] [--uvloop] [--json]

All parts but the last run on a simulated device in threads, with one reader per row that takes every
token as text: ``steady`` at several step times and row counts; ``blocked`` beside an application that
holds up the event loop at random moments, asleep or computing in Python (which also keeps the interpreter
lock from the device's threads); ``own_loop`` the same, and undisturbed, with the engine in an event loop
of its own. ``model`` is 64 short requests on the real model.

``idle_share`` is the share of the time that the device waits between steps; ``bound_share`` the
throughput at the readers as a share of what the device could do, rows ÷ step time. The last line is
the gain in throughput of two steps in flight over none, at 256 rows and 5 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import anyio

import asyncsched
from asyncsched.testing import ByteTokenizer, ThreadedExecutor

from .workloads import warm_up_prompts, workloads

PARTS = ("steady", "blocked", "own_loop", "model")
PROMPT, PAGE = 16, 16
WARM_UP, STEADY_SECONDS, BLOCKED_SECONDS = 0.2, 1.0, 2.0
BLOCKED_CELL = (10.0, 256)
BLOCKS_PER_SECOND = {5: 10, 50: 2}
GAIN_CELL = (5.0, 256)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement on the simulated device.

    Attributes:
        step_ms: What a step takes on the device.
        rows: Requests running, each with a reader.
        depth: Steps in flight.
        blocked_ms: How long the application blocks its loop each time; 0 is never.
        block: How: asleep, or computing in Python.
        own_loop: The engine has an event loop of its own.
    """

    step_ms: float
    rows: int
    depth: int
    blocked_ms: int = 0
    block: Literal["sleep", "busy"] | None = None
    own_loop: bool = False


@dataclass(slots=True)
class Tally:
    """What the readers got.

    Attributes:
        waiting: Readers that have nothing yet; ``complete`` is set when there are none.
        tokens: Tokens in all.
        characters: The length of their text.
        at: When the last of them came.
    """

    waiting: int
    complete: anyio.Event
    tokens: int = 0
    characters: int = 0
    at: float = 0.0


async def read(stream: asyncsched.TokenStream, tally: Tally) -> None:
    """Take every token as text as it comes."""
    first = True
    async for chunk in stream:
        tally.tokens += len(chunk.token_ids)
        tally.characters += len(chunk.text)
        tally.at = time.monotonic()
        if first:
            first = False
            tally.waiting -= 1
            if not tally.waiting:
                tally.complete.set()


def hold_up(seconds: float, how: Literal["sleep", "busy"]) -> None:
    """Block the thread, without or with the interpreter lock."""
    if how == "sleep":
        time.sleep(seconds)
        return
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100))


async def disturb(cell: Cell) -> None:
    """Block the loop at random moments, one in every period."""
    assert cell.block is not None
    rng, period = random.Random(0), 1 / BLOCKS_PER_SECOND[cell.blocked_ms]
    began, count = anyio.current_time(), 0
    while True:
        await anyio.sleep_until(began + (count + rng.random()) * period)
        hold_up(cell.blocked_ms / 1e3, cell.block)
        count += 1


async def simulated(cell: Cell) -> dict[str, Any]:
    """Measure one cell while all its rows decode."""
    step, seconds = cell.step_ms / 1e3, BLOCKED_SECONDS if cell.block else STEADY_SECONDS
    output = int(2 * (WARM_UP + seconds + 1) / step)  # more than can be computed meanwhile
    pages = cell.rows * (-(-(PROMPT + output) // PAGE) + 1)
    tokenizer = ByteTokenizer()
    limits = asyncsched.ExecutorLimits(cell.rows, pages, PAGE, PROMPT + output, tokenizer.vocab_size)
    executor, tally, rng = ThreadedExecutor(limits, step), Tally(cell.rows, anyio.Event()), random.Random(0)
    engine = asyncsched.Engine(
        backend=asyncsched.Backend(executor, tokenizer, "simulated"),
        depth=cell.depth, token_budget=cell.rows * (PROMPT + 1), own_loop=cell.own_loop,
    )  # fmt: skip
    async with engine, anyio.create_task_group() as tasks:
        for _ in range(cell.rows):
            prompt = [rng.randrange(256) for _ in range(PROMPT)]
            tasks.start_soon(read, engine.stream(prompt, max_tokens=output, ignore_eos=True), tally)
        await tally.complete.wait()
        await anyio.sleep(WARM_UP)
        if cell.block:
            tasks.start_soon(disturb, cell)
        line, tokens, at = executor.timeline, tally.tokens, tally.at
        await anyio.sleep(seconds)
        line, tokens, at = executor.timeline.since(line), tally.tokens - tokens, tally.at - at
        assert not any(engine.statistics().finished.values()), "some rows were over before the measurement was"
        tasks.cancel_scope.cancel()
    assert tally.characters == tally.tokens
    return {
        "benchmark": "overlap", "case": "simulated", **asdict(cell),
        "idle_share": round(line.idle_share, 4),
        "steps_per_s": round(line.steps / (line.busy + line.idle), 1),
        "bound_share": round(tokens / at * step / cell.rows, 4),
    }  # fmt: skip


async def on_model(depth: int) -> dict[str, Any]:
    """Measure the real model: 64 short requests, all at once, read as they come."""
    workload = workloads()["short64"]
    tally = Tally(len(workload.prompts), anyio.Event())
    async with asyncsched.Engine(dtype="bfloat16", max_rows=64, max_model_len=2048, depth=depth) as engine:
        await engine.generate(warm_up_prompts(), max_tokens=8, temperature=0, ignore_eos=True)
        before, began = engine.statistics(), time.monotonic()
        async with anyio.create_task_group() as tasks:
            for prompt in workload.prompts:
                stream = engine.stream(prompt, max_tokens=workload.output, temperature=0, ignore_eos=True)
                tasks.start_soon(read, stream, tally)
        seconds, after = time.monotonic() - began, engine.statistics()
    steps, busy = after.steps - before.steps, after.device_busy - before.device_busy
    cell = Cell(round(busy / steps * 1e3, 2), len(workload.prompts), depth)
    return {
        "benchmark": "overlap", "case": "model", **asdict(cell),
        "idle_share": round(1 - busy / seconds, 4),
        "steps_per_s": round(steps / seconds, 1),
        "bound_share": round(busy / seconds, 4),
        "tokens_per_s": round(tally.tokens / seconds, 1),
    }  # fmt: skip


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The chosen cells of the simulated parts."""
    if "steady" in options.part:
        for step_ms in options.step_ms:
            for rows in options.rows:
                yield from (Cell(step_ms, rows, depth) for depth in options.depth)
    step_ms, rows = BLOCKED_CELL
    if step_ms not in options.step_ms or rows not in options.rows:
        return
    if "own_loop" in options.part:
        yield from (Cell(step_ms, rows, depth, own_loop=True) for depth in options.depth)
    for own_loop in [part == "own_loop" for part in ("blocked", "own_loop") if part in options.part]:
        for blocked_ms in BLOCKS_PER_SECOND:
            for block in ("sleep", "busy"):
                yield from (Cell(step_ms, rows, depth, blocked_ms, block, own_loop) for depth in options.depth)


def show(record: dict[str, Any], as_json: bool) -> None:
    """Print one measurement."""
    if as_json:
        print(json.dumps(record), flush=True)
        return
    blocked = f", loop {record['block']} {record['blocked_ms']} ms" if record["block"] else ""
    own = ", own loop" if record["own_loop"] else ""
    cell = f"{record['case']:9} {record['rows']:5} rows × {record['step_ms']:5} ms, depth {record['depth']}{blocked}{own}"
    idle, bound = f"device idle {record['idle_share']:6.1%}", f"{record['bound_share']:6.1%} of the bound"
    print(f"{cell}: {idle}, {record['steps_per_s']:6} steps/s, {bound}", flush=True)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[2.0, 5.0, 10.0, 20.0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--switch-ms", type=float, help="sys.setswitchinterval, for the interpreter lock")
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.switch_ms is not None:
        sys.setswitchinterval(options.switch_ms / 1e3)
    loop = {"use_uvloop": options.uvloop}
    shares: dict[int, float] = {}
    for cell in cells(options):
        record = anyio.run(simulated, cell, backend_options=loop)
        show(record, options.json)
        if (cell.step_ms, cell.rows) == GAIN_CELL:
            shares[cell.depth] = record["bound_share"]
    if "model" in options.part:  # last, so that its libraries do not weigh on the others' garbage collection
        for depth in options.depth:
            show(anyio.run(on_model, depth, backend_options=loop), options.json)
    if 0 in shares and 2 in shares:
        gain = {"benchmark": "overlap", "case": "gain", "step_ms": GAIN_CELL[0], "rows": GAIN_CELL[1]}
        gain["gain"] = round(shares[2] / shares[0], 3)
        print(json.dumps(gain) if options.json else f"depth 2 over depth 0, 256 rows × 5 ms: × {gain['gain']}")


if __name__ == "__main__":
    main()
