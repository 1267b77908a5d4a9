"""``asyncsched fit-cost-model``: step times for policies and simulations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..cost_files import write_cost_model
from ..errors import ConfigError
from .specs import at_least


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("fit-cost-model", help="fit step times to measurements", description=fit.__doc__)
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="an event log, or a folder with dense.csv, attention.csv and per_sequence.csv",
    )
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="layers of the model (for a folder of layer times)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the cost model, a JSON file")
    parser.set_defaults(run=fit)


def fit(options: argparse.Namespace) -> int:
    """Make a cost model from an engine's event log (a linear model is fitted to its steps), or from tables of
    measured layer times (they are interpolated).
    """
    if options.source.is_dir():
        from ..lab.layer_times import read_layer_times

        if options.layers is None:
            raise ConfigError("the tables are of one layer: say how many the model has, with --layers")
        table = read_layer_times(options.source, options.layers)
        write_cost_model(table, options.out)
        print(f"{options.out}: tables of {options.layers} layers, {len(table.per_token.sizes)} sizes")
        return 0
    if options.layers is not None:
        raise ConfigError(
            f"--layers is for a folder of layer times, and {options.source} is none; leave it out for an event log"
        )
    from ..event_log import read_events
    from ..events import StepCompleted
    from ..lab.fit import fit_steps

    fitted = fit_steps(event for event in read_events(options.source) if isinstance(event, StepCompleted))
    write_cost_model(fitted.model, options.out)
    print(f"{options.out}: {fitted.steps} steps, half of them within {fitted.error:.1%}, all together {fitted.bias:+.1%}")
    return 0
