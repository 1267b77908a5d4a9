"""What was measured, what it was to reach, and how that is written down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Record:
    """One figure.

    Attributes:
        part: The part of the check it belongs to.
        figure: What it is, in words, with its unit.
        measured: Its value; ``None`` if it could not be measured, ``details`` say why.
        target: What it is to reach; ``None`` for a figure that others are related to.
        at_most: The target is an upper bound, not a lower one.
        details: Whatever else is known, JSON types only.
    """

    part: str
    figure: str
    measured: float | None
    target: float | None = None
    at_most: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        """Whether the target was reached; ``None`` without one, or without a measurement."""
        if self.measured is None or self.target is None:
            return None
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON types, ``reached`` too."""
        return asdict(self) | {"details": dict(self.details), "reached": self.reached}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """Undo ``as_json``."""
        return cls(**{name: value for name, value in values.items() if name != "reached"})

    def row(self) -> tuple[str, str, str, str]:
        """Cells of the table: figure, measured, to reach, yes or no."""
        bound = "≤" if self.at_most else "≥"
        to_reach = UNKNOWN if self.target is None else f"{bound} {number(self.target)}"
        answer = {True: "yes", False: "NO", None: UNKNOWN}[self.reached]
        measured = "not measured" if self.measured is None else number(self.measured)
        return f"{self.part}: {self.figure}", measured, to_reach, answer


def number(value: float) -> str:
    """Four digits that count, thousands set apart, no exponent for what people read."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines with aligned columns, the first row as headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


HEADINGS = ("figure", "measured", "to reach", "reached")
