"""The plots of a report, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .recorder import RequestRecord
from .simulator import SimulationResult

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#0a7ea4", "#bf3989", "#57606a")
_STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d8dee4",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#8c959f",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.hashsalt": "asyncsched",  # the same report for the same run
}


def latency_curves(results: Sequence[SimulationResult]) -> str:
    """Cumulative distributions of TTFT, TPOT and end-to-end latency, a line per run."""
    kinds: tuple[tuple[str, Callable[[RequestRecord], float | None]], ...] = (
        ("time to first token, s", lambda record: record.ttft),
        ("time per output token, s", lambda record: record.tpot),
        ("end to end, s", lambda record: record.e2e),
    )
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 3.2), layout="constrained")
        for axes, (title, get) in zip(figure.subplots(1, 3), kinds, strict=True):
            for colour, result in zip(_cycle(results), results, strict=True):
                values = np.sort([value for record in result.requests if (value := get(record)) is not None])
                if len(values):
                    axes.plot(values, np.arange(1, len(values) + 1) / len(values), color=colour, label=result.name)
            axes.set(xlabel=title, ylim=(0, 1.01), xlim=(0, None))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        figure.axes[0].set_ylabel("requests")
        if figure.axes[-1].lines:
            figure.axes[-1].legend(loc="lower right")
        return _svg(figure)


def timeline(result: SimulationResult, pages: int) -> str:
    """One run over time: requests running and waiting, and what the pages hold."""
    line = result.timeline
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        requests, memory = figure.subplots(2, 1, sharex=True)
        requests.fill_between(line.at, line.running, color=COLOURS[0], alpha=0.35, linewidth=0, label="running")
        requests.plot(line.at, line.waiting, color=COLOURS[1], linewidth=1.1, label="waiting")
        requests.set_ylabel("requests")
        memory.stackplot(
            line.at,
            100 * line.used_pages / pages,
            100 * line.cached_pages / pages,
            labels=("held by requests", "cached prefixes"),
            colors=(COLOURS[0], COLOURS[2]),
            alpha=0.5,
            linewidth=0,
        )
        memory.set(xlabel="virtual time, s", ylabel="pages, %", ylim=(0, 100))
        for axes in (requests, memory):
            axes.legend(loc="upper right", ncols=2)
            axes.set_xlim(0, line.at[-1] if len(line.at) else 1)
            axes.set_ylim(0, None)
        memory.set_ylim(0, 100)
        return _svg(figure)


def service(results: Sequence[SimulationResult]) -> str:
    """Tokens served per tenant over time, an axis per run."""
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 2.9 * rows), layout="constrained")
        grid: list[Axes] = list(np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).flat)
        for axes, result in zip(grid, results, strict=False):
            for colour, (tenant, served) in zip(_cycle(result.timeline.service), result.timeline.service.items(), strict=True):
                axes.plot(result.timeline.at, served / 1000, color=colour, label=tenant or "(no tenant)")
            axes.set_title(result.name, loc="left", fontsize=9)
            axes.set_xlim(0, None)
            axes.set_ylim(0, None)
        for axes in grid[len(results) :]:
            axes.set_visible(False)
        grid[0].legend(loc="upper left")
        figure.supxlabel("virtual time, s", fontsize=9)
        figure.supylabel("thousand tokens served", fontsize=9)
        return _svg(figure)


def _cycle(items: object) -> list[str]:
    count = len(items)  # type: ignore[arg-type]
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]
