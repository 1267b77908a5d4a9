"""The comparison as a table in the terminal and as an HTML report."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Sequence
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.progress import Progress

from asyncsched.cost import LinearCost
from asyncsched.lab import Setup, SimulationResult, Trace, TraceRequest, simulate
from asyncsched.lab.figures import FIGURES, figures_for, is_best
from asyncsched.lab.measures import Measures, measure
from asyncsched.lab.plots import latency_curves
from asyncsched.lab.report import write_report
from asyncsched.lab.tables import Bars, progress, show

COST = LinearCost(0.01, 0.001, 0.0, 0.001)
BY_NAME = {figure.name: figure for figure in FIGURES}
AWKWARD = 'sjf,shares={"<b>&$x_1$": 1} [bold]'
"""A name with everything that HTML, SVG, rich and matplotlib give a meaning to."""


def trace(tenants: Sequence[str] = ("",), *, notes: tuple[str, ...] = (), **about: Any) -> Trace:
    requests = [TraceRequest(0.02 * index, 20, 5, tenant=tenants[index % len(tenants)], **about) for index in range(30)]
    return Trace("thirty", requests, notes)


def runs(workload: Trace, *names: str) -> list[SimulationResult]:
    """As many different runs, of few rows to many."""
    return [simulate(workload, Setup(COST, max_rows=1 + 2 * rows), name) for rows, name in enumerate(names)]


def measured(results: Sequence[SimulationResult]) -> list[tuple[str, Measures]]:
    return [(result.name, measure(result)) for result in results]


def shown(workload: Trace, results: Sequence[SimulationResult], *, colours: bool = False) -> str:
    console = Console(file=io.StringIO(), width=300, force_terminal=colours, color_system="standard" if colours else None)
    show(workload, measured(results), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def report(path: Path, workload: Trace, results: Sequence[SimulationResult]) -> str:
    write_report(path / "report.html", workload, Setup(COST, options={"token_budget": 77, "policy": "fcfs"}), results)
    assert [file.name for file in path.iterdir()] == ["report.html"], "one file"
    return (path / "report.html").read_text(encoding="utf-8")


# Figures


def test_every_figure_reads_measures() -> None:
    """None raises, each has a name of its own, and their groups end with the last line."""
    measures = measure(runs(trace(), "one")[0])
    assert len(BY_NAME) == len(FIGURES)
    for figure in FIGURES:
        assert isinstance(format(figure.get(measures), figure.form), str)
    assert BY_NAME["TPOT p90, ms"].get(measures) == pytest.approx(1e3 * measures.tpot.p90)
    assert BY_NAME["kept their targets, %"].get(measures) == 100 * measures.good_share


@pytest.mark.parametrize(
    ("workload", "tenants", "targets"),
    [
        (trace(), False, False),
        (trace(("a", "b")), True, False),
        (trace(ttft_target=1.0), False, True),
        (trace(tpot_target=0.0), False, True),
        (trace(("a", "b"), deadline=9.0), True, True),
    ],
    ids=["plain", "tenants", "ttft", "zero", "both"],
)
def test_figures_are_shown_where_they_say_something(workload: Trace, tenants: bool, targets: bool) -> None:
    names = {figure.name for figure in figures_for(workload)}
    assert ("worst service gap, tokens" in names) is tenants
    assert ("kept their targets, %" in names) is targets
    assert {"TTFT p99, s", "output tokens/s", "preemptions"} <= names


def test_best() -> None:
    """By what is shown, not by digits nobody sees; and not if all are equal, or if no way is better."""
    shorter, more, neither = BY_NAME["TTFT mean, s"], BY_NAME["requests/s"], BY_NAME["virtual time, s"]
    values = [1.004, 0.996, 2.0, math.nan]
    assert [is_best(shorter, value, values) for value in values] == [True, True, False, False]
    assert [is_best(more, value, values) for value in values] == [False, False, True, False]
    assert not any(is_best(neither, value, values) for value in values)
    assert not any(is_best(shorter, value, [1.0, 1.001]) for value in (1.0, 1.001))
    assert not is_best(shorter, 1.0, [1.0, math.nan])


# Terminal


def test_table() -> None:
    workload = trace(notes=("stamps were coarse",))
    results = runs(workload, "narrow", "wide")
    text = shown(workload, results)
    assert "thirty: 30 requests" in text
    assert "stamps were coarse" in text
    assert re.search(r"│\s+│\s+narrow │\s+wide │", text) or re.search(r"narrow.*wide", text)
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert set(lines) == {figure.name for figure in figures_for(workload)}
    narrow, wide = (measure(result) for result in results)
    cells = [cell.strip() for cell in lines["E2E p99, s"].split("│")[2:4]]
    assert cells == [f"{narrow.e2e.p99:.2f}", f"{wide.e2e.p99:.2f}"]


def test_the_best_stands_out() -> None:
    workload = trace()
    line = next(
        line for line in shown(workload, runs(workload, "narrow", "wide"), colours=True).splitlines() if "E2E p99" in line
    )
    narrow, wide = line.split("│")[2:4]
    assert "\x1b[1;32m" in wide
    assert "\x1b[1;32m" not in narrow


def test_names_in_the_table_are_no_markup() -> None:
    workload = dataclasses.replace(trace(notes=("a note [b]",)), name="trace [red]")
    text = shown(workload, runs(workload, AWKWARD, "[/]"))
    for name in (AWKWARD, "[/]", "trace [red]: 30 requests", "a note [b]"):
        assert name in text


def test_what_did_not_happen_is_a_dash() -> None:
    """Outputs of one token have no time per further token."""
    workload = Trace("short", [TraceRequest(0.0, 5, 1)])
    lines = [line for line in shown(workload, runs(workload, "one", "two")).splitlines() if "TPOT" in line or "ITL" in line]
    assert len(lines) == 8
    assert all([cell.strip() for cell in line.split("│")[2:4]] == ["–", "–"] for line in lines)


def test_progress_bars(capsys: pytest.CaptureFixture[str]) -> None:
    bars = Progress(console=Console(file=io.StringIO()))
    move = Bars(bars).start("a [run]", 30)
    simulate(trace(), Setup(COST), progress=move)
    assert bars.tasks[0].completed == 30
    assert bars.tasks[0].finished
    with progress() as shown_bars:
        shown_bars.start("a [run]", 2)(1)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "a [run]" in printed.err
    assert "1/2" in printed.err


# Report


class Reader(HTMLParser):
    """Collects headings and cells, and sees that every element is closed."""

    VOID = frozenset({"meta", "br", "img", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {"h1": [], "h2": [], "h3": [], "td": [], "th": [], "p": []}
        self.best: list[str] = []
        self._best = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in self.texts:
            self.texts[tag].append("")
        self._best = tag == "td" and ("class", "best") in attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]][-1] += data
            if self._best:
                self.best.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))
    reader.close()
    assert reader.open == []
    return reader


def drawings(text: str) -> list[ElementTree.Element]:
    """Every drawing, which must be well-formed on its own."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]


