"""The check of ``check_policy`` on a real engine with a simulated device."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import anyio
import anyio.lowlevel

from ..backend import Backend
from ..contract import ExecutorLimits
from ..engine import Engine
from ..errors import AdmissionRejectedError
from ..sampling_params import SamplingParams
from ..stream import TokenStream
from .conformance_checks import Subject
from .invariants import InvariantError, check_invariants
from .oracle import expected_tokens
from .simulated_executor import SimulatedExecutor

LIMITS = ExecutorLimits(max_rows=8, pages=32, page_size=4, max_model_len=96, vocab_size=1000)
TOKEN_BUDGET = 40
TIME_LIMIT = 60.0


def engine(subject: Subject, backend: str) -> list[str]:
    """On an engine short of pages, with cancellations and preemptions, every answer is right and nothing is lost."""
    try:
        return anyio.run(_Traffic(subject).run, backend=backend)
    except Exception as exc:
        return [f"the engine could not be used: {exc!r}"]


class _Traffic:
    """Requests on an engine, and what went wrong with them."""

    def __init__(self, subject: Subject) -> None:
        self._random = Random(f"{subject.seed} engine")
        policy = subject.make()
        self._policies = dict.fromkeys(subject.kinds, policy)
        self._found: list[str] = []

    async def run(self) -> list[str]:
        """Run everything; returns the findings."""
        executor = SimulatedExecutor(LIMITS, token_budget=TOKEN_BUDGET)
        options: Mapping[str, Any] = {"reserve": "prompt", "token_budget": TOKEN_BUDGET, "policy_allowance": TIME_LIMIT}
        async with Engine(backend=Backend(executor, None, "simulated"), **options, **self._policies) as engine:
            with anyio.move_on_after(TIME_LIMIT) as scope:
                await self._send(engine)
            if scope.cancelled_caught:
                self._found.append(f"requests still hang after {TIME_LIMIT:.0f} s: {engine.statistics()}")
            else:
                while engine.health().alive and engine.statistics().steps_in_flight:  # a step or two past the last stop token
                    await anyio.lowlevel.checkpoint()
                self._balance(engine, idle=True)
            self._found += [
                f"the engine counted {count} faults of {hook}(); strict_policies=True shows the first as an exception"
                for hook, count in engine.statistics().policy_faults.items()
            ]
        return self._found

    async def _send(self, engine: Engine) -> None:
        random, prompts = self._random, [[0]]
        async with anyio.create_task_group() as tasks:
            for _ in range(60):
                head = random.choice(prompts)[: random.randint(0, 24)]
                prompt = head + [random.randrange(1000) for _ in range(random.randint(1, 12))]
                prompts.append(prompt)
                params = SamplingParams(max_tokens=random.randint(1, 50), seed=random.randrange(1000))
                stream = engine.stream(
                    prompt,
                    params,
                    priority=random.choice((0, 0, 1, -1)),
                    tenant=random.choice(("", "a", "b")),
                    deadline=random.choice((None, 3600.0)),
                    ttft_target=random.choice((None, 0.5)),
                    tpot_target=random.choice((None, 0.05)),
                    program_id=random.choice((None, "p", "q")),
                )
                tasks.start_soon(self._verify, stream, prompt, params)
                for _ in range(random.choice((0, 3, 30))):
                    await anyio.lowlevel.checkpoint()
                if random.random() < 0.15:
                    stream.close()
                self._balance(engine)

    async def _verify(self, stream: TokenStream, prompt: list[int], params: SamplingParams) -> None:
        """Await an answer and compare it with what the model must say; of a cancelled one with the beginning."""
        try:
            completion = (await stream.result()).completions[0]
        except AdmissionRejectedError:
            return
        except Exception as exc:
            self._found.append(f"a request of {len(prompt)} + {params.max_tokens} tokens ended with {exc!r}")
            return
        assert params.max_tokens is not None
        assert params.seed is not None
        expected = expected_tokens(prompt, params.seed, params.max_tokens, LIMITS.vocab_size)
        tokens = list(completion.token_ids)
        if tokens != (expected[: len(tokens)] if completion.finish_reason == "abort" else expected):
            self._found.append(f"a request of {len(prompt)} tokens was answered with {tokens}, the model says {expected}")

    def _balance(self, engine: Engine, *, idle: bool = False) -> None:
        try:
            check_invariants(engine, idle=idle)
        except InvariantError as exc:
            self._found.append(f"the engine's books do not balance: {exc}")
