"""The page on known failures names tests that exist, and every scenario test is named on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "explanation" / "known-failures-of-others.md"
DEFINITION = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)

pytestmark = pytest.mark.source_tree


def named() -> set[str]:
    return set(re.findall(r"`(test_\w+\.py::test_\w+)`", PAGE.read_text("utf-8")))


def test_every_test_on_the_page_exists() -> None:
    names = named()
    assert len(names) > 100
    defined = {
        f"{path.name}::{name}" for path in TESTS.glob("test_*.py") for name in DEFINITION.findall(path.read_text("utf-8"))
    }
    assert names <= defined, sorted(names - defined)


def test_every_line_names_a_test_or_a_reason() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| (?!case|class)", line)]
    assert len(rows) > 150
    for row in rows:
        last = row.strip("| ").split(" | ")[-1]
        assert "`test_" in last or last.endswith("."), row


def test_no_name_on_the_page_is_misspelt() -> None:
    """A test that is named in another form would escape the check above."""
    for name in re.findall(r"`([^`]*test_[^`]*)`", PAGE.read_text("utf-8")):
        assert re.fullmatch(r"test_\w+\.py::test_\w+", name), name


def test_every_scenario_is_on_the_page() -> None:
    names = named()
    for path in TESTS.glob("test_scenarios_*.py"):
        if path != Path(__file__):
            missing = [name for name in DEFINITION.findall(path.read_text("utf-8")) if f"{path.name}::{name}" not in names]
            assert not missing, f"{path.name}: {missing}"
