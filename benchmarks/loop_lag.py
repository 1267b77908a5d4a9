"""How long the engine ever keeps the event loop from running: a 1-ms ticker beside it, on the real model.

Usage: python -m benchmarks.loop_lag [--json]

Cases: 64 streams read at once; a prompt of 5 MB (refused, since no model is that long) among streams; a
tokenizer that takes 200 ms per call. Printed are the ticker's longest gap and its 99th percentile, in
milliseconds, and the same for an idle loop. On a machine whose cores are all busy the gaps contain the
operating system's time slices, too: compare with ``busy``, which is the same ticker beside two threads
that compute without the interpreter lock.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio
import anyio.to_thread

import asyncsched
from asyncsched.backend import load_backend


class SlowTokenizer:
    """Takes 200 ms for every call."""

    def __init__(self, inner: asyncsched.Tokenizer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def encode(self, *args: object, **options: object) -> object:
        """Sleep, then encode."""
        time.sleep(0.2)
        return self._inner.encode(*args, **options)  # type: ignore[arg-type]


async def gaps(work: Callable[[], Awaitable[object]]) -> list[float]:
    """Milliseconds between ticks while ``work`` runs."""
    found: list[float] = []
    done = False

    async def tick() -> None:
        last = time.perf_counter()
        while not done:
            await anyio.sleep(0.001)
            now = time.perf_counter()
            found.append((now - last - 0.001) * 1e3)
            last = now

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await work()
        done = True
    return sorted(found)


async def streams(engine: asyncsched.Engine, count: int) -> None:
    """Read many streams at once, as text."""

    async def read(index: int) -> None:
        async with engine.stream(f"Tell me about the number {index}.", max_tokens=48, ignore_eos=True, seed=index) as stream:
            async for _ in stream:
                pass

    async with anyio.create_task_group() as tasks:
        for index in range(count):
            tasks.start_soon(read, index)


async def busy() -> None:
    """Two threads that compute without the interpreter lock, for three seconds."""
    import torch

    stop = threading.Event()

    def compute() -> None:
        a = torch.randn(512, 512)
        while not stop.is_set():
            a = (a @ a).clamp(-1, 1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, compute)
        await anyio.sleep(3)
        stop.set()


async def main(options: argparse.Namespace) -> None:
    """Run every case."""

    def report(case: str, found: list[float]) -> None:
        p99 = found[int(len(found) * 0.99)]
        record = {"case": case, "max_ms": round(found[-1], 2), "p99_ms": round(p99, 2), "ticks": len(found)}
        print(json.dumps(record) if options.json else record, flush=True)

    report("idle", await gaps(lambda: anyio.sleep(2)))
    backend = await anyio.to_thread.run_sync(load_backend, asyncsched.EngineConfig(max_rows=64, max_model_len=2048))
    assert backend.tokenizer is not None
    report("busy", await gaps(busy))
    async with asyncsched.Engine(backend=backend) as engine:
        await streams(engine, 2)
        report("64 streams", await gaps(lambda: streams(engine, 64)))

        async def huge() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(streams, engine, 4)
                try:
                    await engine.generate("one two three four five " * 210_000, max_tokens=1)
                except asyncsched.PromptTooLongError:
                    return

        report("5 MB prompt", await gaps(huge))
    config = asyncsched.EngineConfig(max_rows=64, max_model_len=2048)
    backend = await anyio.to_thread.run_sync(load_backend, config)
    assert backend.tokenizer is not None
    slow = replace(backend, tokenizer=SlowTokenizer(backend.tokenizer))  # type: ignore[arg-type]
    async with asyncsched.Engine(backend=slow) as engine:
        report("slow tokenizer", await gaps(lambda: streams(engine, 8)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    anyio.run(main, parser.parse_args())
