"""asyncsched and other engines under the same workloads, one after the other on the same machine.

Usage: python -m benchmarks.compare [--peer NAME ...] [--workload NAME ...] [--repeat 3] [--rounds 1] [--json]

Each engine runs in a process and an environment of its own: asyncsched first, then every peer, and so on
for the next round; medians over the rounds count. Machines are noisy: read the ratios. The table gives
output tokens per second (prefill16: prompt and output tokens), in brackets asyncsched ÷ peer; ``ready``
is from the start of the process to the first answer, imports included; ``memory`` the most that was
resident. ``scripts/install_peers.sh`` installs the peers; one that is missing or fails is named.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .peers.report import aligned
from .workloads import workloads

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
PEERS_HOME = Path(os.environ.get("ASYNCSCHED_PEERS") or Path.home() / ".cache/asyncsched-peers")
OURS = "asyncsched"
TIMEOUT = 3600  # seconds for one engine in one round


@dataclass(frozen=True, slots=True)
class Engine:
    """How to run one engine.

    Attributes:
        name: What the command line and the records call it.
        module: The script that loads it and prints JSON lines.
        arguments: Of the script, beside the workloads.
        python: The interpreter of its environment.
        model: What it loads; None is asyncsched's packaged model.
        part: What ``scripts/install_peers.sh`` calls what it needs.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    model: Path | None = None
    part: str = ""

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"bash scripts/install_peers.sh {self.part}"

    def missing(self) -> str:
        """Why it cannot run, or nothing."""
        needed = [self.python] if self.model is None else [self.python, self.model]
        return ", ".join(f"{path} does not exist" for path in needed if not path.exists())


ASYNCSCHED = Engine(OURS, "benchmarks.throughput", ("--json",))
FOLDER = PEERS_HOME / "model"
PEERS = {
    peer.name: peer
    for peer in (
        Engine("vllm", "benchmarks.peers.vllm_engine", (), PEERS_HOME / "vllm/bin/python", FOLDER, "model vllm"),
        Engine("llama.cpp", "benchmarks.peers.llama_cpp_engine", (), PEERS_HOME / "llama-cpp/bin/python",
               PEERS_HOME / "gguf/smollm2-135m-bf16.gguf", "llama.cpp"),
        Engine("transformers-generate", "benchmarks.peers.transformers_generate", model=FOLDER, part="model"),
        Engine("transformers-continuous", "benchmarks.peers.transformers_continuous", model=FOLDER, part="model"),
    )
}  # fmt: skip


def run(engine: Engine, names: Sequence[str], repeat: int) -> list[Record]:
    """Run one engine once.

    Args:
        engine: Which.
        names: Workloads.
        repeat: Passes per workload.

    Returns:
        What it printed. If it could not run to its end, the last record says why: ``failed``, ``install``.
    """
    failed = {"engine": engine.name, "install": engine.install}
    if reason := engine.missing():
        return [{**failed, "failed": reason}]
    command = [str(engine.python), "-m", engine.module, *engine.arguments, "--repeat", str(repeat), "--workload", *names]
    if engine.model is not None:
        command += ["--model", str(engine.model)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return [{**failed, "failed": f"took longer than {TIMEOUT} s"}]
    finally:
        with suppress(ProcessLookupError):  # the engine, if it still runs, and whatever it left running
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        records.append({**failed, "failed": last[0]})
    return records


def medians(records: Iterable[Record]) -> list[Record]:
    """One record per engine and workload, in order of appearance: the median of every figure over the rounds."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["engine"], record["workload"]), []).append(record)
    return [
        {
            "engine": engine,
            "workload": workload,
            "rounds": len(group),
            **{key: statistics.median(one[key] for one in group) for key in group[0] if key not in ("engine", "workload")},
        }
        for (engine, workload), group in groups.items()
    ]


def figure(record: Record) -> float:
    """What counts of a record: tokens per second of a workload, seconds until ready, or MB."""
    key = {"startup": "process", "memory": "max_rss_mb", "prefill16": "total_token_throughput"}
    return float(record[key.get(record["workload"], "output_throughput")])


def table(records: Sequence[Record]) -> str:
    """Workloads by engines; beside a peer's tokens per second, asyncsched ÷ peer."""
    engines = list(dict.fromkeys(record["engine"] for record in records))
    cells = {(record["engine"], record["workload"]): figure(record) for record in records}

    def cell(engine: str, workload: str) -> str:
        value, ours = cells.get((engine, workload)), cells.get((OURS, workload))
        if value is None:
            return "–"
        ratio = f" ({ours / value:5.2f})" if ours is not None and engine != OURS and workload in workloads() else ""
        return f"{value:,.1f}{ratio}"

    labels = {name: f"{name}, tok/s" for name in workloads()} | {"startup": "ready, s", "memory": "memory, MB"}
    rows = [
        [label, *(cell(engine, workload) for engine in engines)]
        for workload, label in labels.items()
        if any((engine, workload) in cells for engine in engines)
    ]
    return aligned([["", *engines], *rows])


def main() -> int:
    """Run all, print; 1 if asyncsched itself failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--workload", nargs="+", choices=list(workloads()), default=list(workloads()))
    parser.add_argument("--repeat", type=int, default=3, help="passes per workload in a round; their median counts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object per engine and workload (default: a table)")
    options = parser.parse_args()
    records: list[Record] = []
    for number in range(1, options.rounds + 1):
        for engine in (ASYNCSCHED, *(PEERS[name] for name in options.peer)):
            print(f"round {number} of {options.rounds}: {engine.name} …", file=sys.stderr, flush=True)
            records += run(engine, options.workload, options.repeat)
    failures = list({record["engine"]: record for record in records if "failed" in record}.values())
    measured = medians(record for record in records if "failed" not in record)
    if options.json:
        for record in measured + failures:
            print(json.dumps(record))
    else:
        print(table(measured))
        for record in failures:
            print("{engine} is missing or failed: {failed}\n  to install it: {install}".format(**record))
    return int(any(record["engine"] == OURS for record in failures))


if __name__ == "__main__":
    sys.exit(main())
