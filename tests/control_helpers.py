"""A held simulation of an engine: tests let one step at a time complete and look at the plans.

Run as a script it prints a digest of every plan of a busy scenario.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from numpy.typing import NDArray

from asyncsched.backend import Backend
from asyncsched.contract import ExecutorLimits, PrefillChunk, RowJoin, StepPlan
from asyncsched.engine import Engine
from asyncsched.results import Result
from asyncsched.sampling_params import SamplingParams
from asyncsched.state import ControlState
from asyncsched.statistics import Statistics
from asyncsched.stream import TokenStream
from asyncsched.testing import SimulatedExecutor, check_invariants, expected_tokens

LIMITS = ExecutorLimits(max_rows=8, pages=64, page_size=4, max_model_len=128, vocab_size=1000)

ONE_LOOP = pytest.mark.parametrize("anyio_backend", [pytest.param("asyncio", id="asyncio")])
"""For tests of decisions that no event loop can change, where three would only take longer."""

QUIET = 40
"""Turns of the loop in which nothing may change before it counts as settled."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request the simulation has submitted."""

    stream: TokenStream
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def number(self) -> int:
        """Number of its first completion."""
        return self.stream._submission.requests[0].number


class Simulation:
    """An engine on a simulated device, both in the test's hands."""

    def __init__(self, engine: Engine, executor: SimulatedExecutor) -> None:
        self.engine = engine
        self.executor = executor
        self.sent: list[Sent] = []

    @property
    def plans(self) -> list[StepPlan]:
        """Every plan so far."""
        return self.executor.plans

    @property
    def state(self) -> ControlState:
        """The control plane's state."""
        return self.engine._running().control.state

    @property
    def statistics(self) -> Statistics:
        """The engine's own numbers."""
        return self.engine.statistics()

    def send(self, prompt: Sequence[int], max_tokens: int = 4, *, seed: int = 0, **options: Any) -> Sent:
        """Submit a request; it is planned once the loop gets a turn (``settle``)."""
        known = {name: options.pop(name) for name in list(options) if name in SamplingParams.__dataclass_fields__}
        params = SamplingParams(max_tokens=max_tokens, seed=seed, **known)
        sent = Sent(self.engine.stream(prompt, params, **options), tuple(prompt), params)
        self.sent.append(sent)
        return sent

    async def settle(self) -> None:
        """Let every task run until nothing moves any more. Without a clock, so a hang shows as quiet."""
        quiet, before = 0, None
        while quiet < QUIET:
            await anyio.lowlevel.checkpoint()
            run = None if self.engine._run is None else self.engine._run.control
            state = None if run is None else run.state
            now = state and (
                len(self.plans), state.submitted, state.completed, len(state.in_flight), len(state.waiting), len(state.live),
                state.pool.free, state.pool.limbo, state.tree.epoch, run and run.admission.queued,
            )  # fmt: skip
            quiet = quiet + 1 if now == before else 0
            before = now

    async def step(self, count: int = 1) -> None:
        """Let ``count`` steps complete, one after the other, and check the invariants after each."""
        for _ in range(count):
            self.executor.step()
            await self.settle()
            check_invariants(self.engine)

    async def run_out(self) -> None:
        """Let everything that can run to its end do so."""
        self.executor.unhold()
        await self.settle()
        check_invariants(self.engine)

    async def finish(self) -> list[Result]:
        """Run to the end; every answer must be the oracle's, and nothing may be held afterwards."""
        await self.run_out()
        hanging = [sent.number for sent in self.sent if sent.stream.finish_reason is None]
        assert not hanging, f"requests {hanging} hang; {self.statistics}"
        results = [await sent.stream.result() for sent in self.sent]
        for sent, result in zip(self.sent, results, strict=True):
            self.verify(sent, result)
        await self.settle()
        check_invariants(self.engine, idle=True)
        return results

    def verify(self, sent: Sent, result: Result) -> None:
        """Compare a result with the oracle; an aborted one must be a prefix of it."""
        limits = self.executor.limits
        room = limits.max_model_len - len(sent.prompt)
        count = room if sent.params.max_tokens is None else min(sent.params.max_tokens, room)
        assert sent.params.seed is not None
        for completion in result.completions:
            expected = expected_tokens(
                sent.prompt, sent.params.seed + completion.index, count, limits.vocab_size, sent.params.stop_token_ids
            )
            tokens = list(completion.token_ids)
            if completion.finish_reason == "abort":
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
                stopped = bool(tokens) and tokens[-1] in sent.params.stop_token_ids
                assert completion.finish_reason == ("stop" if stopped else "length")

    def shape(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """The chunks of a plan as ``(request number, start, size)``."""
        owner = owners(self.plans, plan.step)
        return [(owner[chunk.row], chunk.start, len(chunk.tokens)) for chunk in plan.prefill]

    def shapes(self) -> list[list[tuple[int, int, int]]]:
        """The chunks of every plan."""
        return [self.shape(plan) for plan in self.plans]

    def join_of(self, number: int) -> tuple[int, RowJoin]:
        """Step and join of a request."""
        return next((plan.step, join) for plan in self.plans for join in plan.joins if join.number == number)

    def joined(self) -> list[int]:
        """Numbers of the requests that have joined, in order."""
        return [join.number for plan in self.plans for join in plan.joins]

    def references(self) -> list[tuple[int, int]]:
        """Depth and users of every cached run."""
        return sorted((node.depth, node.refs) for node in self.state.tree.nodes())

    def cached(self, prompt: Sequence[int], namespace: str = "") -> int:
        """Leading tokens of ``prompt`` that are in the prefix cache."""
        return self.state.tree.peek(namespace, np.array(prompt, np.int32).tobytes())


def owners(plans: Iterable[StepPlan], upto: int) -> dict[int, int]:
    """Row → request number while step ``upto`` runs."""
    owner: dict[int, int] = {}
    for plan in plans:
        if plan.step > upto:
            break
        for row in plan.leaves:
            del owner[row]
        for join in plan.joins:
            assert join.row not in owner, f"step {plan.step}: row {join.row} is joined before it was left"
            owner[join.row] = join.number
    return owner


@asynccontextmanager
async def simulation(
    *, hold: bool = True, limits: ExecutorLimits = LIMITS, check_budget: bool = True, **options: Any
) -> AsyncIterator[Simulation]:
    """An engine on a simulated device. Fields of ``ExecutorLimits`` and engine options by keyword.

    Watermarks are 0 unless given, so that pages are evicted on demand only.
    """
    own = {name: options.pop(name) for name in list(options) if name in ExecutorLimits.__dataclass_fields__}
    limits = replace(limits, **own)
    budget = options.setdefault("token_budget", 1024)
    executor = SimulatedExecutor(limits, hold=hold, token_budget=budget if check_budget else None)
    options = {"low_watermark": 0.0, "high_watermark": 0.0, **options}
    async with Engine(backend=Backend(executor, None, "simulated"), **options) as engine:
        yield Simulation(engine, executor)


def prompt(length: int, first: int = 0) -> list[int]:
    """``length`` token ids; prompts of different ``first`` share no page."""
    return [(first * 37 + index * 7 + (first + 3) * (index % 3)) % 1000 for index in range(length)] if length else []


def digest(plans: Iterable[StepPlan]) -> str:
    """A digest of everything in the plans."""
    text = hashlib.sha256()
    for plan in plans:
        text.update(repr(plain(plan)).encode())
    return text.hexdigest()


def plain(plan: StepPlan) -> tuple[object, ...]:
    """A plan as nested tuples, so that plans can be compared."""

    def ints(array: NDArray[Any]) -> tuple[int, ...]:
        return tuple(array.tolist())

    def join(one: RowJoin) -> tuple[object, ...]:
        return (one.row, one.number, ints(one.pages), one.cached, one.seed, one.stop_ids, one.generated, ints(one.history))

    def chunk(one: PrefillChunk) -> tuple[object, ...]:
        return one.row, one.start, ints(one.tokens), one.sample

    appends = ints(plan.pages.rows), ints(plan.pages.indices), ints(plan.pages.pages)
    return plan.step, tuple(map(join, plan.joins)), plan.leaves, appends, tuple(map(chunk, plan.prefill)), plan.decode


async def traffic(sim: Simulation, seed: int, *, requests: int = 30, longest: int = 40, vocabulary: int = 3) -> None:
    """Busy, reproducible traffic: colliding prompts, stops, several completions, aborts, resubmitted answers.

    Returns with steps still in flight; ``sim.finish()`` runs the rest.
    """
    random = Random(seed)
    limits = sim.executor.limits
    answers: list[list[int]] = []
    for _ in range(requests):
        if answers and random.random() < 0.4:
            tokens = random.choice(answers)[: longest - 4] + [random.randrange(vocabulary) for _ in range(random.randint(1, 4))]
        else:
            tokens = [random.randrange(vocabulary) for _ in range(random.randint(1, longest))]
        wanted = random.choice([0, 1, 1, 2, 3, 7, 20])
        chance = random.randrange(2**31)
        oracle = expected_tokens(tokens, chance, wanted, limits.vocab_size)
        stops = (random.choice(oracle),) if oracle and random.random() < 0.4 else ()
        n = random.choice([1, 1, 1, 2])
        sent = sim.send(tokens, wanted, seed=chance, stop_token_ids=stops, n=n)
        answers.append(tokens + oracle)
        if random.random() < 0.15:
            victim = random.choice(sim.sent)
            sim.engine.abort(victim.stream.request_id)
        if random.random() < 0.05:
            sim.engine.abort(sent.stream.request_id)
        if random.random() < 0.7:
            await sim.settle()
        if sim.statistics.steps_in_flight:
            await sim.step(random.randint(0, min(2, sim.statistics.steps_in_flight)))


async def _scenario() -> str:
    async with simulation(pages=24, max_rows=4, token_budget=24, chunk_cap=10, policy="lpm") as sim:
        await traffic(sim, 7)
        await sim.finish()
        return digest(sim.plans)


if __name__ == "__main__":
    print(anyio.run(_scenario))
