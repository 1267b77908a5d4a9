"""Cost models: fitted ones, those in files, and what policies see of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from asyncsched.backend import Backend
from asyncsched.contract import ExecutorLimits, StepPlan
from asyncsched.cost import FittedCost, LinearCost, StepWork
from asyncsched.cost_files import read_cost_model, write_cost_model
from asyncsched.engine import Engine
from asyncsched.errors import (
    ConfigError,
)
from asyncsched.policy import EngineView, RequestView
from asyncsched.run import Run
from asyncsched.testing import SimulatedExecutor

from .control_helpers import ONE_LOOP, prompt, simulation
from .policy_helpers import (
    Arrival,
    Waiting,
)

# Cost models


TRUE = LinearCost(fixed=4e-3, per_decode_row=6e-5, per_context_token=2e-7, per_prefill_token=3e-5, per_attention_pair=2e-9)


def work(random: np.random.Generator) -> StepWork:
    """A step as engines have them: rows, their contexts, and often some prompts."""
    rows = int(random.integers(0, 200))
    chunks = [(int(random.integers(0, 4000)), int(random.integers(1, 500))) for _ in range(int(random.integers(0, 3)))]
    return StepWork(rows, rows * int(random.integers(50, 3000)), chunks)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_fitted_cost_converges(noise: float) -> None:
    random = np.random.default_rng(1)
    model = FittedCost()
    assert model.seconds(StepWork(5, 500)) == 0.0
    for _ in range(1500):
        step = work(random)
        model.observe(step, TRUE.seconds(step) * (1 + noise * random.standard_normal()))
    assert model.observed == 1500
    errors = [abs(model.seconds(step) / TRUE.seconds(step) - 1) for step in (work(random) for _ in range(200))]
    assert max(errors) < (1e-3 if not noise else 0.05)
    linear = model.linear()
    step = work(random)
    assert linear.seconds(step) == pytest.approx(model.seconds(step))


def test_a_fitted_cost_follows_a_change() -> None:
    random = np.random.default_rng(2)
    model = FittedCost(forget=0.99)
    for scale in (1.0, 3.0):
        for _ in range(1000):
            step = work(random)
            model.observe(step, scale * TRUE.seconds(step))
    step = work(random)
    assert model.seconds(step) == pytest.approx(3 * TRUE.seconds(step), rel=0.02)


def test_more_work_never_looks_cheaper() -> None:
    """Noise about a tiny slope gives negative coefficients; they count as none."""
    random = np.random.default_rng(3)
    model = FittedCost()
    for _ in range(300):
        step = work(random)
        model.observe(step, 0.01 - 1e-5 * step.prefill_tokens + 1e-3 * random.standard_normal())
    assert min(vars_of(model.linear())) >= 0.0
    assert model.seconds(StepWork(10, 1000, [(0, 500)])) >= model.seconds(StepWork(10, 1000)) >= model.seconds(StepWork(10, 0))


def vars_of(model: LinearCost) -> list[float]:
    return [model.fixed, model.per_decode_row, model.per_context_token, model.per_prefill_token, model.per_attention_pair]


@pytest.mark.parametrize(
    "steady", [StepWork(64, 64_000), StepWork(0, 0, [(0, 512)]), StepWork(1, 100)], ids=["rows", "prompts", "one"]
)
def test_a_long_monotonous_stretch_does_not_spoil_the_fit(steady: StepWork) -> None:
    """An hour of equal steps leaves most directions unexcited; when the work varies again, the fit must be sane at once."""
    random = np.random.default_rng(4)
    model = FittedCost()
    for _ in range(200):
        step = work(random)
        model.observe(step, TRUE.seconds(step))
    for _ in range(30_000):
        model.observe(steady, TRUE.seconds(steady) * (1 + 0.02 * random.standard_normal()))
    assert model.seconds(steady) == pytest.approx(TRUE.seconds(steady), rel=0.05)
    for _ in range(300):
        step = work(random)
        model.observe(step, TRUE.seconds(step))
    for _ in range(50):
        step = work(random)
        assert model.seconds(step) == pytest.approx(TRUE.seconds(step), rel=0.05)


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    """A file with the true model."""
    path = tmp_path / "cost.json"
    write_cost_model(TRUE, path)
    return path


@ONE_LOOP
async def test_policies_see_the_cost_model_that_was_given(cost_file: Path) -> None:
    seen: list[Any] = []

    class Looking(Arrival):
        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            seen.append(view.cost)
            return waiting

    for given in (TRUE, str(cost_file), cost_file):
        async with simulation(policy=Looking(), cost_model=given) as sim:
            sim.send(prompt(4), 2)
            await sim.finish()
            assert sim.state.costs.learning is None, "a given one is not fitted"
    assert seen[0] is TRUE
    assert seen[1:] == [TRUE, TRUE]


@pytest.mark.parametrize("asks", [True, False])
def test_a_cost_model_is_fitted_to_the_steps_once_a_policy_asks(asks: bool) -> None:
    """Steps take virtual time by a linear law; what is learned predicts it."""
    law = LinearCost(fixed=0.02, per_decode_row=0.001, per_context_token=1e-5, per_prefill_token=5e-4)
    limits = ExecutorLimits(max_rows=8, pages=200, page_size=4, max_model_len=128, vocab_size=1000)
    device = SimulatedExecutor(limits, latency=lambda plan: law.seconds(_work(device, plan)))

    class Asking(Arrival):
        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            if asks:
                predictions.append(view.cost.seconds(StepWork(4, 100)))
            return waiting

    async def main() -> None:
        async with Engine(backend=Backend(device, None, "simulated"), policy=Asking(), token_budget=40) as engine:
            for index in range(12):
                streams = [
                    engine.stream(prompt(3 + 11 * index % 60, index), max_tokens=3 + index) for _ in range(1 + index % 5)
                ]
                for stream in streams:
                    await stream.result()
            run = engine._running()
            assert isinstance(run, Run)
            learning = run.state.costs.learning
            if not asks:
                assert learning is None
                return
            assert learning is not None
            assert learning.observed == engine.statistics().steps, "from the first question on"
            for step in (StepWork(4, 200), StepWork(1, 40, [(0, 30)]), StepWork(0, 0, [(10, 20)])):
                assert learning.seconds(step) == pytest.approx(law.seconds(step), rel=0.1)

    predictions: list[float] = []
    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert not asks or (predictions[0] == 0.0 and predictions[-1] > 0.02)


def _work(device: SimulatedExecutor, plan: StepPlan) -> StepWork:
    """The work in a plan, as the device finds it before it computes."""
    state = device.device
    active = state.active.copy()
    active[list(plan.leaves)] = False
    rows = np.flatnonzero(active & plan.decode)
    context = int(state.length[rows].sum())
    return StepWork(len(rows), context, [(chunk.start, len(chunk.tokens)) for chunk in plan.prefill])


@ONE_LOOP
async def test_failed_steps_teach_nothing() -> None:
    class Asking(Arrival):
        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            assert view.cost is not None
            return waiting

    async with simulation(policy=Asking()) as sim:
        sim.executor.fail_next(RuntimeError("out of order"))
        sim.send(prompt(4, 1), 3)
        await sim.settle()
        sim.executor.unhold()
        await sim.settle()
        sim.send(prompt(4, 2), 1)
        await sim.settle()
        learning = sim.state.costs.learning
        assert learning is not None
        assert sim.statistics.failed_steps == 1
        assert learning.observed == sim.statistics.steps - 1


def test_cost_files_round_trip(cost_file: Path) -> None:
    assert read_cost_model(cost_file) == TRUE


@pytest.mark.parametrize(
    "text",
    [
        None, "", "{", "[]", "3", "{}", '{"kind": "cubic"}', '{"kind": "linear"}', '{"kind": "linear", "fixed": 1}',
        '{"kind": "linear", "fixed": "x", "per_decode_row": 0, "per_context_token": 0, "per_prefill_token": 0}',
        '{"kind": "linear", "fixed": 1, "per_decode_row": 0, "per_context_token": 0, "per_prefill_token": 0, "extra": 1}',
        b"\xff\xfe\x00",
    ],
    ids=["missing", "empty", "cut", "list", "number", "bare", "kind", "nothing", "fields", "text", "extra", "bytes"],
)  # fmt: skip
def test_what_is_no_cost_file_is_refused(tmp_path: Path, text: str | bytes | None) -> None:
    path = tmp_path / "model.json"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=r"model\.json is not a cost model: .*fit-cost-model"):
        read_cost_model(path)


@pytest.mark.parametrize("model", [5, object(), LinearCost], ids=["number", "object", "class"])
@ONE_LOOP
async def test_what_is_no_cost_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="cost_model="):
        async with simulation(cost_model=model):
            pass
