"""Lay out ``build/typing``: one package tree as type checkers expect it, of links to the sources.

The sources live in folders side by side that are one package only once installed (``package-dir``
in ``pyproject.toml``), a mapping that type checkers do not read.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typing"


def main() -> None:
    """Create what is missing, remove what is stale; safe to repeat."""
    mapping: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-dir"]
    wanted = {
        TREE / package.replace(".", "/") / entry.name: entry
        for package, folder in mapping.items()
        for entry in (ROOT / folder).iterdir()
        if entry.name != "__pycache__"
    }
    for link in TREE.rglob("*"):
        if link.is_symlink() and not (link in wanted and link.readlink() == wanted[link]):
            link.unlink()
    for link, target in wanted.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target)


if __name__ == "__main__":
    main()
