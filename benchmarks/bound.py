"""How close the engine comes to its own compute plane: the same steps in a bare loop, without engine or event loop.

Usage: python -m benchmarks.bound [--workload short64 shared512 ...] [--repeat 3] [--json]

Every round runs a workload through the engine, which notes its plans, and then the very same plans on a
second executor of the same model, one after the other. So both compute the same rows and pages; the tokens
must agree. Per workload, medians over the rounds, in seconds:

- ``engine_s``: through the public API, from an empty prefix cache;
- ``bare_s``: ``CpuExecutor.run`` on each plan;
- ``forward_s``: of that, within the model;
- ``products_s``: the model's matrix products alone, with the same numbers of rows in the same order;
- ``engine_over_bound``: the engine's output tokens per second over the bare loop's, median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import torch
from torch import Tensor

import asyncsched
from asyncsched import EngineConfig, ExecutorLimits, StepPlan, StepResult
from asyncsched.gpu.cpu_executor import CpuExecutor
from asyncsched.gpu.kernels.layout import StepLayout
from asyncsched.gpu.linear import Linear
from asyncsched.gpu.loading import open_checkpoint
from asyncsched.gpu.models.base import CacheShape, CausalModel, KVPool
from asyncsched.gpu.models.registry import build_model
from asyncsched.gpu.pool import available_memory, page_bytes, pool_pages
from asyncsched.gpu.sampler import Sampler

from .workloads import Workload, warm_up_prompts, workloads

Product = tuple[Linear, int]
"""A matrix and the number of rows it was multiplied with."""


class RecordingExecutor:
    """Notes the plans it passes on and the results that come back."""

    def __init__(self, executor: CpuExecutor) -> None:
        self._executor = executor
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    @property
    def limits(self) -> ExecutorLimits:
        """The executor's."""
        return self._executor.limits

    def start(self, deliver: Callable[[StepResult], None]) -> None:
        """Start the executor."""

        def note(result: StepResult) -> None:
            self.results.append(result)
            deliver(result)

        self._executor.start(note)

    def submit(self, plan: StepPlan) -> None:
        """Note and pass on."""
        self.plans.append(plan)
        self._executor.submit(plan)

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()

    def forget(self) -> None:
        """Begin a new record."""
        self.plans, self.results = [], []


class TimedModel:
    """The model, with the seconds spent in ``forward`` added up."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.seconds = 0.0

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        """The model's."""
        return self._model.max_model_len

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self._model.dtype

    @property
    def heads(self) -> int:
        """The model's."""
        return self._model.heads

    @property
    def graphable(self) -> bool:
        """The model's."""
        return self._model.graphable

    @property
    def cache_shapes(self) -> tuple[CacheShape, ...]:
        """The model's."""
        return self._model.cache_shapes

    def forward(self, tokens: Tensor, layout: StepLayout, pools: Sequence[KVPool], wanted: Tensor) -> Tensor:
        """Compute and time."""
        started = time.perf_counter()
        logits = self._model.forward(tokens, layout, pools, wanted)
        self.seconds += time.perf_counter() - started
        return logits


