"""The backend's entry point: from an engine configuration to sampled tokens."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

from asyncsched.backend import load_backend
from asyncsched.config import EngineConfig
from asyncsched.contract import ExecutorLimits, StepPlan, StepResult
from asyncsched.errors import ModelError, NotEnoughMemoryError
from asyncsched.gpu.cpu_executor import CpuExecutor
from asyncsched.sampling_params import SamplingParams

from .models_helpers import GREEDY, TINY, VOCAB, appends, chunk, drive, join, reference, tiny_transformer, tokens_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_transformer("llama", **TINY).save_pretrained(path)
    return path


def loaded(folder: Path, **options: object) -> CpuExecutor:
    backend = load_backend(EngineConfig.from_options({"model": str(folder), "device": "cpu", "max_rows": 3, **options}))
    assert isinstance(backend.executor, CpuExecutor)
    return backend.executor


def test_the_entry_point_is_installed() -> None:
    (point,) = entry_points(group="asyncsched.backends", name="cpu")
    assert point.value == "asyncsched.gpu.cpu:load"


def test_greedy_tokens_are_the_models_own(folder: Path) -> None:
    module = tiny_transformer("llama", **TINY)
    prompts = {0: tokens_for(1, 40), 1: tokens_for(2, 3)}
    plans = [
        StepPlan(1, joins=(join(0, [5, 6]), join(1, [2])), prefill=(chunk(0, 0, prompts[0]), chunk(1, 0, prompts[1]))),
        *(StepPlan(step, decode=True) for step in range(2, 12)),
    ]
    executor = loaded(folder, pages=8)
    assert executor.limits == ExecutorLimits(3, 8, 32, 256, VOCAB)
    results = drive(executor, plans)
    assert [result.error for result in results] == [None] * 11
    for row, prompt in prompts.items():
        tokens = list(prompt)
        for result in results:
            logits = reference(module, tokens)[-1]
            tokens.append(int(result.tokens[row]))
            # The argmax, or as good as: two summation orders may break a near tie differently.
            assert float(logits.max() - logits[tokens[-1]]) < 1e-3


def test_drawn_tokens_do_not_depend_on_the_batch(folder: Path) -> None:
    drawn = SamplingParams(temperature=1.0, top_p=0.95, logprobs=2)
    prompt = tokens_for(3, 7)
    together = drive(
        loaded(folder, pages=8),
        [
            StepPlan(1, joins=(join(2, [0], params=GREEDY),), prefill=(chunk(2, 0, tokens_for(4, 9)),)),
            StepPlan(2, joins=(join(1, [1], params=drawn),), prefill=(chunk(1, 0, prompt),), decode=True),
            StepPlan(3, decode=True),
            StepPlan(4, leaves=(2,), decode=True),
        ],
    )
    alone = drive(
        loaded(folder, pages=8),
        [
            StepPlan(1, joins=(join(1, [3], params=drawn),), prefill=(chunk(1, 0, prompt),)),
            StepPlan(2, decode=True),
            StepPlan(3, decode=True),
        ],
    )

    def of_row_one(results: list[StepResult]) -> list[int]:
        return [int(result.tokens[index]) for result in results for index in np.flatnonzero(result.rows == 1)]

    assert of_row_one(together) == of_row_one(alone)
    assert len(of_row_one(alone)) == 3
    assert len((alone[0].logprobs or {})[1].top_ids) == 2


def test_a_page_that_fills_up_is_followed_by_the_next(folder: Path) -> None:
    prompt = tokens_for(5, 3)
    plans = [StepPlan(1, joins=(join(0, [7]),), prefill=(chunk(0, 0, prompt),))]
    plans += [
        StepPlan(step, pages=appends((0, (step + 1) // 4, step % 7)), decode=True)
        if (step + 1) % 4 == 0
        else StepPlan(step, decode=True)
        for step in range(2, 14)
    ]
    small = drive(loaded(folder, pages=8, page_size=4), plans)
    large = drive(loaded(folder, pages=8), [plans[0], *(StepPlan(step, decode=True) for step in range(2, 14))])
    assert [result.error for result in small] == [None] * 13
    assert [result.tokens.tolist() for result in small] == [result.tokens.tolist() for result in large]


def test_the_length_is_the_smaller_of_two(folder: Path) -> None:
    assert loaded(folder, max_model_len=33, pages=1).limits.max_model_len == 33
    assert loaded(folder, max_model_len=9999, pages=1).limits.max_model_len == 256


def test_the_default_pool_holds_every_row(folder: Path) -> None:
    assert loaded(folder).limits.pages == 3 * 256 // 32


def test_failures_name_their_cause(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemoryError, match="one page"):
        loaded(folder, pool_bytes=1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "max_position_embeddings": 64}), "utf-8")
    with pytest.raises(ModelError):
        loaded(tmp_path, load_format="dummy")


def test_random_weights_in_bfloat16(folder: Path) -> None:
    executor = loaded(folder, load_format="dummy", dtype="bfloat16", pages=4)
    results = drive(executor, [StepPlan(1, joins=(join(0, [1]),), prefill=(chunk(0, 0, tokens_for(1, 5)),))])
    assert results[0].error is None
    assert results[0].failed is None
