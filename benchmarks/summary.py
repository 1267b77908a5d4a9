"""Every target and what was measured of it: one table, and one picture beside the records.

Usage: python -m benchmarks.summary FOLDER

FOLDER holds the JSON lines of the benchmarks, one file per benchmark, as ``make bench`` writes them
(``build/bench/overlap.jsonl``). Where several records fit a figure, the worst one counts. The picture
is FOLDER/summary.png: throughput against each peer, the control plane's cost, the device's idle share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .peers.report import aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
Records = Sequence[Record]
Direction = Literal["≥", "≤"]
Measure = Callable[[Records, Direction], float | None]

OURS = "asyncsched"
NOT_MEASURED = "not measured"


def load(folder: Path) -> list[Record]:
    """All records of a folder; ``benchmark`` says which file each is from."""
    return [
        json.loads(line) | {"benchmark": path.stem}
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text("utf-8").splitlines()
        if line.startswith("{")
    ]


def select(records: Records, field: str, **where: Any) -> list[Record]:
    """The records that have a field and agree with ``where``."""
    return [
        record for record in records if field in record and all(key in record and record[key] == where[key] for key in where)
    ]


def value(field: str, **where: Any) -> Measure:
    """A field of the records that agree with ``where``; the worst for the target's direction."""

    def measure(records: Records, direction: Direction) -> float | None:
        found = [float(record[field]) for record in select(records, field, **where)]
        if not found:
            return None
        return min(found) if direction == "≥" else max(found)

    return measure


def percent(share: Measure) -> Measure:
    """A share as a percentage."""

    def measure(records: Records, direction: Direction) -> float | None:
        found = share(records, direction)
        return None if found is None else 100 * found

    return measure


def quotient(upper: Measure, lower: Measure) -> Measure:
    """One figure over another; the worst of the one over the best of the other."""

    def measure(records: Records, direction: Direction) -> float | None:
        above, below = upper(records, direction), lower(records, "≤" if direction == "≥" else "≥")
        return None if above is None or not below else above / below

    return measure


def throughput(engine: str, workload: str) -> Measure:
    """Tokens per second in the comparison: output tokens, or all of them for prefill16."""
    field = "total_token_throughput" if workload == "prefill16" else "output_throughput"
    return value(field, benchmark="compare", engine=engine, workload=workload)


def control_plane(batch: int, streamed: int) -> Measure:
    """Microseconds per running request and step; ``streamed`` percent of the requests are read as text."""
    return value("us_per_request_step", batch=batch, streamed=streamed)


