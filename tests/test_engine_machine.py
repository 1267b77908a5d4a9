"""The whole engine under random operations: whatever happens, outputs are the serial ones and nothing is lost.

Operations are drawn by hypothesis and applied to a held simulated device, so that every interleaving of
submissions, cancellations, completions and faults can occur at every depth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import asyncsched
from asyncsched.testing import SimulatedExecutor, check_invariants, expected_tokens

VOCAB = 50
ENDED_BADLY = (asyncsched.StepFailedError, asyncsched.RequestTooLargeError)


@dataclass
class Client:
    """One request and what its reader got."""

    stream: asyncsched.TokenStream
    expected: list[int]
    got: list[int] = field(default_factory=list)
    cancelled: bool = False
    failed: bool = False
    ended: bool = False

    async def read(self) -> None:
        """Read to the end."""
        try:
            async for chunk in self.stream:
                assert not self.cancelled, "something was delivered after the cancel"
                self.got += chunk.token_ids
        except asyncsched.StepFailedError:
            self.failed = True
        self.ended = True


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # a small alphabet, so that prefixes meet
submit = st.tuples(st.just("submit"), prompts, st.integers(0, 12), st.integers(0, 3), st.booleans())
cancel = st.tuples(st.just("cancel"), st.integers(0, 20))
abort = st.tuples(st.just("abort"), st.integers(0, 20))
step = st.tuples(st.just("step"), st.integers(1, 4))
fault = st.tuples(st.just("fault"))
pause = st.tuples(st.just("pause"))
operations = st.lists(st.one_of(submit, submit, submit, step, step, step, cancel, abort, fault, pause), max_size=40)


async def settle() -> None:
    """Let every task of the engine run until all of them wait."""
    for _ in range(12):
        await anyio.lowlevel.checkpoint()


async def play(script: list[tuple[object, ...]], depth: int, reserve: str, page_size: int, prefix_cache: bool) -> None:
    limits = asyncsched.ExecutorLimits(4, pages=48 // page_size, page_size=page_size, max_model_len=30, vocab_size=VOCAB)
    executor = SimulatedExecutor(limits, hold=True, token_budget=16)
    clients: list[Client] = []
    async with (
        asyncsched.Engine(
            backend=asyncsched.Backend(executor, None, "simulated"),
            depth=depth,
            token_budget=16,
            chunk_cap=5,
            reserve=reserve,
            prefix_cache=prefix_cache,
            low_watermark=0.1,
            high_watermark=0.3,
            strict_policies=True,
        ) as engine,
        anyio.create_task_group() as readers,
    ):
        for operation in script:
            match operation:
                case ("submit", list(prompt), int(count), int(seed), bool(stops)):
                    stop = (prompt[0],) if stops else ()
                    stream = engine.stream(prompt, max_tokens=count, seed=seed, stop_token_ids=stop)
                    clients.append(Client(stream, expected_tokens(prompt, seed, count, VOCAB, stop)))
                    readers.start_soon(clients[-1].read)
                case ("cancel", int(which)) if clients:
                    client = clients[which % len(clients)]
                    client.cancelled = not client.ended
                    client.stream.close()
                case ("abort", int(which)) if clients:
                    engine.abort(clients[which % len(clients)].stream.request_id)
                case ("step", int(count)):
                    executor.step(count)
                case ("fault",):
                    executor.fail_next(RuntimeError("scripted"))
                case ("pause",):
                    executor.unhold()
                    await engine.pause("keep")
                    executor.hold()
                    engine.resume()
            await settle()
            check_invariants(engine)
        executor.unhold()
        await engine.drain()
        await engine.pause()
        check_invariants(engine, idle=True)
    for client in clients:
        assert client.got == client.expected[: len(client.got)]
        if not client.cancelled and not client.failed and client.stream.finish_reason != "abort":
            assert client.got == client.expected


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("reserve", ["full", "expected"])
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(script=operations, page_size=st.sampled_from([1, 4]), prefix_cache=st.booleans())
def test_outputs_are_the_serial_ones(
    depth: int, reserve: str, script: list[tuple[object, ...]], page_size: int, prefix_cache: bool
) -> None:
    anyio.run(play, script, depth, reserve, page_size, prefix_cache)
