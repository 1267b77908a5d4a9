"""The documentation's links hold, and the script that says so can tell."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def build_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "build_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.source_tree
def test_links_of_the_documentation(build_docs: ModuleType) -> None:
    assert build_docs.check(ROOT) == []


def test_broken_links_are_found(build_docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "# Top\n[a](docs/page.md#two-words) [b](docs/page.md#gone) [c](gone.py) [d](#top) [e](#gone)\n"
        "[f](https://example.org/gone) [g](docs/page.md#two-words-1) [h](../outside)\n\n`[i](in-code.md)`\n",
        "utf-8",
    )
    (tmp_path / "docs" / "page.md").write_text("## Two `words`!\n## Two words\n[up](../README.md#top) ![i](no.png)\n", "utf-8")
    assert build_docs.check(tmp_path) == [
        "README.md: docs/page.md#gone: no such heading",
        "README.md: gone.py: no such file",
        "README.md: #gone: no such heading",
        "README.md: ../outside: no such file",
        "docs/page.md: no.png: no such file",
    ]


def test_rendered_pages_link_to_each_other(build_docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "example.py").write_text("", "utf-8")
    (tmp_path / "README.md").write_text("[p](docs/page.md#a-b)\n", "utf-8")
    (tmp_path / "docs" / "page.md").write_text("# A b\n[up](../README.md) [e](../example.py)\n\n|x|\n|-|\n|1|\n", "utf-8")
    readme, page = build_docs.render(tmp_path, tmp_path / "build" / "docs")
    assert '<a href="docs/page.html#a-b">p</a>' in readme.read_text("utf-8")
    text = page.read_text("utf-8")
    assert '<h1 id="a-b">A b</h1>' in text
    assert '<a href="../README.html">up</a> <a href="../../../example.py">e</a>' in text
    assert "<td>1</td>" in text
