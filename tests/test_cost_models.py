"""What a step's work is, models of what it takes, their files, and fitting one to measured steps."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched import ConfigError, StepCompleted
from asyncsched.cost import LinearCost, StepWork
from asyncsched.cost_files import load_cost_model, read_cost_model, write_cost_model
from asyncsched.cost_tables import Curve, Grid, SkewTable, TableCost
from asyncsched.lab.fit import fit_steps

LAW = LinearCost(fixed=4e-3, per_decode_row=6e-5, per_context_token=2e-7, per_prefill_token=3e-5, per_attention_pair=2e-9)


def floats(*values: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(values, np.float64)


# Work


def test_work() -> None:
    work = StepWork(3, 70, [(0, 4), (10, 2)])
    assert work.prefill_tokens == 6
    assert work.prefill_attention == (1 + 2 + 3 + 4) + (11 + 12), "a token attends to itself, too"
    assert StepWork(3, 70).prefill_tokens == StepWork(3, 70).prefill_attention == 0


@given(st.integers(0, 1000), st.integers(1, 1000), st.data())
def test_cutting_a_prompt_into_chunks_changes_no_pair(start: int, size: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, size))
    whole = StepWork(0, 0, [(start, size)])
    parts = StepWork(0, 0, [(start, cut), (start + cut, size - cut)])
    assert parts.prefill_attention == whole.prefill_attention == sum(range(start + 1, start + size + 1))


def test_linear_cost() -> None:
    model = LinearCost(1.0, 10.0, 100.0, 1000.0, 10_000.0)
    assert model.seconds(StepWork(2, 3, [(0, 1), (1, 1)])) == 1 + 20 + 300 + 2000 + 30_000
    assert model.seconds(StepWork(0, 0)) == 1.0


# Tables


def test_curve() -> None:
    curve = Curve(floats(1, 3, 4), floats(10, 20, 50))
    assert [curve(size) for size in (0, 1, 2, 3, 3.5, 4, 6)] == pytest.approx([10, 10, 15, 20, 35, 50, 110])


AXES = floats(0, 2, 5), floats(0, 10), floats(0, 1, 2, 4), floats(0, 100)


def law(a: float, b: float, c: float, d: float) -> float:
    return 1 + 2 * a + 3 * b + 4 * c + 5 * d + 6 * a * b + 7 * c * d + 8 * a * b * c * d


GRID = Grid(AXES, np.array([law(*point) for point in product(*AXES)]).reshape([len(axis) for axis in AXES]))


@given(st.floats(0, 20), st.floats(0, 40), st.floats(0, 16), st.floats(0, 400))
def test_grid_is_exact_for_what_is_linear_in_each_size(a: float, b: float, c: float, d: float) -> None:
    """Between the measured sizes and beyond them."""
    assert GRID(a, b, c, d) == pytest.approx(law(a, b, c, d))


def test_grid_bends_at_measured_sizes() -> None:
    values = np.zeros([3, 2, 4, 2])
    values[1] = 6.0
    grid = Grid(AXES, values)
    assert [grid(a, 0, 0, 0) for a in (0, 1, 2, 3, 5, 8)] == pytest.approx([0, 3, 6, 4, 0, -6])


def test_skew_table() -> None:
    """Buckets by their upper bounds; what is over the last one belongs to it."""
    table = SkewTable((floats(0, 8), floats(2, np.inf)), np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert [table(*point) for point in ((0, 1), (0, 2), (0, 2.1), (1, 2), (8, 9), (99, 99))] == [0.1, 0.1, 0.2, 0.3, 0.4, 0.4]


def tables(*, skew: bool) -> TableCost:
    edges = floats(0, 64), floats(8), floats(0.5, np.inf), floats(1024), floats(0)
    shares = SkewTable(edges, np.linspace(0.1, 0.9, 4).reshape(2, 1, 2, 1, 1)) if skew else None
    return TableCost(Curve(floats(1, 64), floats(1e-3, 5e-3)), Curve(floats(1, 8), floats(1e-4, 2e-4)), GRID, shares)


WORKS = [
    StepWork(0, 0),
    StepWork(4, 100),
    StepWork(4, 100, [(3, 2)], (10, 60)),
    StepWork(2, 150, [], (50, 100)),
    StepWork(0, 0, [(0, 4), (7, 9)]),
]


# Files


@pytest.mark.parametrize("model", [LAW, tables(skew=False), tables(skew=True)], ids=["linear", "table", "skewed"])
def test_round_trip(model: LinearCost | TableCost, tmp_path: Path) -> None:
    """To the last bit, infinite bounds of buckets included."""
    path = tmp_path / "model.json"
    write_cost_model(model, path)
    again = read_cost_model(path)
    assert type(again) is type(model)
    assert [again.seconds(work) for work in WORKS] == [model.seconds(work) for work in WORKS]
    found = load_cost_model(str(path))
    assert found is not None
    assert found.seconds(WORKS[2]) == model.seconds(WORKS[2])
    again_path = tmp_path / "again.json"
    write_cost_model(again, again_path)
    assert again_path.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("lost", ["per_token", "per_sequence", "attention", "skew"])
def test_table_files_that_lack_a_part(tmp_path: Path, lost: str) -> None:
    path = tmp_path / "model.json"
    write_cost_model(tables(skew=True), path)
    fields = json.loads(path.read_text())
    del fields[lost]
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"model\.json is not a cost model.*fit-cost-model"):
        read_cost_model(path)


# Fitting


def steps(law: LinearCost, count: int, *, noise: float = 0.0, decode_only: bool = False, seed: int = 0) -> list[StepCompleted]:
    """What an engine reports of steps that take as long as ``law`` says, give or take ``noise``."""
    random = np.random.default_rng(seed)
    reported = []
    for step in range(1, count + 1):
        rows = int(random.integers(1, 200))
        context = rows * int(random.integers(50, 3000))
        chunks = (
            [] if decode_only else [(int(random.integers(0, 4000)), 1 + int(random.integers(500))) for _ in range(step % 3)]
        )
        seconds = law.seconds(StepWork(rows, context, chunks)) * float(np.exp(noise * random.standard_normal()))
        reported.append(StepCompleted(0.0, step, rows, context, tuple(chunks), 100.0, 100.0 + seconds, False))
    return reported


def numbers(model: LinearCost) -> list[float]:
    return [model.fixed, model.per_decode_row, model.per_context_token, model.per_prefill_token, model.per_attention_pair]


def test_exact_steps_give_the_law() -> None:
    fit = fit_steps(steps(LAW, 40))
    assert numbers(fit.model) == pytest.approx(numbers(LAW), rel=1e-6)
    assert fit.steps == 40
    assert [fit.error, fit.bias] == pytest.approx([0.0, 0.0], abs=1e-9)


def test_noisy_steps_give_nearly_the_law() -> None:
    fit = fit_steps(steps(LAW, 3000, noise=0.05))
    assert numbers(fit.model) == pytest.approx(numbers(LAW), rel=0.1)
    assert fit.error == pytest.approx(0.05 * 0.6745, rel=0.1), "the median of |normal|"
    assert abs(fit.bias) < 0.02


def test_short_steps_count_as_much_as_long_ones() -> None:
    """Few prompts that take 500 times as long and are off by a third must not spoil the decode steps."""
    decode = steps(LinearCost(2e-3, 1e-5, 1e-9, 0.0), 300, decode_only=True)
    prompts = [StepCompleted(0.0, 400 + n, 0, 0, ((0, 1000 * n),), 0.0, n * (1.5, 0.75)[n % 2], False) for n in range(1, 9)]
    fit = fit_steps([*decode, *prompts])
    assert numbers(fit.model)[:3] == pytest.approx([2e-3, 1e-5, 1e-9], rel=0.05)
    assert fit.model.per_prefill_token == pytest.approx(1e-3, rel=0.4)
    assert fit.error < 0.01


def test_what_never_happened_costs_nothing() -> None:
    """A log without prompts says nothing about them."""
    fit = fit_steps(steps(LAW, 60, decode_only=True))
    assert numbers(fit.model) == pytest.approx([*numbers(LAW)[:3], 0.0, 0.0], rel=1e-6)


def test_no_coefficient_is_negative() -> None:
    """Rows that seem to make a step cheaper: the best law without that."""
    strange = LinearCost(5e-3, -1e-5, 1e-6, 0.0)
    fit = fit_steps(steps(strange, 200, decode_only=True))
    assert min(numbers(fit.model)) >= 0.0
    assert fit.model.per_decode_row == 0.0
    assert fit.error < 0.2


def test_failed_steps_and_those_without_time_are_left_out() -> None:
    good = steps(LAW, 40)
    failed = [StepCompleted(0.0, 90 + n, 5, 500, (), 100.0, 700.0, True) for n in range(5)]
    instant = [StepCompleted(0.0, 95 + n, 5, 500, (), 100.0, 100.0, False) for n in range(5)]
    fit = fit_steps([*failed, *good, *instant])
    assert fit.steps == 40
    assert numbers(fit.model) == pytest.approx(numbers(LAW), rel=1e-6)


@pytest.mark.parametrize("count", [0, 19])
def test_too_few_steps(count: int) -> None:
    with pytest.raises(ConfigError, match=f"has {count} steps; at least 20"):
        fit_steps(steps(LAW, count))
    assert fit_steps(steps(LAW, 20)).steps == 20
