"""``asyncsched simulate``: the real engine in virtual time, once per set of policies."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cost_files import read_cost_model
from ..errors import ConfigError
from ..policy_set import HOOKS, PolicySet
from .specs import at_least, hint_error, output_limit, policy_spec, shares

if TYPE_CHECKING:
    from ..lab.simulator import Setup
    from ..lab.trace import Trace

DEFAULTS = {"policy": "fcfs", "eviction_policy": "lru"}


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("simulate", help="try policies on a trace, in virtual time", description=simulate.__doc__)
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="Azure csv, BurstGPT csv, Mooncake jsonl, LLMServingSim jsonl, or an event log of record_events",
    )
    policies = parser.add_argument_group(
        "policies", "NAME, NAME,option=value,… or JSON; each may be given several times: every combination is run"
    )
    for kind in HOOKS:
        policies.add_argument(f"--{kind.replace('_', '-')}", action="append", metavar="SPEC", type=_named)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--cost-model",
        type=Path,
        metavar="FILE",
        help="step times, of fit-cost-model (default: Llama-3.1-8B on an RTX PRO 6000)",
    )
    server.add_argument("--pages", type=at_least(1), metavar="N", default=4096, help="pages of the pool")
    server.add_argument("--page-size", type=at_least(1), metavar="N", default=16, help="tokens per page")
    server.add_argument("--rows", type=at_least(1), metavar="N", default=256, help="requests that run at once")
    server.add_argument("--token-budget", type=at_least(1), metavar="N", default=2048, help="tokens per step")
    server.add_argument("--depth", type=at_least(0), metavar="N", default=2, help="steps in flight")
    server.add_argument("--reserve", choices=["full", "expected", "prompt"], default="expected", help="pages kept for outputs")
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=at_least(1), metavar="N", help="only the first so many")
    load.add_argument("--seconds", type=float, metavar="SECONDS", help="only the first so many seconds")
    load.add_argument("--scale-rate", type=float, metavar="FACTOR", default=1.0, help="arrivals so many times as fast")
    load.add_argument("--tenants", type=shares, metavar="NAME=WEIGHT,…", help="assign requests to tenants at random")
    load.add_argument(
        "--max-tokens",
        type=output_limit,
        default="longest",
        metavar="LIMIT",
        help="callers' limit: longest (of the trace), exact, or a number",
    )
    load.add_argument(
        "--hint-error",
        type=hint_error,
        metavar="SIGMA",
        default=0.0,
        help="how far off hints of the output length are (0: right; none: no hints)",
    )
    load.add_argument("--seed", type=at_least(0), metavar="N", default=0, help="of everything that is drawn at random")
    targets = parser.add_argument_group("targets", "seconds, for requests that bring none; goodput counts those that kept them")
    targets.add_argument("--ttft-target", type=float, metavar="SECONDS")
    targets.add_argument("--tpot-target", type=float, metavar="SECONDS")
    targets.add_argument("--deadline", type=float, metavar="SECONDS")
    output = parser.add_argument_group("output")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the measures as JSON")
    parser.set_defaults(run=simulate)


def simulate(options: argparse.Namespace) -> int:
    """Serve a trace with the real engine on a modelled device, in virtual time, and compare sets of policies."""
    with _laboratory():
        from ..lab.measures import measure
        from ..lab.simulator import simulate as run
        from ..lab.tables import progress, show

        if options.html:
            from ..lab.report import write_report
    for path in (options.json, options.html):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} to write {path.name} into; make it first")
    trace, setup, sets = _trace(options), _setup(options), list(_sets(options))
    for _, policies in sets:  # a mistake in the last one must not show when the others have run
        PolicySet.load({kind: policies.get(kind) for kind in HOOKS})
    results = []
    with progress() as bars:
        for name, policies in sets:
            moved = bars.start(name, len(trace.requests))
            results.append(run(trace, replace(setup, options={**setup.options, **policies}), name, moved))
    measured = [(result.name, measure(result)) for result in results]
    show(trace, measured)
    if options.json:
        figures = {name: _plain(asdict(measures)) for name, measures in measured}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.html:
        write_report(options.html, trace, setup, results)
        print(f"report: {options.html}")
    return 0


@contextmanager
def _laboratory() -> Iterator[None]:
    """Says how to get what the laboratory needs and a plain installation lacks."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise ConfigError(f"{exc.name} is not installed: python -m pip install 'asyncsched-llm[lab]'") from exc


def _plain(value: Any) -> Any:
    """The same with ``None`` for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _named(text: str) -> tuple[str, Any]:
    return text, policy_spec(text)


def _sets(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination of the policies given, named by what distinguishes it."""
    given = {kind: getattr(options, kind) or [(DEFAULTS[kind], DEFAULTS[kind])] for kind in HOOKS if kind in DEFAULTS}
    given |= {kind: getattr(options, kind) for kind in HOOKS if getattr(options, kind)}
    choices = [[(kind, text, spec) for text, spec in given[kind]] for kind in HOOKS if kind in given]
    for combination in product(*choices):
        told = [
            text for choice, (kind, text, _) in zip(choices, combination, strict=True) if kind == "policy" or len(choice) > 1
        ]
        yield " + ".join(told), {kind: spec for kind, _, spec in combination}


def _trace(options: argparse.Namespace) -> Trace:
    from ..lab.readers import read_trace
    from ..lab.trace import limited, scaled, with_targets, with_tenants

    trace = limited(read_trace(options.trace, seed=options.seed), count=options.requests, seconds=options.seconds)
    if options.scale_rate != 1.0:
        trace = scaled(trace, options.scale_rate)
    if options.tenants:
        trace = with_tenants(trace, options.tenants, options.seed)
    return with_targets(trace, ttft=options.ttft_target, tpot=options.tpot_target, deadline=options.deadline)


def _setup(options: argparse.Namespace) -> Setup:
    """The server, without its policies."""
    from ..lab.defaults import DEFAULT_COST
    from ..lab.simulator import Setup

    return Setup(
        cost=DEFAULT_COST if options.cost_model is None else read_cost_model(options.cost_model),
        pages=options.pages,
        page_size=options.page_size,
        max_rows=options.rows,
        max_tokens=options.max_tokens,
        hint_error=options.hint_error,
        seed=options.seed,
        options={
            "token_budget": options.token_budget,
            "depth": options.depth,
            "reserve": options.reserve,
        },
    )
