"""The tutorial on policies, done as its reader does it: files saved, commands run, the distribution installed for real."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from asyncsched.testing import ConformanceError, check_policy

pytestmark = pytest.mark.source_tree

PAGE = Path(__file__).parent.parent / "docs" / "tutorial" / "your-first-policy.md"
STEP = re.compile(
    r"Save this as `(?P<file>[^`]+)`[^\n]*:\n\n```python notest\n(?P<text>.*?)^```$|^```console\n(?P<commands>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
LEFT_OUT = {
    "python -m pip install 'asyncsched-llm[lab]' pytest",
    "python -m pip install build twine",
    "python -m build",
    "python -m twine upload dist/*",
}
"""What a test must not do: it installs from an index into this environment, or publishes."""

RUN = ("asyncsched ", "mv ", "python -c ", "python -m pytest", "python make_trace.py")
"""Beginnings of commands that touch nothing but the reader's folder; a command of neither sort fails the tests unrun."""

INSTALL = "python -m pip install -e '.[test]'"
"""Done into a folder of its own instead."""

POLICY = "short_prompts.py"


def steps() -> Iterator[tuple[str, str]]:
    """What the reader is told: ``(file, text)`` to save, and ``("", command)`` to run."""
    for match in STEP.finditer(PAGE.read_text("utf-8")):
        if match["file"]:
            yield match["file"], match["text"]
        else:
            for line in match["commands"].splitlines():
                assert line.startswith("$ "), f"neither a command nor output that could be checked: {line}"
                yield "", line.removeprefix("$ ")


@dataclass
class Reader:
    """Follows the page in a folder of its own; ``site`` stands for the environment that things are installed into."""

    folder: Path
    site: Path
    printed: dict[str, str] = field(default_factory=dict)

    def follow(self) -> None:
        """From the top of the page to its end."""
        for file, text in steps():
            if file:
                (self.folder / file).write_text(text, "utf-8")
            elif text.startswith("cd "):
                self.folder /= text.removeprefix("cd ")
            elif text not in LEFT_OUT:
                self.printed[text] = self.run(self.real(text))

    def real(self, command: str) -> list[str]:
        """The command as it can be run here: this interpreter, no index, no time measured on a busy machine."""
        if command == INSTALL:
            where = ["--target", str(self.site), "."]
            return [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation", *where]
        assert command.startswith(RUN), f"not known to be harmless, so it was not run: {command}"
        words = shlex.split(command.replace(":ShortPrompts')", ":ShortPrompts', cost=False)"))
        start = {"python": [sys.executable], "asyncsched": [sys.executable, "-m", "asyncsched.cli.main"]}
        return [*start.get(words[0], words[:1]), *words[1:]]

    def run(self, command: list[str]) -> str:
        """What the command prints."""
        env = {**os.environ, "PYTHONPATH": str(self.site), "COLUMNS": "200", "PIP_NO_INDEX": "1"}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def python(self, code: str) -> Any:
        """What an expression is in that environment."""
        return json.loads(self.run([sys.executable, "-c", f"import json; print(json.dumps({code}))"]))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A reader who has come to the end of the page."""
    reader = Reader(tmp_path_factory.mktemp("tutorial"), tmp_path_factory.mktemp("site"))
    reader.follow()
    return reader


def policy_code() -> str:
    return dict(steps())[POLICY]


def rows(text: str, mark: str) -> dict[str, list[str]]:
    """A table's cells by the name of the line."""
    lines = ([cell.strip() for cell in line.strip(f" {mark}").split(mark)] for line in text.splitlines() if mark in line)
    return {name: cells for name, *cells in lines if name}


def test_the_policy_is_fifteen_lines() -> None:
    code = policy_code()
    (cls,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef))
    docstring = cls.body[0]
    assert docstring.end_lineno is not None
    about = range(docstring.lineno, docstring.end_lineno + 1)
    assert len([line for number, line in enumerate(code.splitlines(), 1) if line.strip() and number not in about]) == 15


def test_without_ageing_the_check_finds_starvation() -> None:
    """As the page tells the reader to try."""
    code = policy_code()
    changed = code.replace("self.age * r.waiting_since_step", "0")
    assert changed != code
    names: dict[str, Any] = {"__name__": "short_prompts"}
    exec(compile(changed, POLICY, "exec", dont_inherit=True), names)
    with pytest.raises(ConformanceError) as caught:
        check_policy(names["ShortPrompts"], cost=False)
    assert [check for check, _ in caught.value.failures] == ["starvation"]


@pytest.mark.slow
def test_the_figures_are_those_of_the_page(reader: Reader) -> None:
    shown = rows(PAGE.read_text("utf-8"), "|")
    command = next(command for command in reader.printed if command.startswith("asyncsched simulate") and "fcfs" in command)
    printed = rows(reader.printed[command].replace("┃", "│"), "│")
    names = [name for name in shown if name.endswith(", s")]
    assert len(names) == 4
    for name in names:
        assert [float(cell) for cell in shown[name]] == pytest.approx([float(cell) for cell in printed[name]], rel=0.1), name
    assert shown["fcfs"] == printed["fcfs"] == ["short_prompts:ShortPrompts"]


@pytest.mark.slow
def test_the_check_passes(reader: Reader) -> None:
    (report,) = (text for command, text in reader.printed.items() if command.startswith("python -c"))
    assert report.startswith("short_prompts:ShortPrompts as policy: passed form, ")
    assert "starvation" in report


@pytest.mark.slow
def test_it_is_installed_with_its_distribution(reader: Reader) -> None:
    infos = "[[i.name, i.value, i.distribution, i.version] for i in __import__('asyncsched').installed_policies()]"
    assert ["short-prompts", "short_prompts:ShortPrompts", "short-prompts", "0.1.0"] in reader.python(infos)
    shown = reader.printed["asyncsched policies short-prompts"]
    assert "options: age=10.0  (short-prompts 0.1.0, short_prompts:ShortPrompts)" in shown
    assert "looks shorter with every step" in shown
    assert (reader.site / "short_prompts" / "py.typed").is_file()
    metadata = "dict(__import__('importlib.metadata').metadata.metadata('short-prompts').items())"
    about = reader.python(metadata)
    assert about["Author"] == "Your Name"
    assert about["Requires-Python"] == ">=3.11"
    requires = reader.python("__import__('importlib.metadata').metadata.requires('short-prompts')")
    assert [text.partition(">")[0].strip() for text in requires] == ["asyncsched-llm", "pytest"]


@pytest.mark.slow
def test_an_engine_takes_it_by_its_name(reader: Reader) -> None:
    assert (reader.folder / "try_it.py").is_file()
    assert reader.run([sys.executable, "try_it.py"]) == "[4, 4]\n"


@pytest.mark.slow
def test_its_own_tests_pass(reader: Reader) -> None:
    assert "3 passed" in reader.printed["python -m pytest"]
