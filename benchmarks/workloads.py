"""The fixed workloads of the throughput comparison: random token ids from seed 0, greedy, no early stop."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests submitted at once.

    Attributes:
        name: What the command line calls it.
        prompts: Token ids per request.
        output: Tokens to generate per request.
    """

    name: str
    prompts: list[list[int]]
    output: int

    @property
    def output_tokens(self) -> int:
        """Tokens generated in all."""
        return len(self.prompts) * self.output

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens in all."""
        return sum(map(len, self.prompts)) + self.output_tokens


def workloads() -> dict[str, Workload]:
    """All workloads by name.

    ========== ======== ====================== ======
    name       requests prompt                 output
    ========== ======== ====================== ======
    short64    64       20                     64
    single     1        20                     64
    long32     32       960                    64
    shared512  64       512 shared + 64 own    64
    prefill16  16       1,024                  1
    ========== ======== ====================== ======
    """
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(count)]

    shared = ids(512)
    return {
        workload.name: workload
        for workload in (
            Workload("short64", [ids(20) for _ in range(64)], 64),
            Workload("single", [ids(20)], 64),
            Workload("long32", [ids(960) for _ in range(32)], 64),
            Workload("shared512", [shared + ids(64) for _ in range(64)], 64),
            Workload("prefill16", [ids(1024) for _ in range(16)], 1),
        )
    }


def warm_up_prompts() -> list[list[int]]:
    """Eight short prompts from another seed, run once before anything is timed."""
    rng = random.Random(1)
    return [[rng.randrange(100, 40_000) for _ in range(20)] for _ in range(8)]
