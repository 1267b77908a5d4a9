"""Parsing the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import AsyncschedError
from . import fit_cost_model, new_policy, policies, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="asyncsched", description="Tools around the asyncsched inference engine.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (policies, new_policy, simulate, fit_cost_model):
        command.add(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except AsyncschedError as exc:
        print(f"asyncsched: {exc}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
