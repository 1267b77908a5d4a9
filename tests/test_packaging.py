"""The layout: three source folders, one package, and what may import what."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distribution
from pathlib import Path
from typing import Any

import pytest

import asyncsched
from asyncsched import errors

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "asyncsched-llm"
HEAVY = ("torch", "transformers", "numba", "tokenizers", "safetensors", "gguf")
PLUGIN_PARTS = ("policies", "gpu")
MAX_LINES = 400


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def folder_of(package: str) -> Path:
    """Where a package's modules lie, in a source tree or an installed wheel alike."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None, f"{package} has no __init__.py"
    return Path(spec.origin).parent


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the distribution, by dotted name."""
    seen = set()
    for package in ("asyncsched", *(f"asyncsched.{part}" for part in PLUGIN_PARTS)):
        folder = folder_of(package)
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))
            if name not in seen:
                seen.add(name)
                yield name, path


MODULES = dict(modules())
CORE = [name for name in MODULES if name.split(".")[1:2] not in ([part] for part in PLUGIN_PARTS)]


def python(code: str, folder: Path) -> str:
    """Run code in a fresh interpreter, away from the source tree."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Absolute names of what a module imports anywhere in it, with the line; relative imports resolved."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def in_package(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


# --- what is shipped ---


@pytest.mark.source_tree
def test_every_package_folder_is_listed() -> None:
    settings = project()["tool"]["setuptools"]
    found = set()
    for package, folder in settings["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join((package, *init.parent.relative_to(ROOT / folder).parts)))
    assert found == set(settings["packages"])


@pytest.mark.source_tree
def test_every_folder_with_modules_is_a_package() -> None:
    for folder in project()["tool"]["setuptools"]["package-dir"].values():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} would be left out of the wheel"


def test_typing_marker_is_shipped() -> None:
    assert (folder_of("asyncsched") / "py.typed").is_file()


@pytest.mark.source_tree
def test_constraints_are_inside_the_allowed_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    declared = project()["project"]
    groups = [declared["dependencies"], *declared["optional-dependencies"].values()]
    for text in (text for group in groups for text in group):
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, f"{text} does not allow the tested version"


def entry_points() -> list[EntryPoint]:
    return [
        point for point in distribution(DISTRIBUTION).entry_points if point.group.startswith(("asyncsched.", "console_scripts"))
    ]


@pytest.mark.parametrize("point", entry_points(), ids=lambda p: f"{p.group}:{p.name}")
def test_entry_point_loads(point: EntryPoint) -> None:
    loaded = point.load()
    assert callable(loaded)
    assert inspect.getdoc(loaded), f"{point.value} has no docstring"


@pytest.mark.source_tree
def test_installed_entry_points_are_those_of_the_project() -> None:
    declared = project()["project"]
    expected = {(group, name, value) for group, points in declared["entry-points"].items() for name, value in points.items()}
    expected |= {("console_scripts", name, value) for name, value in declared.get("scripts", {}).items()}
    assert {(p.group, p.name, p.value) for p in entry_points()} == expected, "reinstall with pip install -e ."


# --- what may import what ---


@pytest.mark.parametrize("name", PLUGIN_PARTS)
def test_source_folders_are_no_packages_of_their_own(name: str, tmp_path: Path) -> None:
    python(
        f"import importlib\ntry: importlib.import_module({name!r})\nexcept ModuleNotFoundError: pass\n"
        f"else: raise SystemExit('{name} is importable beside asyncsched.{name}')",
        tmp_path,
    )


def test_import_is_light(tmp_path: Path) -> None:
    loaded = python("import asyncsched, sys; print(*sys.modules)", tmp_path).split()
    assert "asyncsched" in loaded
    unwanted = (*HEAVY, *(f"asyncsched.{part}" for part in PLUGIN_PARTS))
    assert not [name for name in loaded if in_package(name, unwanted)]


def test_import_changes_nothing_global(tmp_path: Path) -> None:
    python(
        "import signal, sys, threading\n"
        "def state(): return ([signal.getsignal(s) for s in signal.valid_signals()], sys.getswitchinterval(), sys.excepthook,\n"
        "                     threading.active_count())\n"
        "before = state()\n"
        "import asyncsched\n"
        "assert state() == before\n",
        tmp_path,
    )


@pytest.mark.parametrize("name", CORE)
def test_core_does_not_import_its_plugins(name: str) -> None:
    forbidden = (*(f"asyncsched.{part}" for part in PLUGIN_PARTS), "torch", "transformers", "numba")
    found = [f"{target} (line {line})" for target, line in imports(name) if in_package(target, forbidden)]
    assert not found, f"{name} must reach these through entry points only: {found}"


@pytest.mark.parametrize("name", MODULES)
def test_no_second_copy_by_absolute_import(name: str) -> None:
    found = [f"{target} (line {line})" for target, line in imports(name) if in_package(target, PLUGIN_PARTS)]
    assert not found, f"{name} imports {found}; use a relative import"


# --- how it is written ---


@pytest.mark.parametrize("name", MODULES)
def test_module_is_documented_and_short(name: str) -> None:
    text = MODULES[name].read_text("utf-8")
    assert ast.get_docstring(ast.parse(text)), f"{name} has no docstring"
    assert text.count("\n") <= MAX_LINES, f"{name} is over {MAX_LINES} lines: one noun per module"


def test_exports_are_documented() -> None:
    for name, value in vars(asyncsched).items():
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            assert inspect.getdoc(value), f"asyncsched.{name} has no docstring"


def test_exception_tree_is_as_drawn() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, tuple[str, ...]] = {}
    ancestors: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ((?:[│ ]   )*(?:[├└]── )?)(\w+Error)(?: \((\w+)\))?", line)
        if match:
            depth = len(match[1]) // 4
            ancestors[depth:] = [match[2]]
            parents = (ancestors[depth - 1] if depth else "Exception", match[3])
            drawn[match[2]] = tuple(p for p in parents if p)
    classes = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and c.__module__ == errors.__name__}
    assert len(classes) > 10
    assert drawn == {name: tuple(base.__name__ for base in cls.__bases__) for name, cls in classes.items()}
    assert all(cls.__doc__ for cls in classes.values())
