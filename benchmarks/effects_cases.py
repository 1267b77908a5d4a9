"""What ``benchmarks.effects`` compares: excerpts of traces, sets of policies, and what their papers promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncsched.lab.measures import Measures
from asyncsched.lab.trace import Trace, with_targets, with_tenants

Runs = Mapping[str, Measures]
Sets = Mapping[str, Mapping[str, Any]]
"""Sets of policies: name → engine options."""

CONVERSATION, SYNTHETIC = "conversation_trace.jsonl", "synthetic_trace.jsonl"
CHAT, CODE = "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"

PATIENT = 100_000
"""An ``age_steps`` that nobody reaches."""

TIGHTNESS = (1.5, 3.0, 6.0, 12.0)
"""Deadlines: so many times what the request takes alone, and 2 s more."""

FIRST_TOKEN = (1.0, 3.0, 10.0, 30.0)
"""Seconds in which the first token is wanted."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a paper says, and whether the measures of the runs show it."""

    text: str
    holds: Callable[[Runs], bool]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One excerpt, one server, several sets of policies.

    Attributes:
        name: For ``--only``.
        file: The trace.
        first, count: Requests of the trace that are served.
        rate: Arrivals so many times as fast.
        rows, pages, page_size, token_budget: The server.
        runs: Name → engine options: policies, and what goes with them.
        promises: What is expected of the runs.
        columns: Figures worth showing.
        change: Adds tenants or targets.
    """

    name: str
    file: str
    first: int
    count: int
    rate: float
    rows: int
    pages: int
    page_size: int
    runs: Sets
    promises: tuple[Promise, ...]
    columns: tuple[str, ...]
    token_budget: int = 2048
    change: Callable[[Trace], Trace] = lambda trace: trace

    @property
    def served(self) -> str:
        """The excerpt and the server in words."""
        return (
            f"{self.file}, requests {self.first + 1}–{self.first + self.count}, arrivals × {self.rate:g}; "
            f"{self.rows} rows, {self.pages} pages of {self.page_size} tokens"
        )


def first_token_targets(trace: Trace) -> Trace:
    """Every request with a ``ttft_target``, drawn at random."""
    drawn = np.random.default_rng(0).choice(FIRST_TOKEN, len(trace.requests)).tolist()
    return replace(trace, requests=[replace(r, ttft_target=target) for r, target in zip(trace.requests, drawn, strict=True)])


def deadlines(trace: Trace) -> Trace:
    """Every request with a deadline, some tight and some loose."""
    drawn = np.random.default_rng(0).choice(TIGHTNESS, len(trace.requests)).tolist()
    requests = []
    for request, tightness in zip(trace.requests, drawn, strict=True):
        alone = 43e-6 * request.prompt_tokens + 0.03 * request.output_tokens  # seconds, roughly
        requests.append(replace(request, deadline=2.0 + tightness * alone))
    return replace(trace, requests=requests)


# (a) cache-aware orders

ORDERS: Sets = {
    "fcfs": {"policy": "fcfs"},
    "lpm": {"policy": "lpm"},
    "lpm, no ageing": {"policy": {"name": "lpm", "age_steps": PATIENT}},
    "dlpm": {"policy": "dlpm"},
    "dfs-weight": {"policy": "dfs-weight"},
}
HITS = ("cached %", "TTFT s", "E2E s", "max wait s", "output/s")


def _cached_more(one: str, other: str, factor: float = 1.2) -> Callable[[Runs], bool]:
    return lambda runs: runs[one].hit_rate > factor * runs[other].hit_rate


CACHE_AWARE = (
    Promise("lpm finds at least a fifth more of its prompts in the cache than fcfs", _cached_more("lpm", "fcfs")),
    Promise("so does dlpm", _cached_more("dlpm", "fcfs")),
    Promise("so does dfs-weight", _cached_more("dfs-weight", "fcfs")),
)

# (b) fairness

FAIR: Sets = {
    "fcfs": {"policy": "fcfs"},
    "vtc": {"policy": {"name": "vtc", "output_weight": 1.0}},  # as the gap is counted: every token is one
    "dlpm": {"policy": {"name": "dlpm", "output_weight": 1.0}},
}
BOUND = 2 * 7930
"""Tokens: twice the longest prompt of the excerpt. VTC promises twice that or the running batch, whichever is more."""


def _within(run: str) -> Callable[[Runs], bool]:
    return lambda runs: runs[run].worst_gap <= BOUND


SHARES = (
    Promise("under vtc the service gap stays within twice the longest prompt", _within("vtc")),
    Promise("so it does under dlpm", _within("dlpm")),
    Promise("under fcfs it does not", lambda runs: not _within("fcfs")(runs)),
    Promise("vtc costs no output", lambda runs: runs["vtc"].output_rate > 0.99 * runs["fcfs"].output_rate),
)

# (c) deadlines

IN_TIME: Sets = {
    "fcfs": {"policy": "fcfs"},
    "fcfs, early rejection": {"policy": "fcfs", "admission_policy": "deadline"},
    "edf": {"policy": "edf"},
    "edf, early rejection": {"policy": "edf", "admission_policy": "deadline"},
}


def _in_time_more(one: str, other: str) -> Callable[[Runs], bool]:
    return lambda runs: runs[one].good_share > 1.05 * runs[other].good_share


DUE = (
    Promise("edf with early rejection keeps more targets than fcfs", _in_time_more("edf, early rejection", "fcfs")),
    Promise("so does edf alone", _in_time_more("edf", "fcfs")),
    Promise("so does early rejection alone", _in_time_more("fcfs, early rejection", "fcfs")),
    Promise("early rejection adds to edf", _in_time_more("edf, early rejection", "edf")),
)

# (d) sizes

SIZES: Sets = {
    "fcfs": {"policy": "fcfs"},
    "sjf": {"policy": "sjf"},
    "sjf, no ageing": {"policy": {"name": "sjf", "age_tokens": 1e-9}},
    "srpt": {"policy": "srpt"},
    "srpt, no ageing": {"policy": {"name": "srpt", "age_tokens": 1e-9}},
}


def _sooner(one: str, other: str, factor: float = 0.95) -> Callable[[Runs], bool]:
    return lambda runs: runs[one].e2e.mean < factor * runs[other].e2e.mean


def _bounded(aged: str) -> Callable[[Runs], bool]:
    return lambda runs: 2 * runs[aged].longest_wait < runs[f"{aged}, no ageing"].longest_wait


SHORTEST_FIRST = (
    Promise("sjf lowers the mean latency of fcfs", _sooner("sjf", "fcfs")),
    Promise("so does srpt", _sooner("srpt", "fcfs")),
    Promise("ageing more than halves the longest wait under sjf", _bounded("sjf")),
    Promise("and under srpt", _bounded("srpt")),
    Promise("srpt, which preempts, has a lower mean latency than sjf", _sooner("srpt", "sjf", 1.0)),
)

# (e) eviction

EVICTION: Sets = {name: {"eviction_policy": name} for name in ("lru", "lfu", "slru", "fifo", "cost-aware")}
COST_AWARE = (
    Promise("cost-aware finds at least 2 % more prompt tokens in the cache than lru", _cached_more("cost-aware", "lru", 1.02)),
    Promise("and lowers the mean latency", _sooner("cost-aware", "lru", 1.0)),
)

# (f) budgets

BUDGETS: Sets = {
    "engine": {},
    "prefill-first": {"budget_policy": "prefill-first"},
    "decode-first": {"budget_policy": "decode-first"},
    "slo": {"budget_policy": "slo"},
}
TPOT_TARGET = 0.05


def _steadier(one: str) -> Callable[[Runs], bool]:
    return lambda runs: runs[one].itl.p99 < 0.5 * runs["prefill-first"].itl.p99


def _as_much(one: str) -> Callable[[Runs], bool]:
    return lambda runs: runs[one].output_rate > 0.97 * runs["prefill-first"].output_rate


STALLS = (
    Promise("decode-first has less than half the p99 time between tokens of prefill-first", _steadier("decode-first")),
    Promise("at no less than 97 % of its output", _as_much("decode-first")),
    Promise("so has slo", _steadier("slo")),
    Promise("at no less than 97 % of its output, too", _as_much("slo")),
    Promise("slo keeps that time within the target of 50 ms", lambda runs: runs["slo"].itl.p99 <= 1.001 * TPOT_TARGET),
)

# (g) memory for outputs

RESERVES: Sets = {
    "reserve full": {"reserve": "full"},
    "reserve expected": {"reserve": "expected"},
    "reserve prompt": {"reserve": "prompt"},
    "prompt, past-future": {"reserve": "prompt", "policy": "past-future-order"},
}


def _fewer_preemptions(runs: Runs) -> bool:
    return runs["prompt, past-future"].preemptions < 0.2 * runs["reserve prompt"].preemptions


PAST_FUTURE = (
    Promise("past-future preempts less than a fifth as often as reserving the prompt alone", _fewer_preemptions),
    Promise("and has a lower mean latency than that", _sooner("prompt, past-future", "reserve prompt", 1.0)),
    Promise("and less than half that of reserving everything", _sooner("prompt, past-future", "reserve full", 0.5)),
)

COMPARISONS = (
    Comparison("order-synthetic", SYNTHETIC, 2500, 800, 0.4, 32, 8000, 64, ORDERS, CACHE_AWARE, HITS),
    Comparison("order-conversation", CONVERSATION, 0, 800, 0.4, 32, 8000, 64, ORDERS, CACHE_AWARE, HITS),
    Comparison(
        "fairness", CHAT, 0, 2000, 2.5, 64, 20_000, 16, FAIR, SHARES, ("gap tokens", "TTFT s", "E2E s", "output/s"),
        change=lambda trace: with_tenants(trace, {"flood": 9, "polite": 1}),
    ),
    Comparison(
        "first-token", CHAT, 0, 2000, 2.5, 64, 20_000, 16, IN_TIME, DUE, ("in time %", "TTFT s", "E2E s", "output/s"),
        change=first_token_targets,
    ),
    Comparison(
        "deadlines", CHAT, 0, 2000, 2.5, 64, 20_000, 16, IN_TIME, DUE, ("in time %", "TTFT s", "E2E s", "output/s"),
        change=deadlines,
    ),
    Comparison(
        "sizes", CHAT, 0, 2000, 1.6, 64, 20_000, 16, SIZES, SHORTEST_FIRST, ("TTFT s", "E2E s", "max wait s", "preempted")
    ),
    Comparison("eviction-conversation", CONVERSATION, 0, 1200, 0.15, 32, 20_000, 64, EVICTION, COST_AWARE, HITS),
    Comparison("eviction-conversation-large", CONVERSATION, 0, 1200, 0.15, 32, 40_000, 64, EVICTION, COST_AWARE, HITS),
    Comparison("eviction-synthetic", SYNTHETIC, 2500, 800, 0.2, 32, 20_000, 64, EVICTION, COST_AWARE, HITS),
    Comparison("eviction-synthetic-large", SYNTHETIC, 2500, 800, 0.2, 32, 40_000, 64, EVICTION, COST_AWARE, HITS),
    Comparison(
        "stalls-code", CODE, 0, 1000, 1.0, 128, 20_000, 16, BUDGETS, STALLS, ("TTFT s", "ITL p99 ms", "E2E s", "output/s"),
        token_budget=4096, change=lambda trace: with_targets(trace, tpot=TPOT_TARGET),
    ),
    Comparison(
        "stalls-chat", CHAT, 0, 1500, 1.3, 128, 20_000, 16, BUDGETS, STALLS, ("TTFT s", "ITL p99 ms", "E2E s", "output/s"),
        token_budget=4096, change=lambda trace: with_targets(trace, tpot=TPOT_TARGET),
    ),
    Comparison(
        "memory", CHAT, 0, 1500, 1.3, 128, 3000, 16, RESERVES, PAST_FUTURE,
        ("preempted", "TTFT s", "ITL p99 ms", "E2E s", "output/s"),
    ),
)  # fmt: skip
