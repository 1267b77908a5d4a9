"""Requests whose tokens are read by a live consumer each, and the rate at which they come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import numpy as np

import asyncsched

Tokens = list[int]


@dataclass(slots=True)
class Readers:
    """What all consumers have seen together.

    Attributes:
        waiting: Consumers that have no token yet.
        tokens: Tokens so far.
        complete: When the last consumer got its first token, and the tokens until then.
        over: When the first consumer had its last token, and the tokens until then.
    """

    waiting: int
    tokens: int = 0
    complete: tuple[float, int] | None = None
    over: tuple[float, int] | None = None

    async def read(self, stream: asyncsched.TokenStream) -> None:
        """Take every token as it comes."""
        first = True
        async with stream:
            async for chunk in stream:
                self.tokens += len(chunk.token_ids)
                if first and chunk.token_ids:
                    first = False
                    self.waiting -= 1
                    if not self.waiting:
                        self.complete = time.monotonic(), self.tokens
        if self.over is None:
            self.over = time.monotonic(), self.tokens

    @property
    def steady_rate(self) -> float:
        """Tokens per second while every request was decoding.

        Raises:
            RuntimeError: there was no such time.
        """
        if self.complete is None or self.over is None or self.over[0] <= self.complete[0]:
            raise RuntimeError("the first request was over before the last one had begun; ask for longer outputs")
        return (self.over[1] - self.complete[1]) / (self.over[0] - self.complete[0])


async def stream_all(engine: asyncsched.Engine, prompts: Sequence[Tokens], outputs: Sequence[int]) -> Readers:
    """Submit everything at once, greedy and without early stop, and read it to the end."""
    readers = Readers(len(prompts))
    async with anyio.create_task_group() as tasks:
        for prompt, output in zip(prompts, outputs, strict=True):
            stream = engine.stream(prompt, max_tokens=output, temperature=0, ignore_eos=True)
            tasks.start_soon(readers.read, stream)
    assert readers.tokens == sum(outputs), f"{readers.tokens:,} tokens were read, and {sum(outputs):,} asked for"
    return readers


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[Tokens]:
    """Prompts of equal length."""
    prompts: list[Tokens] = np.random.default_rng(seed).integers(0, vocabulary, (count, length)).tolist()
    return prompts
