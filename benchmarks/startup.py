"""From nothing to the first answer, and the memory it takes, each in a fresh process.

Usage: python -m benchmarks.startup [--model MODEL] [--repeat 3] [--json]

``ready_s`` runs from the start of the process, interpreter and imports included, until an engine has
answered one token; ``engine_s`` from the creation of the engine, with everything imported that
``import asyncsched`` imports. ``cold`` finds no compiled kernels (an empty cache folder), ``warm`` those
of an earlier process. Medians over ``--repeat`` processes each.

Memory, in MB of 2**20 bytes, after a few greedy and drawn answers: ``rss_mb`` of the process,
``weights_mb`` (every tensor the loaded model holds, copies laid out for the products included) and
``pool_mb`` (all pages, each written once, so that all of it is resident). ``beyond_mb`` is what is left of
the resident memory without both; ``peak_beyond_mb`` the same for the highest resident memory so far, most of
it while loading. ``of_it`` says where resident memory grew, in order; ``load`` is without the weights.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MB = 2**20
PAGES = 64


def resident(field: str = "VmRSS") -> float:
    """Resident memory of this process; ``VmHWM`` is its highest so far."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024 / MB


def tensor_mb() -> float:
    """Size of every living tensor, each memory counted once."""
    import torch

    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would ask things for their __class__, and some warn
            shared = thing.layout is torch.strided  # tensors in the products' own layout have no address
            found[thing.data_ptr() if shared else id(thing)] = thing.numel() * thing.element_size()
    return sum(found.values()) / MB


def time_to_ready(started: float, options: dict[str, Any]) -> dict[str, float]:
    """Seconds until the first token of an engine: since ``started`` (monotonic), and since the engine was made."""
    import anyio

    import asyncsched

    async def answer() -> float:
        async with asyncsched.Engine(**options) as engine:
            await engine.generate([1, 2, 3], max_tokens=1, temperature=0)
            return time.monotonic()

    created = time.monotonic()
    ready = anyio.run(answer)
    return {"ready_s": ready - started, "engine_s": ready - created}


def memory(options: dict[str, Any]) -> dict[str, Any]:
    """Resident memory of an engine after its first requests, and where it grew."""
    grown: dict[str, float] = {"python": resident()}

    def grew(what: str, *, without: float = 0.0) -> None:
        grown[what] = resident() - without - sum(grown.values())

    for name in ("asyncsched", "torch", "numba", "asyncsched.gpu.cpu"):
        importlib.import_module(name)
        grew(f"import {name}")
    import anyio

    import asyncsched
    from asyncsched.backend import load_backend

    backend = load_backend(asyncsched.EngineConfig.from_options(options))
    executor: Any = backend.executor
    pools = [pool for pair in executor._pools for pool in pair]
    pool_mb = sum(pool.nbytes for pool in pools) / MB
    weights_mb = tensor_mb() - pool_mb
    peak = resident("VmHWM") - weights_mb
    grew("load", without=weights_mb)
    for pool in pools:
        pool.zero_()

    async def answer() -> None:
        async with asyncsched.Engine(backend=backend, **options) as engine:
            for temperature in (0.0, 1.0):
                await engine.generate([[1, 2, 3]] * 8, max_tokens=8, temperature=temperature, top_p=0.9, seed=0)
            grew("requests", without=weights_mb + pool_mb)

    anyio.run(answer)
    beyond = sum(grown.values())
    return {
        "rss_mb": beyond + weights_mb + pool_mb,
        "weights_mb": weights_mb,
        "pool_mb": pool_mb,
        "beyond_mb": beyond,
        "peak_beyond_mb": max(peak, resident("VmHWM") - weights_mb - pool_mb),
        "of_it": {what: round(size, 1) for what, size in grown.items()},
    }


def in_process(what: str, options: dict[str, Any], cache: str) -> dict[str, Any]:
    """What this module measures in a process of its own, with compiled kernels in the folder ``cache``."""
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.startup", "--measure", what, repr(started), json.dumps(options)]
    done = subprocess.run(command, env={**os.environ, "NUMBA_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # log messages may precede it
    return record


def measurements(options: dict[str, Any], repeat: int) -> list[dict[str, Any]]:
    """All records: cold and warm start, then memory behind either."""
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cold = [in_process("start", options, f"{folder}/{index}") for index in range(repeat)]
        filled = f"{folder}/0"
        warm = [in_process("start", options, filled) for _ in range(repeat)]
        for case, runs in (("cold", cold), ("warm", warm)):
            medians = {name: round(statistics.median(run[name] for run in runs), 2) for name in ("ready_s", "engine_s")}
            records.append({"case": case, **medians})
        for caches, cache in (("warm", filled), ("cold", f"{folder}/empty")):
            sizes = in_process("memory", options, cache)
            records.append({"case": "memory", "caches": caches, **{k: _rounded(v) for k, v in sizes.items()}})
    return records


def _rounded(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


def main() -> None:
    """Parse the command line and print, or measure in this process if this is one of those started for it."""
    if sys.argv[1:2] == ["--measure"]:
        what, started, options = sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4])
        print(json.dumps(memory(options) if what == "memory" else time_to_ready(started, options)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3, help="processes per case")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    engine = {"model": arguments.model, "dtype": arguments.dtype, "max_rows": 64, "max_model_len": 2048, "pages": PAGES}
    for record in measurements(engine, arguments.repeat):
        record = {"benchmark": "startup", **record}
        print(json.dumps(record) if arguments.json else "  ".join(f"{k}={v}" for k, v in record.items()), flush=True)


if __name__ == "__main__":
    main()
