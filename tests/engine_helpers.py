"""A running engine on a simulated device, small tokenizers, and ways to wait without sleeping."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel
import pytest

from asyncsched import (
    Backend,
    Chunk,
    Engine,
    ExecutorLimits,
    RequestView,
    Statistics,
    StepPlan,
    TokenStream,
)
from asyncsched.policies.fcfs import FCFS
from asyncsched.policies.lru import LRU
from asyncsched.testing import ByteTokenizer, SimulatedExecutor, check_invariants, expected_tokens
from asyncsched.tokenizer import Message, Tokenizer

LIMITS = ExecutorLimits(max_rows=8, pages=64, page_size=4, max_model_len=128, vocab_size=1000)
GUARD = 10.0
"""Seconds after which a test that hangs is ended; nothing is measured by it."""

STARTING = [("asyncsched/engine.py", {"start"}), ("asyncsched/own_loop.py", {"_begin"})]
"""Where the watchdog over blocking calls looks away: one test looks there, and not every test need fail with it."""

ASYNCIO = pytest.mark.parametrize("anyio_backend", [pytest.param("asyncio", id="asyncio")])
"""For tests of what only asyncio has."""


def limits(**changes: int) -> ExecutorLimits:
    """``LIMITS`` with some fields changed."""
    return replace(LIMITS, **changes)


@lru_cache(maxsize=4096)
def _expected(prompt: tuple[int, ...], seed: int, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(expected_tokens(prompt, seed, count, vocab_size))


def oracle(prompt: Iterable[int], seed: int, count: int, vocab_size: int = LIMITS.vocab_size) -> tuple[int, ...]:
    """The tokens that the simulated device must yield, remembered between tests."""
    return _expected(tuple(prompt), seed, count, vocab_size)


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Give the other tasks turns until ``condition`` holds."""
    with anyio.move_on_after(GUARD):
        while not condition():
            await anyio.lowlevel.checkpoint()
        return
    raise AssertionError(f"never happened: {what or condition}")


async def turns(count: int = 50) -> None:
    """Let the other tasks run ``count`` times."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


class Rig:
    """A running engine on a ``SimulatedExecutor``, as an async context manager.

    Leaving it lets every step finish and checks that no request, row, page or reference is left.

    Args:
        limits: Capacities.
        tokenizer: Of the backend.
        hold: The device computes only when told (``step``).
        faults, lost_at, latency: As for ``SimulatedExecutor``.
        check: ``False`` leaves out the check, where the device was lost.
        guard: Seconds after which a hang is ended.
        **options: Fields of ``EngineConfig``.
    """

    def __init__(
        self,
        limits: ExecutorLimits = LIMITS,
        *,
        tokenizer: Tokenizer | None = None,
        hold: bool = False,
        faults: Mapping[int, BaseException] | None = None,
        lost_at: int | None = None,
        latency: float = 0.0,
        check: bool = True,
        guard: float = GUARD,
        **options: Any,
    ) -> None:
        if "config" not in options:  # instances: looking names up reads files, which would be most of a test's time
            options = {"policy": FCFS(), "eviction_policy": LRU(), **options}
        self.executor = SimulatedExecutor(
            limits,
            hold=hold,
            faults=faults,
            lost_at=lost_at,
            latency=latency,
            token_budget=options.get("token_budget", 1024),
        )
        self.limits = limits
        self.kept: list[TokenStream] = []  # streams nobody reads: one that is dropped is released
        self.engine = Engine(backend=Backend(self.executor, tokenizer, "simulated"), **options)
        self._check = check
        self._guard: AbstractContextManager[object] = anyio.fail_after(None if math.isinf(guard) else guard)

    async def __aenter__(self) -> Self:
        self._guard.__enter__()
        await self.engine.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if kind is None and self._check:
                    await self.settle()
            finally:
                await self.engine.aclose()
        except BaseException as exc:
            self._guard.__exit__(type(exc), exc, exc.__traceback__)
            raise
        self._guard.__exit__(kind, value, trace)

    @property
    def plans(self) -> list[StepPlan]:
        """Every plan so far."""
        return self.executor.plans

    @property
    def statistics(self) -> Statistics:
        """The engine in numbers."""
        return self.engine.statistics()

    @property
    def released(self) -> bool:
        """True if no row and no page is held by a request or fenced by a step."""
        numbers = self.engine.statistics()
        return numbers.free_rows == numbers.total_rows and numbers.free_pages + numbers.cached_pages == numbers.total_pages

    async def step(self, count: int = 1) -> None:
        """Let a held device complete ``count`` more steps, one after the other, and the engine take their results."""
        for _ in range(count):
            done = self.engine.statistics().steps
            self.executor.step()
            await until(lambda done=done: self.engine.statistics().steps > done, "a step to complete")  # type: ignore[misc]
            await turns(10)

    async def settle(self) -> None:
        """Let all work finish; then nothing may be left."""
        self.executor.unhold()
        await until(self._still, "the engine to become idle")
        await turns(5)
        check_invariants(self.engine, idle=True)

    def _still(self) -> bool:
        numbers = self.engine.statistics()
        return not (numbers.running or numbers.waiting or numbers.steps_in_flight)

    async def serves(self) -> None:
        """A new request is answered rightly."""
        self.executor.unhold()
        prompt = [11, 12, 13, 14, 15, 16]
        result = await self.engine.generate(prompt, max_tokens=4, seed=99, ignore_eos=True)
        assert result.token_ids == oracle(prompt, 99, 4, self.limits.vocab_size)


class Pieces:
    """A tokenizer whose tokens are the given byte strings; implements ``Tokenizer``.

    With few pieces the simulated device's pseudo-random tokens make up texts that a test can steer.

    Args:
        pieces: Bytes of token 0, 1, 2, …
        eos: Token that ends a generation, special.
        special: Further special tokens.
    """

    def __init__(self, pieces: Sequence[str | bytes], *, eos: int | None = None, special: Iterable[int] = ()) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self._eos = () if eos is None else (eos,)
        self._special = frozenset(special) | frozenset(self._eos)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    @property
    def longest_token(self) -> int:
        return 8

    @property
    def strips_leading_space(self) -> bool:
        return False

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, limit: int) -> list[list[int] | int]:
        return [[ord(c) % len(self.pieces) for c in text] if len(text) <= limit else len(text) for text in texts]

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool, **options: Any) -> str:
        return "".join(str(message["content"]) for message in messages)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once."""
        skipped = self._special if skip_special_tokens else frozenset[int]()
        return b"".join(self.pieces[token] for token in tokens if token not in skipped).decode("utf-8", "replace")


