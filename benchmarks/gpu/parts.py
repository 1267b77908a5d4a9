"""The process that measures: one part after the other, until the time is over or one of them fails."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from asyncsched.backend import load_backend
from asyncsched.gpu.cuda.device import CudaDevice

from . import attention, decode, engine, equality, kernels, prefill, serving
from .journal import LEAST_SECONDS, Journal
from .lab import Lab
from .records import Record, number
from .sizes import Sizes

PARTS: Mapping[str, Callable[[Lab], None]] = {
    "kernels": kernels.run,
    "equality": equality.run,
    "attention": attention.run,
    "decode": decode.run,
    "prefill": prefill.run,
    "engine": engine.run,
    "overlap": engine.run_overlap,
    "serving": serving.run,
}
LONGEST = {"kernels": 150.0, "serving": 300.0}
"""Seconds that a part may take; the others ``LONGEST_ELSE``. What hangs is ended then."""
LONGEST_ELSE = 110.0


def measure(
    names: Sequence[str],
    lab: Lab,
    journal: Journal,
    deadline: float,
    watch: Callable[[float], Any],
    *,
    parts: Mapping[str, Callable[[Lab], None]] = PARTS,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Run parts in order; false if one failed, and the rest is for a process that has nothing to do with it.

    Args:
        names: Which.
        lab: The device.
        journal: Told of every beginning and end.
        deadline: On ``clock``; parts that would begin behind it are skipped.
        watch: Gets the seconds a part may take; a context manager that ends the process after them.
        parts: What they do.
        clock: Seconds.
    """
    for name in names:
        left = deadline - clock()
        if left < LEAST_SECONDS:
            journal.write("skip", {"part": name, "why": "the time was over"})
            continue
        print(f"-- {name}", flush=True)
        journal.write("begin", name)
        began, why = clock(), None
        try:
            with watch(min(LONGEST.get(name, LONGEST_ELSE), left)):
                parts[name](lab)
        except Exception:
            why = traceback.format_exc()
            print(why, flush=True)
        journal.write("end", {"part": name, "seconds": round(clock() - began, 1), "why": why})
        if why is not None:
            return False
    return True


def tell(journal: Journal) -> Callable[[Record], None]:
    """What takes the records: into the journal, and onto the screen as they come."""

    def emit(record: Record) -> None:
        journal.write("record", record.as_json())
        print("   " + "  ".join(record.row()), flush=True)

    return emit


@contextmanager
def ended_after(stacks: Path, seconds: float) -> Iterator[None]:
    """Within: a thread that needs no interpreter lock writes all stacks to a file after so many seconds, and exits."""
    with stacks.open("w") as file:
        faulthandler.enable(file)  # a crash says where, too
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()


def environment(device: torch.device) -> dict[str, Any]:
    """The GPU and the versions of everything."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for name in ("torch", "triton", "transformers", "asyncsched-llm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "memory": f"{number(properties.total_memory / 1e9)} GB",
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver": driver(),
        }
    return found


def driver() -> str | None:
    """The driver's version, as nvidia-smi says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0]


def main(names: Sequence[str], out: Path, journal: Journal, sizes: Sizes, deadline: float) -> bool:
    """Measure on the first GPU. See ``measure``.

    Raises:
        ConfigError: there is none that torch can use; the text says why.
    """
    device = CudaDevice()
    journal.write("environment", environment(device.torch_device))
    stacks = out / "stacks.txt"
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(device, sizes, load_backend, Path(folder), tell(journal), time_left=lambda: deadline - time.time())
        return measure(names, lab, journal, deadline, lambda seconds: ended_after(stacks, seconds))
