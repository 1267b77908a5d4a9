"""The CPU executor as the control plane sees it: plans in, results out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from threading import Event, Thread

import pytest
import torch
from torch import Tensor

from asyncsched.contract import Executor, ExecutorLimits, StepPlan
from asyncsched.errors import EngineClosedError
from asyncsched.gpu.cpu_executor import CpuExecutor
from asyncsched.gpu.kernels.layout import StepLayout
from asyncsched.gpu.models.base import KVPool
from asyncsched.gpu.models.decoder import Decoder
from asyncsched.gpu.models.decoder_config import DecoderConfig
from asyncsched.gpu.sampler import warm_up_sampling
from asyncsched.sampling_params import SamplingParams

from .models_helpers import (
    TINY,
    ModuleWeights,
    ScriptedSampler,
    chunk,
    drive,
    join,
    limits_for,
    reference,
    tiny_transformer,
    tokens_for,
)

MODULE = tiny_transformer("llama", **TINY)
POISON = 3
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


class FailingDecoder(Decoder):
    """Raises in the steps it is told to."""

    fail_at: tuple[int, ...] = ()
    calls = 0

    def forward(self, tokens: Tensor, layout: StepLayout, pools: Sequence[KVPool], wanted: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.fail_at:
            raise ArithmeticError(f"forward {self.calls}")
        return super().forward(tokens, layout, pools, wanted)


def decoder(poison: bool = False) -> FailingDecoder:
    weights = ModuleWeights(MODULE)
    if poison:
        weights._tensors["model.embed_tokens.weight"] = weights._tensors["model.embed_tokens.weight"].clone()
        weights._tensors["model.embed_tokens.weight"][POISON] = float("nan")
    return FailingDecoder(DecoderConfig.from_hf(weights.config), weights)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What the model says, by transformers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference(MODULE, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_it_is_an_executor() -> None:
    model = decoder()
    executor = CpuExecutor(model, ScriptedSampler(), limits_for(model))
    assert isinstance(executor, Executor)
    assert executor.limits == ExecutorLimits(4, 64, 16, 256, 97)


def test_tokens_are_relayed_on_the_device() -> None:
    model = decoder()
    prompt = [t for t in tokens_for(1, 20) if t != POISON]
    plans = [StepPlan(1, joins=(join(0, [4, 5]),), prefill=(chunk(0, 0, prompt),))]
    plans += [StepPlan(step, decode=True) for step in range(2, 8)]
    before = time.monotonic()
    results = drive(CpuExecutor(model, ScriptedSampler(), limits_for(model)), plans)
    assert [int(result.tokens[0]) for result in results] == greedy(prompt, 7)
    stamps = [stamp for result in results for stamp in (result.launched_at, result.completed_at)]
    assert stamps == sorted(stamps)
    assert before <= stamps[0]
    assert stamps[-1] <= time.monotonic()


def test_a_preempted_row_resumes_elsewhere_with_the_same_tokens() -> None:
    model = decoder()
    prompt = [t for t in tokens_for(2, 10) if t != POISON]
    wanted = greedy(prompt, 5)
    plans = [
        StepPlan(1, joins=(join(0, [4]),), prefill=(chunk(0, 0, prompt),)),
        StepPlan(2, decode=True),
        StepPlan(3, leaves=(0,)),
        StepPlan(4, joins=(join(2, [9]),), prefill=(chunk(2, 0, prompt + wanted[:2]),)),
        StepPlan(5, decode=True),
        StepPlan(6, decode=True),
    ]
    results = drive(CpuExecutor(model, ScriptedSampler(), limits_for(model)), plans)
    assert [token for result in results for token in result.tokens.tolist()] == wanted
    assert results[2].rows.size == 0
    assert results[3].rows.tolist() == [2]


def test_nan_fails_its_own_row_and_not_the_next_owner_of_its_pages() -> None:
    model = decoder(poison=True)
    healthy = [t for t in tokens_for(3, 12) if t != POISON]
    sick = [*healthy[:5], POISON, *healthy[5:8]]
    plans = [
        StepPlan(1, joins=(join(0, [1]), join(1, [2])), prefill=(chunk(0, 0, sick), chunk(1, 0, healthy))),
        StepPlan(2, decode=True),
        # Another request takes the pages that are full of NaN.
        StepPlan(3, leaves=(0,), joins=(join(2, [1]),), prefill=(chunk(2, 0, healthy[:4]),), decode=True),
        StepPlan(4, decode=True),
        StepPlan(5, decode=True),
    ]
    results = drive(CpuExecutor(model, ScriptedSampler(), limits_for(model)), plans)
    assert [result.error for result in results] == [None] * 5
    assert [set(result.failed or ()) for result in results] == [{0}, {0}, set(), set(), set()]
    by_row: dict[int, list[int]] = {1: [], 2: []}
    for result in results:
        for row, token in zip(result.rows.tolist(), result.tokens.tolist(), strict=True):
            if row in by_row:
                by_row[row].append(token)
    assert by_row == {1: greedy(healthy, 5), 2: greedy(healthy[:4], 3)}


def test_a_step_that_raises_has_applied_its_deltas() -> None:
    model = decoder()
    model.fail_at = (2,)
    sampler = ScriptedSampler()
    prompts = {row: [t for t in tokens_for(row, 6 + row) if t != POISON] for row in (0, 1, 2)}
    plans = [
        StepPlan(1, joins=(join(0, [1]), join(1, [2])), prefill=(chunk(0, 0, prompts[0]), chunk(1, 0, prompts[1]))),
        # Raises. Row 0 has left all the same, and rows 1 and 2 have advanced: the next step, which was
        # planned before anybody knew, names them both.
        StepPlan(2, leaves=(0,), joins=(join(2, [3]),), prefill=(chunk(2, 0, prompts[2]),), decode=True),
        StepPlan(3, decode=True),
        StepPlan(4, leaves=(1, 2), joins=(join(0, [1]),), prefill=(chunk(0, 0, prompts[2]),)),
        StepPlan(5, decode=True),
    ]
    results = drive(CpuExecutor(model, sampler, limits_for(model)), plans)
    assert isinstance(results[1].error, ArithmeticError)
    assert not results[1].fatal
    assert [result.rows.tolist() for result in results] == [[0, 1], [], [1, 2], [0], [0]]
    assert sampler.events == [
        ("join", 0), ("join", 1), ("leave", 0), ("join", 2), ("leave", 1), ("leave", 2), ("join", 0),
    ]  # fmt: skip
    assert [int(results[3].tokens[0]), int(results[4].tokens[0])] == greedy(prompts[2], 2)


def test_a_bad_plan_fails_its_step_only() -> None:
    model = decoder()
    prompt = tokens_for(4, 5)
    plans = [
        StepPlan(1, joins=(join(0, [99]),), prefill=(chunk(0, 0, prompt),)),
        StepPlan(2, joins=(join(1, [1]),), prefill=(chunk(1, 0, prompt),)),
        StepPlan(3, joins=(join(2, [2]),), prefill=(chunk(2, 0, [model.vocab_size]),), decode=True),
        StepPlan(4, leaves=(1, 2), joins=(join(0, [1]),), prefill=(chunk(0, 0, prompt),)),
        StepPlan(5, decode=True),
    ]
    results = drive(CpuExecutor(model, ScriptedSampler(), limits_for(model)), plans)
    assert [type(result.error) for result in results] == [ValueError, type(None), IndexError, type(None), type(None)]
    assert [int(results[3].tokens[0]), int(results[4].tokens[0])] == greedy(prompt, 2)


def test_prompt_logprobs_across_chunks() -> None:
    model = decoder()
    sampler = ScriptedSampler()
    prompt, other = tokens_for(5, 150), tokens_for(6, 4)
    plans = [
        StepPlan(1, joins=(join(1, [20]),), prefill=(chunk(1, 0, other),)),
        StepPlan(2, joins=(join(0, range(10), params=SCORED),), prefill=(chunk(0, 0, prompt[:1], sample=False),), decode=True),
        StepPlan(3, prefill=(chunk(0, 1, prompt[1:140], sample=False),), decode=True),
        StepPlan(4, prefill=(chunk(0, 140, prompt[140:]),), decode=True),
        StepPlan(5, decode=True),
    ]
    results = drive(CpuExecutor(model, sampler, limits_for(model)), plans)
    assert [result.error for result in results] == [None] * 5
    assert [set(result.prompt_logprobs or ()) for result in results] == [set(), {0}, {0}, {0}, set()]
    scores = [score for result in results[1:4] for score in (result.prompt_logprobs or {})[0]]
    truth = torch.log_softmax(reference(MODULE, prompt), -1)
    assert scores[0] is None
    for position, score in enumerate(scores[1:], 1):
        assert score is not None
        assert score.logprob == pytest.approx(float(truth[position - 1, prompt[position]]), abs=1e-3)
    assert max(len(logits) for logits, _, _ in sampler.scored) <= 128
    assert [int(results[3].tokens[1]), int(results[4].tokens[0])] == greedy(prompt, 2)
    assert [int(result.tokens[0]) for result in results[:4]] == greedy(other, 4)


def test_a_row_taken_over_does_not_inherit_scores() -> None:
    model = decoder()
    plans = [
        StepPlan(1, joins=(join(0, [0], params=SCORED),), prefill=(chunk(0, 0, [5, 6], sample=False),)),
        StepPlan(2, leaves=(0,), joins=(join(0, [1, 2], params=SCORED, cached=16),), prefill=(chunk(0, 16, [7, 8]),)),
    ]
    results = drive(CpuExecutor(model, ScriptedSampler(), limits_for(model)), plans)
    scores = (results[1].prompt_logprobs or {})[0]
    assert scores[0] is None
    assert scores[1] is not None


def test_warm_up_leaves_nothing_behind() -> None:
    model = decoder()
    sampler = ScriptedSampler()
    executor = CpuExecutor(model, sampler, limits_for(model, pages=1, page_size=1))
    executor.warm_up()
    assert sampler.events == [("join", 0), ("leave", 0)]
    executor = CpuExecutor(model, ScriptedSampler(), limits_for(model))
    executor.warm_up()
    prompt = tokens_for(7, 6)
    results = drive(executor, [StepPlan(1, joins=(join(0, [0]),), prefill=(chunk(0, 0, prompt),), decode=True)])
    assert results[0].rows.tolist() == [0]
    assert results[0].tokens.tolist() == greedy(prompt, 1)


def test_what_runs_meanwhile_is_joined_on_close() -> None:
    model = decoder()
    begun, go, done = Event(), Event(), []

    def meanwhile() -> None:
        begun.set()
        go.wait()
        done.append(True)

    executor = CpuExecutor(model, ScriptedSampler(), limits_for(model), meanwhile=meanwhile)
    executor.start(lambda result: None)
    begun.wait()
    closing = Thread(target=executor.close)
    closing.start()
    assert not done
    go.set()
    closing.join()
    assert done == [True]


def test_warming_up_the_sampler_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    warm_up_sampling(100, torch.float32)
    warm_up_sampling(100, torch.bfloat16)
    assert set(threading.enumerate()) <= before, "threads of other tests may have ended meanwhile"


def test_life_cycle() -> None:
    model = decoder()
    executor = CpuExecutor(model, ScriptedSampler(), limits_for(model))
    with pytest.raises(EngineClosedError):
        executor.submit(StepPlan(1))
    assert [result.step for result in drive(executor, [StepPlan(1)])] == [1]
    executor.close()
    with pytest.raises(EngineClosedError):
        executor.submit(StepPlan(2))
    with pytest.raises(EngineClosedError):
        executor.start(lambda result: None)
    never_started = CpuExecutor(model, ScriptedSampler(), limits_for(model))
    never_started.close()
    never_started.close()