LETTERS = Pieces([chr(ord("a") + i) for i in range(26)])
"""One letter a token: text positions are token positions."""


class BlockedTokenizer(ByteTokenizer):
    """Encodes only while ``open`` is set, and keeps a record of what it was asked in which thread."""

    def __init__(self, *, blocks: Callable[[str], bool] = lambda text: True) -> None:
        super().__init__()
        self.open = threading.Event()
        self.entered = threading.Event()
        self.threads: set[int] = set()
        self.texts: list[str] = []
        self._blocks = blocks

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, limit: int) -> list[list[int] | int]:
        self.threads.add(threading.get_ident())
        self.texts.extend(texts)
        if any(self._blocks(text) for text in texts):
            self.entered.set()
            assert self.open.wait(GUARD)
        return super().encode(texts, add_special_tokens=add_special_tokens, limit=limit)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool, **options: Any) -> str:
        self.threads.add(threading.get_ident())
        return super().render_chat(messages, add_generation_prompt=add_generation_prompt, **options)


class FailingTokenizer(ByteTokenizer):
    """Raises on every text with ``poison`` in it."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, limit: int) -> list[list[int] | int]:
        if any("poison" in text for text in texts):
            raise RuntimeError("cannot read this")
        return super().encode(texts, add_special_tokens=add_special_tokens, limit=limit)


class Recorder:
    """Arrival order, and a record of what the policy was shown."""

    def __init__(self) -> None:
        self.waiting: list[int] = []

    def order(self, waiting: Sequence[RequestView], view: object) -> Sequence[RequestView]:
        self.waiting.append(len(waiting))
        return waiting


async def read(stream: TokenStream) -> list[Chunk]:
    """Every chunk of a stream."""
    return [chunk async for chunk in stream]


def text_of(chunks: Iterable[Chunk], index: int = 0) -> str:
    """The text of one completion, joined."""
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


def tokens_of(chunks: Iterable[Chunk], index: int = 0) -> tuple[int, ...]:
    """The tokens of one completion, joined."""
    return tuple(token for chunk in chunks if chunk.index == index for token in chunk.token_ids)


def assert_threads_end(before: set[threading.Thread]) -> None:
    """Every thread that was started since ``before`` was taken ends."""
    for thread in set(threading.enumerate()) - before:
        thread.join(GUARD)
        assert not thread.is_alive()


def asyncio_tasks() -> set[str]:
    """Names of the other tasks of the running asyncio loop."""
    current = asyncio.current_task()
    return {task.get_name() for task in asyncio.all_tasks() if task is not current}
