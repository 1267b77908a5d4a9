"""Parsing the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..errors import AsyncschedError
from . import fit_cost_model, new_policy, policies, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = make_parser().parse_args(arguments)
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that "module:Class" may name a module of this folder, as with ``python -m``
    try:
        status: int = options.run(options)
    except (AsyncschedError, OSError) as exc:
        print(f"asyncsched: {exc}", file=sys.stderr)
        return 2
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="asyncsched", description="Tools around the asyncsched inference engine.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (policies, new_policy, simulate, fit_cost_model):
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
