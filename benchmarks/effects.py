"""Whether policies do on real traffic what their papers promise: the real engine in virtual time.

Usage: python -m benchmarks.effects TRACES [--only NAME ...] [--json]

TRACES is a folder that holds the published files, at any depth: ``conversation_trace.jsonl`` and
``synthetic_trace.jsonl`` of Mooncake, ``AzureLLMInferenceTrace_conv.csv`` and ``…_code.csv`` of Azure
2023. Each comparison (``benchmarks/effects_cases.py``) serves one excerpt of them with several sets of
policies, by name, on the same modelled server (Llama-3.1-8B on one RTX PRO 6000, unless it says
otherwise), and looks whether what was promised shows. Callers set the longest output of the excerpt as
their limit and attach the right length as a hint. Real time decides nothing, so the figures are the same
on every machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncsched.lab.defaults import DEFAULT_COST
from asyncsched.lab.figures import FIGURES, Figure
from asyncsched.lab.measures import Measures, measure
from asyncsched.lab.readers import read_trace
from asyncsched.lab.simulator import Setup, simulate
from asyncsched.lab.trace import Trace, scaled
from benchmarks.effects_cases import COMPARISONS, Comparison

_NAMES = {
    "cached %": "prompt tokens from cache, %",
    "TTFT s": "TTFT mean, s",
    "ITL p99 ms": "ITL p99, ms",
    "E2E s": "E2E mean, s",
    "max wait s": "longest wait, s",
    "in time %": "kept their targets, %",
    "gap tokens": "worst service gap, tokens",
    "preempted": "preemptions",
    "output/s": "output tokens/s",
}
COLUMNS = {heading: next(figure for figure in FIGURES if figure.name == name) for heading, name in _NAMES.items()}
"""Figures of the laboratory by their headings here."""


def excerpt(trace: Trace, comparison: Comparison) -> Trace:
    """The part of a trace that is served, as its caller wants it."""
    requests = trace.requests[comparison.first : comparison.first + comparison.count]
    return comparison.change(scaled(Trace(trace.name, requests), comparison.rate))


def serve(trace: Trace, comparison: Comparison) -> dict[str, Measures]:
    """Serve the excerpt once per set of policies."""
    measured = {}
    for name, policies in comparison.runs.items():
        options = {"token_budget": comparison.token_budget, "reserve": "expected", **policies}
        setup = Setup(
            DEFAULT_COST,
            pages=comparison.pages,
            page_size=comparison.page_size,
            max_rows=comparison.rows,
            options=options,
        )
        measured[name] = measure(simulate(trace, setup, name))
    return measured


def compare(trace: Trace, comparison: Comparison) -> dict[str, Any]:
    """Run a comparison: the figures of every run, and which promises hold."""
    measured = serve(excerpt(trace, comparison), comparison)
    return {
        "comparison": comparison.name,
        "served": comparison.served,
        "runs": {
            name: {heading: _rounded(COLUMNS[heading], measures) for heading in comparison.columns}
            for name, measures in measured.items()
        },
        "promises": {promise.text: bool(promise.holds(measured)) for promise in comparison.promises},
    }


def _rounded(figure: Figure, measures: Measures) -> float:
    return float(format(figure.get(measures), figure.form))


def lines(record: Mapping[str, Any]) -> Iterable[str]:
    """One comparison for people."""
    yield f"{record['comparison']}: {record['served']}"
    width = max(map(len, record["runs"])) + 2
    yield f"  {'':<{width}}" + "".join(f"{heading:>12}" for heading in next(iter(record["runs"].values())))
    for name, figures in record["runs"].items():
        cells = (f"{format(value, COLUMNS[heading].form):>12}" for heading, value in figures.items())
        yield f"  {name:<{width}}" + "".join(cells)
    for promise, holds in record["promises"].items():
        yield f"  {'yes' if holds else 'NO':<4}{promise}"
    yield ""


def find(folder: Path, name: str) -> Path:
    """The file of this name somewhere below the folder.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(folder.rglob(name))
    if not found:
        raise FileNotFoundError(f"{name} is not in {folder}; it is one of the published traces")
    return found[0]


def main() -> None:
    """Parse the command line and print the comparisons one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="folder with the published trace files")
    names = [comparison.name for comparison in COMPARISONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    traces: dict[str, Trace] = {}
    for comparison in COMPARISONS:
        if comparison.name not in arguments.only:
            continue
        if comparison.file not in traces:
            traces[comparison.file] = read_trace(find(arguments.traces, comparison.file))
        record = compare(traces[comparison.file], comparison)
        print(json.dumps(record) if arguments.json else "\n".join(lines(record)), flush=True)


if __name__ == "__main__":
    main()
