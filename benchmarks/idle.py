"""What an idle engine costs: CPU time and wake-ups of every thread over a while.

Usage: python -m benchmarks.idle [--seconds 10] [--simulated] [--json]

One request is answered first, so that everything has been started; then nothing is asked.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import anyio

import asyncsched
from asyncsched.testing import SimulatedExecutor


def switches() -> dict[str, int]:
    """Voluntary context switches so far by thread: each is one wake-up."""
    counts = {}
    for task in Path("/proc/self/task").iterdir():
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        counts[f"{fields['Name'].strip()}/{task.name}"] = int(fields["voluntary_ctxt_switches"])
    return counts


async def main(options: argparse.Namespace) -> None:
    """Measure."""
    backend = asyncsched.Backend(SimulatedExecutor(), None, "simulated") if options.simulated else None
    async with asyncsched.Engine(backend=backend) as engine:
        await engine.generate([1, 2, 3], max_tokens=4)
        await anyio.sleep(1)
        before, cpu, started = switches(), time.process_time(), time.perf_counter()
        await anyio.sleep(options.seconds)
        seconds = time.perf_counter() - started
        share, after = (time.process_time() - cpu) / seconds, switches()
    woken = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    # The loop thread is woken once, by this measurement's own timer.
    own = 1
    record = {
        "engine": "asyncsched",
        "seconds": round(seconds, 2),
        "cpu_share": round(share, 5),
        "engine_wakeups_per_second": round(max(0, sum(woken.values()) - own) / seconds, 2),
        "threads": len(after),
    }
    print(json.dumps(record) if options.json else record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--simulated", action="store_true", help="without a model")
    parser.add_argument("--json", action="store_true")
    anyio.run(main, parser.parse_args())