def overlap(field: str, depth: int, step_ms: int, blocked_ms: int = 0, own_loop: bool = False) -> Measure:
    """A figure of the simulated device with 256 rows, each read as text."""
    return value(
        field, case="simulated", rows=256, depth=depth, step_ms=step_ms, blocked_ms=blocked_ms, own_loop=own_loop
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One figure that the project holds itself to.

    Attributes:
        name: What is measured.
        unit: Behind the number.
        direction: ``"≥"`` if more is better.
        target: The bound.
        measure: Finds the figure in the records.
    """

    name: str
    unit: str
    direction: Direction
    target: float
    measure: Measure

    def row(self, records: Records) -> list[str]:
        """Figure, measured, target, reached."""
        found = self.measure(records, self.direction)
        bound = f"{self.direction} {self.target:g} {self.unit}"
        if found is None:
            return [self.name, NOT_MEASURED, bound, NOT_MEASURED]
        reached = found >= self.target if self.direction == "≥" else found <= self.target
        measured = f"{found:,.0f}" if found >= 1000 else f"{found:.3g}"
        return [self.name, f"{measured} {self.unit}", bound, "yes" if reached else "no"]


OVER_VLLM = {"short64": 1.5, "single": 1.0, "long32": 1.5, "shared512": 1.5, "prefill16": 1.3}
OVER_BOUND = {"short64": 0.97, "shared512": 0.95}
CONTROL_PLANE = {(256, 0): 0.3, (1024, 0): 0.15, (256, 100): 5.0, (1024, 100): 5.0}  # rows, percent of them read as text
IDLE = 1.0

TARGETS = (
    *(Target(f"{name}, tokens per second ÷ vLLM", "×", "≥", bound, quotient(throughput(OURS, name), throughput("vllm", name)))
      for name, bound in OVER_VLLM.items()),
    *(Target(f"{name}, engine ÷ bare model loop", "×", "≥", bound, value("engine_over_bound", workload=name))
      for name, bound in OVER_BOUND.items()),
    *(Target(f"control plane per request-step, {rows:,} rows, {share} % read as text", "µs", "≤", bound,
             control_plane(rows, share))
      for (rows, share), bound in CONTROL_PLANE.items()),
    Target("prefix tree, match of 1,024 tokens", "µs", "≤", 8, value("match_us")),
    Target("prefix tree, insert of 1,024 tokens", "µs", "≤", 20, value("insert_us")),
    Target("device idle, 256 rows, 10-ms steps, depth 2", "%", "≤", IDLE, percent(overlap("idle_share", 2, 10))),
    Target("… loop blocked 5 ms, 10 times a second", "%", "≤", 2, percent(overlap("idle_share", 2, 10, 5))),
    Target("… loop blocked 50 ms, twice a second, own loop", "%", "≤", 2,
           percent(overlap("idle_share", 2, 10, 50, own_loop=True))),
    Target("throughput of depth 2 ÷ depth 0, 256 rows, 5-ms steps", "×", "≥", 1.1,
           quotient(overlap("bound_share", 2, 5), overlap("bound_share", 0, 5))),
    Target("ready for the first request, cold", "s", "≤", 6, value("ready_s", case="cold")),
    Target("ready for the first request, warm", "s", "≤", 4, value("ready_s", case="warm")),
    Target("memory beyond weights and KV pool, warm caches", "MB", "≤", 400, value("beyond_mb", caches="warm")),
    Target("… after compiling every kernel", "MB", "≤", 400, value("beyond_mb", caches="cold")),
)  # fmt: skip


def table(records: Records) -> str:
    """All targets, and below them the peers that could not be compared."""
    rows = [target.row(records) for target in TARGETS]
    failures = [f"{record['engine']} is missing or failed: {record['failed']}" for record in select(records, "failed")]
    reached = sum(row[-1] == "yes" for row in rows)
    return "\n".join(
        [aligned([["figure", "measured", "target", "reached"], *rows]), f"{reached} of {len(rows)} reached", *failures]
    )


# ---- the picture

PEER_COLOURS = {
    "vllm": "#2a5c8a", "llama.cpp": "#d98a29", "transformers-continuous": "#5b9e8f", "transformers-generate": "#b9b9b9"
}  # fmt: skip
SHADES = ("#9cc3e6", "#4a90c8", "#1f5c94", "#0b2e52")
TARGET_COLOUR = "#c0392b"
INK = "#333333"


def draw_peers(axes: Axes, records: Records) -> bool:
    """asyncsched's throughput over each peer's, by workload; whether there was anything to draw."""
    ours = {name: tokens for name in OVER_VLLM if (tokens := throughput(OURS, name)(records, "≥"))}
    ratios = {
        peer: {name: tokens / theirs for name, tokens in ours.items() if (theirs := throughput(peer, name)(records, "≥"))}
        for peer in PEER_COLOURS
    }
    ratios = {peer: found for peer, found in ratios.items() if found}
    places, width = {name: float(place) for place, name in enumerate(ours)}, 0.8 / max(1, len(ratios))
    for index, (peer, found) in enumerate(ratios.items()):
        shift = (index - (len(ratios) - 1) / 2) * width
        for name, ratio in found.items():
            place, better = places[name] + shift, ratio >= 1
            axes.bar(place, ratio - 1, width * 0.92, bottom=1, color=PEER_COLOURS[peer])
            axes.annotate(
                f"{ratio:.2f}", (place, ratio), (0, 2 if better else -2), textcoords="offset points",
                ha="center", va="bottom" if better else "top", fontsize=7.5, color=INK,
            )  # fmt: skip
            if peer == "vllm":
                axes.plot([place - width / 2, place + width / 2], [OVER_VLLM[name]] * 2, color=TARGET_COLOUR, linewidth=2)
        axes.bar(0, 0, color=PEER_COLOURS[peer], label=peer)
    axes.plot([], [], color=TARGET_COLOUR, linewidth=2, label="target over vllm")
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.set_ylim(bottom=min(0.35, axes.get_ylim()[0]))  # room for the legend
    axes.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}×")
    axes.set_xticks(list(places.values()), [f"{name}\n{tokens:,.0f} tok/s" for name, tokens in ours.items()], fontsize=8)
    axes.set_title("Throughput: asyncsched ÷ peer")
    return bool(ratios)


def mark_targets(axes: Axes, x: Sequence[float], y: Sequence[float], label: str) -> None:
    """A short line at each target."""
    axes.scatter(x, y, marker="_", s=220, linewidth=2, color=TARGET_COLOUR, label=label, zorder=3)


def logarithmic(axes: Axes, unit: str) -> None:
    """A logarithmic y axis with labels at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda figure, _: f"{figure:g}{unit}")


