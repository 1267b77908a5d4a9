"""The reference page of the bundled policies names all of them, with their options and defaults."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

from asyncsched.registry import installed_policies, load_factory

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "policies.md"
BUNDLED = [info.name for info in installed_policies() if info.distribution == "asyncsched-llm"]

pytestmark = pytest.mark.source_tree


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def rows() -> dict[str, str]:
    return {match[1]: line for line in PAGE.read_text().splitlines() if (match := re.match(r"\| `([a-z-]+)` \|", line))}


def test_every_bundled_policy_has_a_row_and_no_other() -> None:
    assert sorted(rows()) == sorted(BUNDLED)


@pytest.mark.parametrize("name", BUNDLED)
def test_the_row_names_every_option_with_its_default(name: str) -> None:
    options = [f"`{field.name}={_default(field)!r}`" for field in fields(load_factory(name)) if field.init]
    told = rows()[name].rsplit("|", 2)[1].strip()
    assert told == (", ".join(options) or "–")