def words(drawing: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in drawing.iter() if element.tag.endswith("text")]


def test_report(tmp_path: Path) -> None:
    workload = trace(notes=("stamps were coarse",))
    results = runs(workload, "narrow", "wide")
    text = report(tmp_path, workload, results)
    page = read(text)
    assert page.texts["h1"] == ["thirty: 30 requests"]
    assert page.texts["h2"] == ["Comparison", "Latencies", "Over time"]
    assert page.texts["h3"] == ["narrow", "wide"]
    assert page.texts["p"] == ["stamps were coarse; 256 rows, 4096 pages of 16 tokens, token_budget=77"]
    assert page.texts["th"] == ["", "narrow", "wide"]
    rows = [page.texts["td"][at : at + 3] for at in range(0, len(page.texts["td"]), 3)]
    assert [row[0] for row in rows] == [figure.name for figure in figures_for(workload)]
    wide = measure(results[1])
    assert f"{wide.e2e.mean:.2f}" in page.best
    latencies, *timelines = drawings(text)
    assert len(timelines) == 2
    assert {"narrow", "wide", "time to first token, s"} <= set(words(latencies))
    assert {"running", "waiting", "held by requests", "cached prefixes", "virtual time, s"} <= set(words(timelines[0]))


def test_report_with_tenants(tmp_path: Path) -> None:
    workload = trace(("a", "b"))
    text = report(tmp_path, workload, runs(workload, "one", "two", "three", "four"))
    assert read(text).texts["h2"] == ["Comparison", "Latencies", "Service per tenant", "Over time"]
    latencies, service, *timelines = drawings(text)
    assert len(timelines) == 4
    assert {"a", "b", "one", "two", "three", "four"} <= set(words(service))
    assert "four" in words(latencies)


def test_the_report_needs_no_network(tmp_path: Path) -> None:
    """Nothing is loaded: addresses are names of XML dialects only, references stay within the page."""
    workload = trace(("a", "b"))
    text = report(tmp_path, workload, runs(workload, "one", "two"))
    assert re.findall(r"""(\S+)=["'][a-z]+://""", text) == re.findall(r"""(xmlns\S*)=["']http://www\.w3\.org/""", text)
    assert text.count("://") == len(re.findall(r"xmlns", text))
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import", text)
    assert all(target.startswith("#") for target in re.findall(r"""(?:href|src)=["']([^"']*)""", text))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_names_in_the_report_are_text(tmp_path: Path) -> None:
    workload = dataclasses.replace(trace((AWKWARD, "b"), notes=("<i>",)), name="<script>&")
    text = report(tmp_path, workload, runs(workload, AWKWARD, "other"))
    page = read(text)
    assert page.texts["h1"] == ["<script>&: 30 requests"]
    assert page.texts["p"][0].startswith("<i>; ")
    assert AWKWARD in page.texts["th"]
    assert AWKWARD in page.texts["h3"]
    assert "<script>" not in text
    assert "<b>" not in text
    assert escape(AWKWARD) in text
    latencies, service, *_ = drawings(text)
    assert AWKWARD in words(latencies)
    assert words(service).count(AWKWARD) == 2, "as a run and as a tenant"


def test_requests_without_a_tenant(tmp_path: Path) -> None:
    workload = trace(("", "a"))
    _, service, *_ = drawings(report(tmp_path, workload, runs(workload, "one")))
    assert {"(no tenant)", "a"} <= set(words(service))


def test_a_run_in_which_nothing_finished(tmp_path: Path) -> None:
    """Prompts over the pool: no latency, no sample, a report all the same."""
    workload = Trace("huge", [TraceRequest(0.0, 1000, 5)])
    results = [simulate(workload, Setup(COST, pages=4), "refused")]
    text = report(tmp_path, workload, results)
    assert "–" in read(text).texts["td"]
    assert len(drawings(text)) == 2
    assert len([line for line in shown(workload, results).splitlines() if "–" in line]) > 10


def test_the_same_run_gives_the_same_report() -> None:
    workload = trace()
    assert latency_curves(runs(workload, "one")) == latency_curves(runs(workload, "one"))
