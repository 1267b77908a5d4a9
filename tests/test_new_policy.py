"""``asyncsched new-policy``: what it writes works, passes its own tests and the usual tools, and bad names are refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from asyncsched.cli.main import main
from asyncsched.cli.new_policy import distribution
from asyncsched.cli.template_kinds import KINDS
from asyncsched.errors import ConfigError
from asyncsched.policy_set import HOOKS

ROOT = Path(__file__).resolve().parent.parent

Captured = pytest.CaptureFixture[str]


def project(files: dict[str, str]) -> dict[str, Any]:
    return tomllib.loads(files["pyproject.toml"])


def install(folder: Path, site: Path) -> None:
    """What an installer does, without one: the modules, and the metadata that entry points are found by."""
    about = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    shutil.copytree(folder / "src", site, dirs_exist_ok=True)
    metadata = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    lines = []
    for group, points in about["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def tool(folder: Path, *arguments: str, path: str = "") -> None:
    """Run a tool in a folder; it must be content."""
    env = {**os.environ, "PYTHONPATH": path, "MYPYPATH": path}
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one distribution of each kind, ``new-KIND``."""
    folder = tmp_path_factory.mktemp("workshop")
    for kind in KINDS:
        assert (
            main(["new-policy", f"new-{kind}", "--kind", kind, "--into", str(folder), "--author", "Ada Löwe <a@b.example>"])
            == 0
        )
    return folder


# What is written


def test_there_is_one_for_every_kind_of_policy() -> None:
    assert [kind.option for kind in KINDS.values()] == list(HOOKS)
    for kind in KINDS.values():
        assert f"    def {HOOKS[kind.option]}(" in kind.policy


def test_what_is_printed_and_written(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-policy", "my-first-order"]) == 0
    root = Path("my-first-order")
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files == {
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "src/my_first_order/__init__.py",
        "src/my_first_order/py.typed",
        "tests/test_my_first_order.py",
    }
    text = capsys.readouterr().out
    assert all(str(root / file) in text for file in files)
    assert "python -m pip install -e '.[test]'" in text
    assert "asyncsched simulate TRACE --policy my-first-order" in text
    assert "class MyFirstOrder:" in (root / "src" / "my_first_order" / "__init__.py").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_the_project_file(kind: str) -> None:
    files = distribution(f"some-{kind}", kind, "Ada Löwe <ada@example.org>")
    about = project(files)["project"]
    assert about["name"] == f"some-{kind}"
    assert about["authors"] == [{"name": "Ada Löwe", "email": "ada@example.org"}]
    assert about["entry-points"] == {"asyncsched.policies": {f"some-{kind}": f"some_{kind}:Some{kind.capitalize()}"}}
    assert about["dependencies"] == [f"asyncsched-llm >= {version('asyncsched-llm')}"]
    assert any(requirement.startswith("pytest") for requirement in about["optional-dependencies"]["test"])
    assert "license" not in about
    assert "## Licence\n\nNot chosen yet" in files["README.md"]
    assert f'Engine({KINDS[kind].option}="some-{kind}")' in files["README.md"]
    assert f"--{KINDS[kind].option.replace('_', '-')} some-{kind}" in files["README.md"]
    assert not re.findall(r"\$\w+", "".join(files.values())), "a placeholder was left"


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_is_short(kind: str) -> None:
    """It is there to be replaced."""
    lines = distribution("some", kind)["src/some/__init__.py"].splitlines()
    assert len([line for line in lines if line.strip()]) <= 28


@pytest.mark.parametrize(
    ("author", "known"),
    [
        (None, None),
        ("Ada", [{"name": "Ada"}]),
        ("ada@example.org", [{"name": "ada@example.org"}]),
        ('A "B" \\ C', [{"name": 'A "B" \\ C'}]),
        ("李 <li@example.org>", [{"name": "李", "email": "li@example.org"}]),
    ],
)
def test_authors(author: str | None, known: Any) -> None:
    assert project(distribution("some", "order", author))["project"].get("authors") == known


# Names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Policy", "lower-case letters and digits, words joined by single hyphens, such as my-policy"),
        ("my_policy", "such as my-policy"),
        ("my--policy", "such as my-policy"),
        ("-policy", "such as policy"),
        ("my.policy", "such as my-policy"),
        ("äöü", "joined by single hyphens"),
        ("", "joined by single hyphens"),
        ("../policy", "such as policy"),
        ("4-policies", "module 4_policies, which cannot be imported"),
        ("class", "module class, which cannot be imported"),
        ("lpm", "there is a policy 'lpm' already, from asyncsched-llm"),
        ("random", "there is a policy 'random' already|module random of Python itself"),
        ("graphlib", "hide the module graphlib of Python itself"),
        ("numpy", "hide the module numpy of numpy"),
        ("asyncsched", "hide the module asyncsched of asyncsched-llm"),
        ("value-error", "class ValueError, which means something else already"),
        ("request-view", "class RequestView, which means something else already"),
    ],
)
def test_a_name_that_cannot_be_taken(name: str, message: str, tmp_path: Path, capsys: Captured) -> None:
    assert main(["new-policy", "--into", str(tmp_path), "--", name]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError):
        distribution(name, "order")


def test_a_module_that_lies_about_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who begins with a file of that name in the current folder makes a distribution of it."""
    (tmp_path / "lies_about.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["new-policy", "lies-about"]) == 0


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "my-policy").mkdir()
    assert main(["new-policy", "my-policy", "--into", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert not list((tmp_path / "my-policy").iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").touch()
    assert main(["new-policy", "my-policy", "--into", str(tmp_path / "file")]) == 2
    assert "Not a directory" in capsys.readouterr().err


# It works


@pytest.mark.slow
def test_its_own_tests_pass(workshop: Path, tmp_path: Path) -> None:
    folders = sorted(path for path in workshop.iterdir())
    assert len(folders) == len(KINDS)
    for folder in folders:
        install(folder, tmp_path)
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib"]
    tool(workshop, "pytest", *options, *(folder.name for folder in folders), path=str(tmp_path))


@pytest.mark.source_tree
@pytest.mark.parametrize("name", ["a", "somewhat-longer-policy-name"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_written_as_ruff_likes_it(kind: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    assert main(["new-policy", name, "--kind", kind, "--into", str(tmp_path)]) == 0
    rules = "E,F,W,I,B,UP,RUF,SIM,PIE,PT,RET,C4,ANN,D1"
    tool(tmp_path / name, "ruff", "check", "--no-cache", "--select", rules, "--ignore", "D103,D105", ".")
    tool(tmp_path / name, "ruff", "format", "--no-cache", "--check", ".")


@pytest.mark.slow
@pytest.mark.source_tree
def test_its_types_are_right(workshop: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    modules = [str(path) for path in workshop.rglob("*.py")]
    assert len(modules) == 2 * len(KINDS)
    sources = os.pathsep.join([str(ROOT), *(str(folder / "src") for folder in workshop.iterdir())])
    options = ["--strict", "--follow-imports=silent", "--explicit-package-bases", "--cache-dir", str(tmp_path)]
    tool(workshop, "mypy", *options, *modules, path=sources)
