"""``asyncsched policies``: what is installed."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from ..errors import PolicyError
from ..policy_set import HOOKS
from ..registry import PolicyInfo, installed_policies, load_factory


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("policies", help="list the installed policies", description=list_policies.__doc__)
    parser.add_argument("name", nargs="*", metavar="NAME", help="show only these, with their whole documentation")
    parser.set_defaults(run=list_policies)


def list_policies(options: argparse.Namespace) -> int:
    """List the installed policies by kind: name, options with their defaults, what they do, where they come from."""
    kinds: dict[str, list[tuple[PolicyInfo, Any]]] = {kind: [] for kind in HOOKS}
    broken: list[tuple[PolicyInfo, str]] = []
    for info in installed_policies():
        if options.name and info.name not in options.name:
            continue
        try:
            factory = load_factory(info.name)
        except PolicyError as exc:
            broken.append((info, str(exc)))
            continue
        for kind, hook in HOOKS.items():
            if callable(getattr(factory, hook, None)):
                kinds[kind].append((info, factory))
                break
        else:
            broken.append((info, f"has none of the hooks {', '.join(HOOKS.values())}"))
    width = max((len(info.name) for found in kinds.values() for info, _ in found), default=0)
    for kind, found in kinds.items():
        if found:
            print(f"{kind}:")
        for info, factory in found:
            print(f"  {info.name:{width}} {_summary(factory)}")
            print(f"  {'':{width}} {_options(factory)}  ({info.distribution} {info.version}, {info.value})")
            if options.name:
                print(f"\n{inspect.getdoc(factory)}\n")
    for info, why in broken:
        print(f"  {info.name}: cannot be used: {why}")
    missing = [name for name in options.name if all(name != info.name for info in installed_policies())]
    for name in missing:
        print(f"  {name}: not installed")
    return 1 if broken or missing else 0


def _summary(factory: Any) -> str:
    text = inspect.getdoc(factory) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".")


def _options(factory: Any) -> str:
    """``option=default, …``"""
    if is_dataclass(factory):
        pairs = [(field.name, _default(field)) for field in fields(factory) if field.init]
    else:
        parameters = list(inspect.signature(factory).parameters.values())
        pairs = [(p.name, "" if p.default is p.empty else f"={p.default!r}") for p in parameters]
    return "options: " + (", ".join(name + default for name, default in pairs) or "none")


def _default(field: Any) -> str:
    if field.default is not MISSING:
        return f"={field.default!r}"
    return f"={field.default_factory()!r}" if field.default_factory is not MISSING else ""
