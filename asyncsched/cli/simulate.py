"""``asyncsched simulate``: the real engine in virtual time, once per set of policies."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cost_files import read_cost_model
from ..policy_set import HOOKS
from .specs import policy_spec, shares

if TYPE_CHECKING:
    from ..lab.simulator import Setup
    from ..lab.trace import Trace

DEFAULTS = {"policy": "fcfs", "eviction_policy": "lru"}


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("simulate", help="try policies on a trace, in virtual time", description=simulate.__doc__)
    parser.add_argument(
        "trace", type=Path, help="Azure 2023 csv, Mooncake jsonl, BurstGPT csv, vLLM run jsonl, or an event log"
    )
    policies = parser.add_argument_group(
        "policies", "NAME, NAME,option=value,… or JSON; each may be given several times: every combination is run"
    )
    for kind in HOOKS:
        policies.add_argument(f"--{kind.replace('_', '-')}", action="append", metavar="SPEC", type=_named)
    server = parser.add_argument_group("server")
    server.add_argument("--cost-model", type=Path, help="a file of fit-cost-model (default: Llama-3.1-8B on an RTX PRO 6000)")
    server.add_argument("--pages", type=int, default=4096, help="pages of the pool")
    server.add_argument("--page-size", type=int, default=16, help="tokens per page")
    server.add_argument("--rows", type=int, default=256, help="requests that run at once")
    server.add_argument("--token-budget", type=int, default=2048, help="tokens per step")
    server.add_argument("--depth", type=int, default=2, help="steps in flight")
    server.add_argument("--reserve", choices=["full", "expected", "prompt"], default="expected", help="pages kept for outputs")
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=int, help="only the first so many")
    load.add_argument("--seconds", type=float, help="only the first so many seconds")
    load.add_argument("--scale-rate", type=float, default=1.0, help="arrivals so many times as fast")
    load.add_argument("--tenants", type=shares, metavar="NAME=WEIGHT,…", help="assign requests to tenants at random")
    load.add_argument("--max-tokens", default="longest", help="callers' limit: longest (of the trace), exact, or a number")
    load.add_argument("--hint-error", type=float, default=0.0, help="how far off hints of the output length are (0: right)")
    load.add_argument("--seed", type=int, default=0)
    targets = parser.add_argument_group("targets", "seconds, for requests that bring none; goodput counts those that kept them")
    targets.add_argument("--ttft-target", type=float)
    targets.add_argument("--tpot-target", type=float)
    targets.add_argument("--deadline", type=float)
    output = parser.add_argument_group("output")
    output.add_argument("--html", type=Path, help="write a report with plots")
    output.add_argument("--json", type=Path, help="write the measures as JSON")
    parser.set_defaults(run=simulate)


def simulate(options: argparse.Namespace) -> int:
    """Serve a trace with the real engine on a modelled device, in virtual time, and compare sets of policies."""
    from ..lab.measures import measure
    from ..lab.simulator import simulate as run
    from ..lab.tables import progress, show

    trace = _trace(options)
    results = []
    with progress() as bar:
        for name, policies in _sets(options):
            task = bar.start(name, len(trace.requests))
            results.append(run(trace, _setup(options, policies), name, task))
    measured = [(result.name, measure(result)) for result in results]
    show(trace, measured)
    if options.json:
        options.json.write_text(json.dumps({name: asdict(measures) for name, measures in measured}, indent=1) + "\n")
    if options.html:
        from ..lab.report import write_report

        write_report(options.html, trace, _setup(options, {}), results)
        print(f"report: {options.html}")
    return 0


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


def _setup(options: argparse.Namespace, policies: dict[str, Any]) -> Setup:
    from ..lab.defaults import DEFAULT_COST
    from ..lab.simulator import Setup

    limit = options.max_tokens
    return Setup(
        cost=DEFAULT_COST if options.cost_model is None else read_cost_model(options.cost_model),
        pages=options.pages,
        page_size=options.page_size,
        max_rows=options.rows,
        max_tokens=limit if limit in ("longest", "exact") else int(limit),
        hint_error=options.hint_error,
        seed=options.seed,
        options={
            "token_budget": options.token_budget,
            "depth": options.depth,
            "reserve": options.reserve,
            **policies,
        },
    )
