"""Greedy tokens of a small random float32 model: with graphs and without, at any depth, and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np

import asyncsched
from asyncsched import EngineConfig
from asyncsched.backend import load_backend

from .lab import Lab
from .records import Record
from .streams import Tokens

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
_BUDGET = 40  # tokens per step, so that the longer prompts are cut into chunks


def run(lab: Lab) -> None:
    """Compare every variant with the CPU, and with the first of them."""
    config, lengths, output = lab.configs.get("small", SMALL), lab.sizes.equality_lengths, lab.sizes.equality_output
    options = EngineConfig(
        model=str(lab.folder_of("small", config)),
        load_format="dummy",
        dtype="float32",
        max_rows=len(lengths),
        page_size=16,
        pages=32 * len(lengths),
        max_model_len=128,
        token_budget=min(_BUDGET, lab.sizes.token_budget),
        device="cpu",
    )
    expected = answers(load_backend(options), options, lengths, output)
    on_gpu = replace(options, device=lab.device_name)
    found = {
        f"graphs {'on' if graphs else 'off'}, depth {depth}": answers(
            lab.load(replace(on_gpu, cuda_graphs=graphs)), replace(on_gpu, depth=depth), lengths, output
        )
        for graphs in (True, False)
        for depth in (0, 1, 2)
    }
    first = next(iter(found.values()))
    for figure, other in (("from the CPU's", expected), ("with graphs on or off, at depth 0, 1 or 2", first)):
        apart = {name: differing(tokens, other) for name, tokens in found.items()}
        details = {"differing": apart, "sequences": len(lengths) * len(found), "tokens_each": output}
        count = sum(map(len, apart.values()))
        lab.emit(Record("equality", f"sequences that differ {figure}", count, 0, at_most=True, details=details))


def answers(backend: asyncsched.Backend, config: EngineConfig, lengths: Sequence[int], output: int) -> list[Tokens]:
    """Greedy tokens through an engine that ends with it, for prompts of these lengths."""
    rng = np.random.default_rng(0)
    vocabulary = backend.executor.limits.vocab_size
    prompts: list[Tokens] = [rng.integers(0, vocabulary, length).tolist() for length in lengths]

    async def main() -> list[Tokens]:
        async with asyncsched.Engine(config=config, backend=backend) as engine:
            results = await engine.generate(prompts, max_tokens=output, temperature=0, ignore_eos=True)
        return [list(result.token_ids) for result in results]

    return anyio.run(main)


def differing(found: list[Tokens], expected: list[Tokens]) -> dict[int, int]:
    """Sequences that are not equal, and the first position at which they are not."""
    apart = {}
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            apart[index] = next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
    return apart
