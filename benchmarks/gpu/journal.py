"""What happens in a check, line by line as it happens: the process that measures writes it, another one reads it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .records import HEADINGS, UNKNOWN, Record, table

LEAST_SECONDS = 5.0
"""With less time than this, no part is begun."""


class Journal:
    """A file of JSON lines, each with one key: ``environment``, ``begin``, ``record``, ``end`` or ``skip``.

    Args:
        path: Appended to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, kind: str, value: Any) -> None:
        """Add a line; it is in the file when this returns. A line that a process left unfinished stays one of its own."""
        so_far = self._path.read_text("utf-8") if self._path.exists() else ""
        begin = "\n" if so_far and not so_far.endswith("\n") else ""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(begin + json.dumps({kind: value}) + "\n")

    def read(self) -> Story:
        """What the file says so far, without lines that are being written or were never finished."""
        story = Story()
        if self._path.exists():
            for line in self._path.read_text("utf-8").splitlines():
                with suppress(json.JSONDecodeError):
                    for kind, value in json.loads(line).items():
                        story.add(kind, value)
        return story


@dataclass(slots=True)
class Part:
    """One part of the check.

    Attributes:
        state: ``"running"``, ``"done"``, ``"failed"`` or ``"skipped"``.
        seconds: That it took.
        why: The traceback of a failure, or the reason to skip it.
    """

    state: str
    seconds: float | None = None
    why: str | None = None


@dataclass(slots=True)
class Story:
    """What a journal says.

    Attributes:
        environment: The GPU and the versions of everything.
        parts: By name, in order.
        records: In order.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def add(self, kind: str, value: Any) -> None:
        """Take one line."""
        if kind == "environment":
            self.environment = value
        elif kind == "begin":
            self.parts[value] = Part("running")
        elif kind == "record":
            self.records.append(Record.from_json(value))
        elif kind == "end":
            self.parts[value["part"]] = Part("failed" if value["why"] else "done", value["seconds"], value["why"])
        else:
            self.parts[value["part"]] = Part("skipped", None, value["why"])

    @property
    def running(self) -> str | None:
        """The part that has begun and not ended."""
        return next((name for name, part in self.parts.items() if part.state == "running"), None)

    @property
    def good(self) -> bool:
        """Every part has run to its end, and every target was reached."""
        targets = [record.reached for record in self.records if record.target is not None]
        return bool(self.parts) and all(part.state == "done" for part in self.parts.values()) and all(targets)

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        parts = {name: {"state": part.state, "seconds": part.seconds, "why": part.why} for name, part in self.parts.items()}
        records = [record.as_json() for record in self.records]
        return {"environment": self.environment, "good": self.good, "parts": parts, "records": records}

    def summary(self) -> str:
        """The table: a line per figure, then one per part that did not run to its end."""
        rows = [HEADINGS, *(record.row() for record in self.records)]
        for name, part in self.parts.items():
            if part.state != "done":
                last = part.why.strip().splitlines()[-1] if part.why else ""
                rows.append((f"{name}: {part.state}: {last}"[:100], UNKNOWN, UNKNOWN, "NO"))
        return table(rows)
