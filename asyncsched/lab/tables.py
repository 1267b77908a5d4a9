"""What the simulate command shows in the terminal: progress bars and the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .figures import Figure, figures_for, is_best
from .measures import Measures
from .trace import Trace


def show(trace: Trace, measured: Sequence[tuple[str, Measures]], console: Console | None = None) -> None:
    """Print the comparison, a column per run; the best of each line stands out."""
    console = console or Console()
    title, caption = escape(f"{trace.name}: {len(trace.requests)} requests"), escape("; ".join(trace.notes))
    table = Table(title=title, caption=caption or None)
    table.add_column("")
    for name, _ in measured:
        table.add_column(escape(name), justify="right")
    for figure in figures_for(trace):
        values = [figure.get(measures) for _, measures in measured]
        table.add_row(figure.name, *(_cell(figure, value, values) for value in values), end_section=figure.last)
    console.print(table)


def _cell(figure: Figure, value: float, values: list[float]) -> str:
    text = "–" if math.isnan(value) else format(value, figure.form)
    return f"[bold green]{text}[/]" if is_best(figure, value, values) else text


class Bars:
    """Progress bars, one per run."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, name: str, total: int) -> Callable[[int], None]:
        """Add a bar; returns what moves it."""
        task = self._progress.add_task(escape(name), total=total)
        return lambda ended: self._progress.update(task, completed=ended)


@contextmanager
def progress() -> Iterator[Bars]:
    """Bars on standard error while the block runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield Bars(bars)
