"""The benchmark of the compute-only bound replays exactly what the engine ran."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest

from asyncsched import Backend, Engine, EngineConfig
from asyncsched.gpu.linear import Linear
from benchmarks.bound import Bound, measure, noted_products, run_engine
from benchmarks.workloads import Workload

from .models_helpers import TINY

pytestmark = pytest.mark.source_tree

LAYERS, VOCAB = TINY["num_hidden_layers"], TINY["vocab_size"]
SHARED = list(range(10, 42))
WORKLOAD = Workload("tiny", [[*SHARED, seed, 3] for seed in range(50, 55)], 6)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **TINY}))
    sizes: dict[str, Any] = {"max_rows": 4, "page_size": 16, "pages": 64, "token_budget": 40}
    return EngineConfig(model=str(folder), load_format="dummy", dtype="float32", **sizes)


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[tuple[Bound, Engine]]:
    bound = Bound(config)
    try:
        async with Engine(config=config, backend=Backend(bound.executor, None, bound.name)) as engine:
            yield bound, engine
    finally:
        bound.close()


def test_the_same_plans_give_the_same_tokens_again_and_again(config: EngineConfig) -> None:
    async def main() -> None:
        async with running(config) as (bound, engine):
            for workload in (WORKLOAD, replace(WORKLOAD, prompts=[[7, 8, 9]], output=4), WORKLOAD):
                await run_engine(engine, bound.executor, workload)
                steps, sampled = len(bound.executor.plans), sum(result.rows.size for result in bound.executor.results)
                assert [plan.step for plan in bound.executor.plans] == [result.step for result in bound.executor.results]
                assert sampled == workload.output_tokens
                for _ in range(2):
                    seconds, within = bound.bare()
                    assert 0.0 < within < seconds
                assert len(bound.executor.plans) == steps  # the bare loop adds nothing to the record

    anyio.run(main)


def test_a_step_that_computes_something_else_is_noticed(config: EngineConfig) -> None:
    async def main() -> None:
        async with running(config) as (bound, engine):
            await run_engine(engine, bound.executor, WORKLOAD)
            last = bound.executor.results[-1]
            bound.executor.results[-1] = replace(last, tokens=(last.tokens + np.int32(1)) % VOCAB)
            with pytest.raises(AssertionError, match=f"step {last.step}: other tokens"):
                bound.bare()

    anyio.run(main)


def test_products_have_the_rows_of_the_steps(config: EngineConfig) -> None:
    async def main() -> None:
        async with running(config) as (bound, engine):
            await run_engine(engine, bound.executor, replace(WORKLOAD, prompts=[SHARED[:20], SHARED[:7]], output=3))
            prompts, decode = 20 + 7, 2
            # Four products per layer. Of the last layer only the first sees tokens that sample nothing; the head never does.
            assert len(bound.executor.plans) == 3
            products = bound.products()
            rows = [count for _, count in products]
            assert rows[: 4 * LAYERS + 1] == [prompts] * (4 * (LAYERS - 1) + 1) + [2] * 4
            assert rows[4 * LAYERS + 1 :] == [decode] * (2 * (4 * LAYERS + 1))
            assert {linear.outputs for linear, _ in products[4 * LAYERS :: 4 * LAYERS + 1]} == {VOCAB}
            assert bound.multiply(products) > 0.0

    anyio.run(main)


def test_noting_products_ends_with_the_block() -> None:
    multiply = Linear.__call__
    with noted_products():
        assert Linear.__call__ is not multiply
    assert Linear.__call__ is multiply


def test_the_record(config: EngineConfig) -> None:
    async def main() -> dict[str, Any]:
        async with running(config) as (bound, engine):
            return await measure(bound, engine, WORKLOAD, 2)

    record = anyio.run(main)
    assert (record["benchmark"], record["workload"]) == ("bound", "tiny")
    assert record["steps"] >= WORKLOAD.output
    assert record["engine_over_bound"] > 0.0
    assert record["bare_s"] >= record["forward_s"] > 0.0
    assert set(record) >= {"engine_s", "products_s"}
