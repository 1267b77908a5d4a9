"""Decode first, prompts in what a step has left: stall-free chunked prefill."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import EngineView, PrefillBudget


@dataclass(eq=False)
class DecodeFirst:
    """Every step decodes every row, and prompts get the rest of ``tokens``, in chunks: no row ever waits for a prompt.

    Stall-free batching of Sarathi-Serve (Agrawal et al., OSDI 2024). The engine alone does the same
    with the whole ``token_budget``; a smaller budget makes steps, and thus every token, take less
    time, at the price of prompts that take more steps. Each chunk reads the weights and the prompt so
    far again, so this is not for offline work, where only throughput counts: use ``prefill-first``.

    Args:
        tokens: Tokens of one step, rows that decode and prompts together (the paper's token budget).
            However many rows decode, one page of prompts goes along while the engine's own
            ``token_budget`` allows, so that prompts do not starve.
        chunk: Most prompt tokens of one request in one step; ``None`` sets no such limit.
    """

    api_version = 1
    tokens: int = 512
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or (self.chunk is not None and self.chunk < 1):
            raise ConfigError("decode-first: tokens and chunk must be at least 1; leave chunk out for no limit")

    def budget(self, view: EngineView) -> PrefillBudget:
        """What the decoding rows leave of the step."""
        tokens = max(self.tokens - view.decoding, view.page_size)
        return PrefillBudget(tokens, self.chunk or tokens)
