"""The whole engine against its own compute plane, and two steps in flight against none."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import numpy as np

import asyncsched
from asyncsched import StepPlan, StepResult

from .lab import LLAMA_8B, QWEN_06B, Lab
from .loaded import Loaded
from .records import Record
from .streams import Readers, random_prompts, stream_all

BOUND_SHARE, IDLE_SHARE, LAUNCH_MICROSECONDS = 0.97, 0.01, 150.0
OVERLAP_TARGETS = {QWEN_06B: 1.25, LLAMA_8B: 1.10}
_WARM_UP = 4  # tokens


def run(lab: Lab) -> None:
    """Stream to as many consumers as there are rows, then run the same plans in a bare loop."""
    loaded = lab.model(LLAMA_8B)
    readers = stream(lab, loaded, depth=2)
    plans, results = loaded.reusable.plans, loaded.reusable.results
    bare = loaded.reusable.launch(plans)
    steady = steady_steps(plans, results, lab.sizes.max_rows)
    inner = Steady.of([results[i] for i in steady])
    bound = Steady.of([bare[i] for i in steady])
    same = all(np.array_equal(one.tokens, other.tokens) for one, other in zip(results, bare, strict=True))
    details: dict[str, Any] = {
        "steps": len(steady),
        "streamed_tokens_per_s": readers.steady_rate,
        "computed_tokens_per_s": inner.tokens_per_second,
        "bare_tokens_per_s": bound.tokens_per_second,
        "same_tokens": same,
    }
    rows = f"{lab.sizes.max_rows} streamed rows, depth 2"
    share = readers.steady_rate / bound.tokens_per_second
    lab.emit(Record("engine", f"8B, {rows}, tokens/s ÷ bare loop's", share, BOUND_SHARE, details=details))
    idle = {"share_of_bare_loop": bound.idle_share}
    figure = f"8B, {rows}, share of time the device waits between steps"
    lab.emit(Record("engine", figure, inner.idle_share, IDLE_SHARE, at_most=True, details=idle))
    launching = {name: value * 1e6 for name, value in inner.launching.items()}
    launching |= {f"bare_{name}": value * 1e6 for name, value in bound.launching.items()}
    figure = f"8B, {rows}, compute thread per step, µs (median)"
    lab.emit(
        Record("engine", figure, launching["median"], LAUNCH_MICROSECONDS, at_most=True, details={"microseconds": launching})
    )


def run_overlap(lab: Lab) -> None:
    """Throughput with two steps in flight over that with none."""
    for model, target in sorted(OVERLAP_TARGETS.items(), key=lambda item: item[0] != LLAMA_8B):  # likely loaded already
        loaded = lab.model(model)
        rates: dict[int, list[float]] = {0: [], 2: []}
        for _ in range(lab.sizes.overlap_rounds):
            for depth, found in rates.items():
                found.append(stream(lab, loaded, depth).steady_rate)
        gain = max(rates[2]) / max(rates[0])
        details = {f"tokens_per_s_depth_{depth}": found for depth, found in rates.items()}
        figure = f"{model}, {lab.sizes.max_rows} streamed rows, depth 2 ÷ depth 0"
        lab.emit(Record("overlap", figure, gain, target, details=details))


def stream(lab: Lab, loaded: Loaded, depth: int) -> Readers:
    """One engine, one warm-up, one run of requests of equal length; the record of plans is that of the run."""
    sizes = lab.sizes
    vocabulary = loaded.reusable.limits.vocab_size
    warm_up, prompts = (random_prompts(sizes.max_rows, sizes.stream_prompt, vocabulary, seed) for seed in (1, 2))

    async def main() -> Readers:
        config = replace(loaded.config, depth=depth)
        async with asyncsched.Engine(config=config, backend=loaded.backend()) as engine:
            await stream_all(engine, warm_up, [_WARM_UP] * len(warm_up))
            await engine.pause()  # returns when no step is in flight
            engine.resume()
            loaded.reusable.forget()
            return await stream_all(engine, prompts, [sizes.stream_output] * len(prompts))

    return anyio.run(main)


def steady_steps(plans: Sequence[StepPlan], results: Sequence[StepResult], rows: int) -> list[int]:
    """Indices of the steps in which all rows decoded and nothing else happened.

    Raises:
        RuntimeError: there are hardly any.
    """
    found = [
        i
        for i, (plan, result) in enumerate(zip(plans, results, strict=True))
        if result.rows.size == rows and not (plan.prefill or plan.joins or plan.leaves)
    ]
    if len(found) < 3:
        raise RuntimeError(f"{len(found)} of {len(plans)} steps decoded all {rows} rows; ask for longer outputs")
    return found


@dataclass(frozen=True, slots=True)
class Steady:
    """What the stamps of decode steps say.

    Attributes:
        tokens_per_second: From the end of the first to the end of the last.
        idle_share: Share of the time from the first to the last in which none of them ran (0 … 1).
        launching: Seconds of the compute thread per step: ``median``, ``mean``, ``p99``.
    """

    tokens_per_second: float
    idle_share: float
    launching: dict[str, float]

    @classmethod
    def of(cls, results: Sequence[StepResult]) -> Steady:
        """Read steps that follow one another."""
        began = np.array([result.launched_at for result in results])
        ended = np.array([result.completed_at for result in results])
        spans = [result.launching for result in results if result.launching is not None]
        launching = [end - begin for begin, end in spans]
        gaps = np.maximum(began[1:] - ended[:-1], 0.0)
        tokens = sum(result.rows.size for result in results[1:])
        return cls(
            tokens_per_second=tokens / float(ended[-1] - ended[0]),
            idle_share=float(gaps.sum() / (ended[-1] - began[0])),
            launching={
                "median": statistics.median(launching),
                "mean": statistics.fmean(launching),
                "p99": float(np.quantile(launching, 0.99)),
            },
        )