def draw_control_plane(axes: Axes, records: Records) -> bool:
    """Microseconds per request-step by rows, one line per share of rows that are read; whether there was anything."""
    found = select(records, "us_per_request_step", engine=OURS)
    for index, streamed in enumerate(sorted({record["streamed"] for record in select(found, "streamed")})):
        line = sorted((record["batch"], record["us_per_request_step"]) for record in select(found, "batch", streamed=streamed))
        axes.plot(
            *zip(*line, strict=True),
            marker="o",
            markersize=4.5,
            color=SHADES[index % 4],
            label=f"{streamed} % of the rows read",
        )
    mark_targets(axes, [rows for rows, _ in CONTROL_PLANE], list(CONTROL_PLANE.values()), "target (0 % and 100 %)")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda rows, _: f"{rows:,.0f}")
    logarithmic(axes, "")
    axes.set_xlabel("running rows")
    axes.set_title("Control plane: µs per request-step")
    return bool(found)


def draw_idle(axes: Axes, records: Records) -> bool:
    """The simulated device's idle share by step time, one line per depth; whether there was anything."""
    found = select(records, "idle_share", case="simulated", rows=256, blocked_ms=0, own_loop=False)
    for index, depth in enumerate(sorted({record["depth"] for record in found})):
        line = sorted(  # a logarithmic axis has no place for 0
            (record["step_ms"], max(100 * record["idle_share"], 0.01)) for record in select(found, "step_ms", depth=depth)
        )
        axes.plot(*zip(*line, strict=True), marker="o", markersize=4.5, color=SHADES[index % 4], label=f"depth {depth}")
    mark_targets(axes, [10], [IDLE], "target (depth 2)")
    axes.set_xscale("log")
    logarithmic(axes, " %")
    steps = sorted({record["step_ms"] for record in found})
    axes.set_xticks(steps, [f"{step:g}" for step in steps])
    axes.minorticks_off()
    axes.set_xlabel("step time, ms")
    axes.set_title("Device idle, 256 rows read as text")
    return bool(found)


def draw(records: Records, target: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.8), dpi=150, layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    for axes, panel in zip(panels, (draw_peers, draw_control_plane, draw_idle), strict=True):
        if panel(axes, records):
            axes.legend(frameon=False, fontsize=8)
        else:
            axes.text(0.5, 0.5, NOT_MEASURED, transform=axes.transAxes, ha="center", color=INK)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target)


def main() -> None:
    """Print the table, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}; `make bench` writes build/bench")
    records = load(folder)
    print(table(records))
    draw(records, folder / "summary.png")
    print(f"picture: {folder / 'summary.png'}")


if __name__ == "__main__":
    main()
