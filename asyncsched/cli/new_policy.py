"""``asyncsched new-policy``: a distribution to begin with."""

from __future__ import annotations

import argparse
import builtins
import json
import keyword
import re
import sys
from email.utils import parseaddr
from importlib.metadata import packages_distributions, version
from pathlib import Path
from string import Template
from typing import Any

from ..errors import ConfigError
from ..registry import installed_policies
from .template_kinds import KINDS, RULES
from .templates import GITIGNORE, PYPROJECT, README


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("new-policy", help="begin a policy of your own", description=new_policy.__doc__)
    parser.add_argument("name", metavar="NAME", help="of policy and distribution: lower-case words joined by hyphens")
    parser.add_argument("--kind", choices=list(KINDS), default="order", help="what it decides")
    parser.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="where the folder NAME is made")
    parser.add_argument("--author", metavar="TEXT", help="'Name' or 'Name <address>'")
    parser.set_defaults(run=new_policy)


def new_policy(options: argparse.Namespace) -> int:
    """Write a complete distribution with a small policy that works: to be changed, tested, simulated and published."""
    root: Path = options.into / options.name
    files = distribution(options.name, options.kind, options.author)
    if root.exists():
        raise ConfigError(f"{root} exists already; remove it, or choose another name or another --into")
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, "utf-8")
        print(root / path)
    flag = KINDS[options.kind].option.replace("_", "-")
    print(f"\nNext, in {root}:")
    for command, why in (
        ("python -m pip install -e '.[test]'", "from now on its name can be used"),
        ("python -m pytest", "does it keep the rules, and do what it is for?"),
        (f"asyncsched simulate TRACE --{flag} {options.name}", "what does it do to recorded traffic?"),
        ("python -m build && python -m twine upload dist/*", "once it has a LICENSE"),
    ):
        print(f"  {command:55}  {why}")
    return 0


def distribution(name: str, kind: str, author: str | None = None) -> dict[str, str]:
    """The files of a distribution that brings one policy: path → text.

    Args:
        name: Of the policy and the distribution; the module has underscores for its hyphens.
        kind: One of ``KINDS``.
        author: ``Name``, or ``Name <address>``.

    Raises:
        ConfigError: the name is impossible or taken.
    """
    given = KINDS[kind]
    module, cls = name.replace("-", "_"), "".join(word.capitalize() for word in name.split("-"))
    _check(name, module)
    imports = [line for line in f"{given.policy}\n{given.test}".splitlines() if line.startswith(("from ", "import "))]
    if hasattr(builtins, cls) or any(re.search(rf"\b{cls}\b", line) for line in imports):
        raise ConfigError(f"name {name!r} would make a class {cls}, which means something else already; choose another name")
    fields = {
        "name": name,
        "module": module,
        "cls": cls,
        "does": given.does,
        "option": given.option,
        "flag": given.option.replace("_", "-"),
        "example": given.example,
        "version": version("asyncsched-llm"),
        "authors": _authors(author),
    }
    fields["rules"] = Template(RULES).substitute(fields)
    templates = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        ".gitignore": GITIGNORE,
        f"src/{module}/__init__.py": given.policy,
        f"src/{module}/py.typed": "",
        f"tests/test_{module}.py": given.test,
    }
    return {path: Template(text).substitute(fields) for path, text in templates.items()}


def _check(name: str, module: str) -> None:
    """A name must do for a policy, a distribution (in the normal form of the packaging standards) and a module."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        normal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        hint = f", such as {normal}" if normal else ""
        raise ConfigError(f"name {name!r}: use lower-case letters and digits, words joined by single hyphens{hint}")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ConfigError(f"name {name!r} would make a module {module}, which cannot be imported; choose another name")
    for info in installed_policies():
        if info.name == name:
            raise ConfigError(f"there is a policy {name!r} already, from {info.distribution}; choose another name")
    owners = ["Python itself"] if module in sys.stdlib_module_names else packages_distributions().get(module, [])
    if owners:
        raise ConfigError(f"name {name!r} would hide the module {module} of {owners[0]}; choose another name")


def _authors(author: str | None) -> str:
    """The line for ``pyproject.toml``; empty if nobody is named."""
    if author is None:
        return ""
    name, address = parseaddr(author)
    known = {"name": name, "email": address} if name and "@" in address else {"name": author}
    fields = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in known.items())
    return f"authors = [{{ {fields} }}]\n"
