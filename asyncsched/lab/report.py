"""The report of a comparison: one HTML file that needs no network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from .figures import figures_for, is_best
from .measures import Measures, measure
from .plots import latency_curves, service, timeline
from .simulator import Setup, SimulationResult
from .trace import Trace

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.5rem; margin-bottom: .2rem; }
  h2 { font-size: 1.1rem; margin-top: 2.2rem; border-bottom: 1px solid #d8dee4; padding-bottom: .3rem; }
  h3 { font-size: .95rem; margin: 1.2rem 0 .2rem; font-family: ui-monospace, monospace; }
  p.notes { color: #57606a; margin-top: 0; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #eaeef2; }
  th:first-child, td:first-child { text-align: left; }
  tr.last td { border-bottom: 2px solid #afb8c1; }
  td.best { color: #1a7f37; font-weight: 600; }
  .scroll { overflow-x: auto; }
  svg { max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="notes">$notes</p>
<h2>Comparison</h2>
<div class="scroll"><table>$table</table></div>
<h2>Latencies</h2>
$latencies
$tenants
<h2>Over time</h2>
$timelines
</body>
</html>
""")


def write_report(path: Path, trace: Trace, setup: Setup, results: Sequence[SimulationResult]) -> None:
    """Write the report: comparison, latency distributions, timelines, and service per tenant if there are several."""
    measured = [(result.name, measure(result)) for result in results]
    tenants = ""
    if len({request.tenant for request in trace.requests}) > 1:
        tenants = f"<h2>Service per tenant</h2>\n{service(results)}"
    timelines = (f"<h3>{escape(result.name)}</h3>\n{timeline(result, setup.pages)}" for result in results)
    path.write_text(
        _PAGE.substitute(
            title=escape(f"{trace.name}: {len(trace.requests)} requests"),
            notes=escape("; ".join((*trace.notes, _server(setup)))),
            table="\n".join(_rows(trace, measured)),
            latencies=latency_curves(results),
            tenants=tenants,
            timelines="\n".join(timelines),
        ),
        encoding="utf-8",
    )


def _server(setup: Setup) -> str:
    options = ", ".join(f"{name}={value}" for name, value in setup.options.items() if not name.endswith("policy"))
    return f"{setup.max_rows} rows, {setup.pages} pages of {setup.page_size} tokens, {options}"


def _rows(trace: Trace, measured: Sequence[tuple[str, Measures]]) -> Iterator[str]:
    yield "<tr><th></th>" + "".join(f"<th>{escape(name)}</th>" for name, _ in measured) + "</tr>"
    for figure in figures_for(trace):
        values = [figure.get(measures) for _, measures in measured]
        cells = "".join(
            f"<td{' class=best' if is_best(figure, value, values) else ''}>"
            f"{'–' if math.isnan(value) else format(value, figure.form)}</td>"
            for value in values
        )
        yield f"<tr{' class=last' if figure.last else ''}><td>{escape(figure.name)}</td>{cells}</tr>"