class Bound:
    """One model under two executors: one for an engine, one for the bare loop.

    Args:
        config: Model and sizes.
    """

    def __init__(self, config: EngineConfig) -> None:
        with open_checkpoint(config) as checkpoint:
            model = build_model(checkpoint, config.max_model_len, dummy=config.load_format == "dummy")
            self.name = checkpoint.name
        size = page_bytes(model.cache_shapes, config.page_size, model.dtype)
        pages = pool_pages(config, model.max_model_len, size, available_memory() // 2)
        limits = ExecutorLimits(config.max_rows, pages, config.page_size, model.max_model_len, model.vocab_size)
        self._model = TimedModel(model)
        self._bare = CpuExecutor(self._model, Sampler(limits.max_rows, limits.vocab_size), limits)
        self.executor = RecordingExecutor(CpuExecutor(model, Sampler(limits.max_rows, limits.vocab_size), limits))
        # One thread for all bare runs: OpenMP keeps a team of workers per calling thread.
        self._thread = ThreadPoolExecutor(1, "bare")

    def bare(self) -> tuple[float, float]:
        """Seconds to run the recorded plans, and of that in the model. Blocks; the engine must be idle.

        Raises:
            AssertionError: the tokens are not those of the engine.
        """
        return self._thread.submit(self._replay).result()

    def products(self) -> list[Product]:
        """Every matrix product of the recorded plans, in order. Computes them once more."""
        with noted_products() as found:
            self.bare()
        return found

    def multiply(self, products: Sequence[Product]) -> float:
        """Seconds for these products and nothing else."""
        return self._thread.submit(self._multiply, products).result()

    def close(self) -> None:
        """Free the bare loop's memory."""
        self._thread.shutdown()
        self._bare.close()

    def _replay(self) -> tuple[float, float]:
        executor, plans = self._bare, self.executor.plans
        executor.run(StepPlan(0, leaves=tuple(range(executor.limits.max_rows))))  # whatever the last run left
        results = []
        self._model.seconds = 0.0
        started = time.perf_counter()
        for plan in plans:
            results.append(executor.run(plan))  # noqa: PERF401 - a loop is what is measured
        seconds = time.perf_counter() - started
        for mine, theirs in zip(results, self.executor.results, strict=True):
            assert np.array_equal(mine.rows, theirs.rows), f"step {theirs.step}: other rows"
            assert np.array_equal(mine.tokens, theirs.tokens), f"step {theirs.step}: other tokens"
        return seconds, self._model.seconds

    def _multiply(self, products: Sequence[Product]) -> float:
        dtype = self._model.dtype
        inputs = {(rows, linear.inputs): torch.randn(rows, linear.inputs).to(dtype) for linear, rows in products}
        with torch.inference_mode():
            started = time.perf_counter()
            for linear, rows in products:
                linear(inputs[rows, linear.inputs])
            return time.perf_counter() - started


@contextmanager
def noted_products() -> Iterator[list[Product]]:
    """Collect the matrix products that any model computes meanwhile."""
    found: list[Product] = []
    multiply = Linear.__call__

    def noting(self: Linear, x: Tensor) -> Tensor:
        found.append((self, len(x)))
        return multiply(self, x)

    Linear.__call__ = noting  # type: ignore[method-assign]  # for as long as the block runs
    try:
        yield found
    finally:
        Linear.__call__ = multiply  # type: ignore[method-assign]


async def run_engine(engine: asyncsched.Engine, executor: RecordingExecutor, workload: Workload) -> float:
    """Seconds for one pass, from an empty prefix cache and with a new record."""
    await engine.flush_cache()
    executor.forget()
    started = time.perf_counter()
    results = await engine.generate(workload.prompts, max_tokens=workload.output, temperature=0, ignore_eos=True)
    seconds = time.perf_counter() - started
    assert all(len(result.token_ids) == workload.output for result in results)
    await engine.pause()  # returns when every step has ended: the last plan may only say who left
    engine.resume()
    return seconds


async def measure(bound: Bound, engine: asyncsched.Engine, workload: Workload, repeat: int) -> dict[str, Any]:
    """One workload, ``repeat`` rounds."""
    await run_engine(engine, bound.executor, workload)  # touches every page it needs, as the bare loop does behind it
    products = bound.products()
    engine_s, bare_s, forward_s, products_s = [], [], [], []
    for _ in range(repeat):
        engine_s.append(await run_engine(engine, bound.executor, workload))
        seconds, within = bound.bare()
        bare_s.append(seconds)
        forward_s.append(within)
        products_s.append(bound.multiply(products))
    ratios = [bare / whole for bare, whole in zip(bare_s, engine_s, strict=True)]
    return {
        "benchmark": "bound",
        "workload": workload.name,
        "steps": len(bound.executor.plans),
        "engine_s": round(statistics.median(engine_s), 3),
        "bare_s": round(statistics.median(bare_s), 3),
        "forward_s": round(statistics.median(forward_s), 3),
        "products_s": round(statistics.median(products_s), 3),
        "engine_over_bound": round(statistics.median(ratios), 4),
    }


async def main(options: argparse.Namespace) -> None:
    """Load, measure, print."""
    config = EngineConfig(model=options.model, dtype=options.dtype, max_rows=64, max_model_len=2048, depth=options.depth)
    bound = Bound(config)
    backend = asyncsched.Backend(bound.executor, None, bound.name)
    async with asyncsched.Engine(config=config, backend=backend) as engine:
        await engine.generate(warm_up_prompts(), max_tokens=8, temperature=0, ignore_eos=True)
        for name in options.workload:
            record = await measure(bound, engine, workloads()[name], options.repeat)
            if options.json:
                print(json.dumps(record), flush=True)
            else:
                print("  ".join(f"{key}={value}" for key, value in record.items()), flush=True)
    bound.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--workload", nargs="+", choices=list(workloads()), default=["short64", "shared512"])
    parser.add_argument("--repeat", type=int, default=3, help="rounds per workload")
    parser.add_argument("--json", action="store_true")
    anyio.run(main, parser.parse_args())
