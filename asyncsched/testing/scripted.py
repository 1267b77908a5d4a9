"""Advance an engine step by step, and look at what it decided."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import anyio.lowlevel

from ..backend import Backend
from ..contract import ExecutorLimits, StepPlan
from ..engine import Engine
from ..stream import TokenStream
from ..tokenizer import Tokenizer
from .invariants import check_invariants
from .simulated_executor import SimulatedExecutor


class ScriptedRun:
    """An engine on a held simulated device: nothing completes unless the script says so.

    After every operation the engine's tasks have run until all of them wait, and the invariants have
    been checked.

    Args:
        limits: Capacities of the device.
        tokenizer: For text prompts.
        **options: Fields of ``EngineConfig``.

    Example::

        async with ScriptedRun(depth=2, token_budget=16) as run:
            stream = await run.submit(list(range(40)), max_tokens=4)
            await run.to_chunk(stream, 2)
            stream.close()
            await run.steps(2)
    """

    def __init__(self, limits: ExecutorLimits | None = None, *, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        self.executor = SimulatedExecutor(limits, hold=True, token_budget=options.get("token_budget"))
        self.engine = Engine(backend=Backend(self.executor, tokenizer, "simulated"), **{"strict_policies": True, **options})

    @property
    def plans(self) -> list[StepPlan]:
        """Every plan so far."""
        return self.executor.plans

    async def __aenter__(self) -> Self:
        await self.engine.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.executor.unhold()
        await self.engine.aclose()

    async def submit(self, prompt: Any, **options: Any) -> TokenStream:
        """Submit a request and let it reach the queue or the device."""
        stream = self.engine.stream(prompt, **options)
        await self.settle()
        return stream

    async def steps(self, count: int = 1) -> None:
        """Complete ``count`` steps, one by one, as far as there are any."""
        for _ in range(count):
            self.executor.step()
            await self.settle()

    async def to_chunk(self, stream: TokenStream, index: int) -> StepPlan:
        """Advance until the plan with the request's chunk number ``index`` (1 is the first) is submitted, and return it.

        Raises:
            LookupError: the request has no such chunk.
        """
        for _ in range(10_000):
            plans = self.chunks_of(stream)
            if len(plans) >= index:
                return plans[index - 1]
            if stream.finish_reason is not None or not self.engine.statistics().steps_in_flight:
                break
            await self.steps()
        raise LookupError(f"{stream.request_id} has {len(self.chunks_of(stream))} chunks, not {index}")

    def chunks_of(self, stream: TokenStream) -> list[StepPlan]:
        """The plans so far that computed a part of the request's prompt."""
        numbers = set(stream.request_numbers)
        found: list[StepPlan] = []
        owner: dict[int, int] = {}
        for plan in self.plans:
            owner.update((join.row, join.number) for join in plan.joins)
            found += [plan for chunk in plan.prefill if owner.get(chunk.row) in numbers]
        return found

    async def exhaust_pages(self) -> TokenStream:
        """Have one request take every page that can be had, and return it; close it to give them back."""
        statistics = self.engine.statistics()
        size, length = self.engine.limits.page_size, self.engine.limits.max_model_len
        pages = min(statistics.free_pages + statistics.cached_pages, length // size)
        return await self.submit([0], max_tokens=pages * size, ignore_eos=True)

    async def settle(self) -> None:
        """Let every task of the engine run until all of them wait; then check the invariants."""
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        if self.engine.health().alive:
            check_invariants(self.engine)
