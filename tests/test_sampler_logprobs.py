"""Reported log-probabilities: values, ranks, ties, and independence from the parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsched.contract import TokenLogprobs
from asyncsched.sampling_params import SamplingParams

from .sampler_helpers import Logits, ints, join, rounded, sampler_with

INF = float("inf")


def expected(x: Logits, token: int, k: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(torch.from_numpy(x).double(), 0).tolist()
    order = [t for t in sorted(range(x.size), key=lambda t: (-x[t], t)) if x[t] > -INF]
    rank = order.index(token) + 1 if token in order else 1 + int((x >= x[token])[:token].sum() + (x > x[token])[token:].sum())
    return TokenLogprobs(logprobs[token], rank, tuple(order[:k]), tuple(logprobs[t] for t in order[:k]))


def agree(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert found.rank == wanted.rank
    assert found.top_ids == wanted.top_ids
    assert found.logprob == pytest.approx(wanted.logprob, abs=2e-6, rel=1e-6)
    assert found.top_logprobs == pytest.approx(wanted.top_logprobs, abs=2e-6, rel=1e-6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    draw=st.integers(0, 2**32),
    vocab=st.sampled_from([1, 5, 50, 64, 200, 3000]),
    k=st.sampled_from([0, 1, 5, 20]),
    scale=st.sampled_from([0.0, 1.0, 10.0]),
    grain=st.sampled_from([0.0, 1.0]),
    dead=st.sampled_from([0.0, 0.9]),
    narrow=st.booleans(),
)
def test_against_log_softmax(draw: int, vocab: int, k: int, scale: float, grain: float, dead: float, narrow: bool) -> None:
    generator = np.random.default_rng(draw)
    x = generator.normal(0, scale, vocab).astype(np.float32)
    x = np.round(x) if grain else x
    x[1:][generator.random(vocab - 1) < dead] = -np.inf
    tensor = torch.from_numpy(x)
    if narrow:
        x, tensor = rounded(x)
    params = SamplingParams(temperature=1.3, logprobs=k)
    sampler = sampler_with(vocab, *(join(r, params, seed=r) for r in range(4)))
    output = sampler.sample(tensor[None].expand(4, -1), ints(range(4)))
    assert output.logprobs is not None
    for row in range(4):
        agree(output.logprobs[row], expected(x, int(output.tokens[row]), k))
    tokens = ints(generator.integers(0, vocab, 4).tolist())
    for found, token in zip(sampler.prompt_logprobs(tensor[None].expand(4, -1), tokens, k), tokens, strict=True):
        agree(found, expected(x, int(token), k))


def test_unmodified_by_parameters() -> None:
    x = np.random.default_rng(0).normal(0, 2, 100).astype(np.float32)
    params = SamplingParams(
        temperature=0.2, top_k=3, logit_bias={7: 50.0}, bad_token_ids=(1, 2), repetition_penalty=2.0, logprobs=5
    )
    sampler = sampler_with(100, join(0, params, prompt=range(50)))
    output = sampler.sample(torch.from_numpy(x)[None], ints([0]))
    assert output.tokens[0] == 7
    assert output.logprobs is not None
    agree(output.logprobs[0], expected(x, 7, 5))


def test_greedy_is_rank_one_and_ties_go_to_the_lower_id() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    sampler = sampler_with(5, join(0, SamplingParams(temperature=0.0, logprobs=4)))
    output = sampler.sample(x, ints([0]))
    assert output.logprobs is not None
    assert output.logprobs[0].rank == 1
    assert output.logprobs[0].top_ids == (1, 2, 4, 3)
    assert [each.rank for each in sampler.prompt_logprobs(x.repeat(5, 1), ints(range(5)), 0)] == [5, 1, 2, 4, 3]


def test_fewer_finite_logits_than_asked_for() -> None:
    x = np.full(3000, -np.inf, np.float32)
    x[[5, 1700, 2999]] = [1.0, 3.0, 2.0]
    sampler = sampler_with(3000, join(0, SamplingParams(logprobs=20)))
    output = sampler.sample(torch.from_numpy(x)[None], ints([0]))
    assert output.logprobs is not None
    agree(output.logprobs[0], expected(x, int(output.tokens[0]), 20))
    assert output.logprobs[0].top_ids == (1700, 2999, 5)


def test_only_rows_that_asked() -> None:
    wants = [None, 0, None, 3]
    sampler = sampler_with(30, *(join(r, SamplingParams(logprobs=k)) for r, k in enumerate(wants)))
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    output = sampler.sample(x, ints([3, 2, 1, 0]))
    assert output.logprobs is not None
    assert {row: len(each.top_ids) for row, each in output.logprobs.items()} == {1: 0, 3: 3}
    assert sampler.sample(x[:1], ints([0])).logprobs is None


def test_tokens_are_the_same_with_and_without() -> None:
    x = torch.randn(10, 500, generator=torch.Generator().manual_seed(1))
    tokens = []
    for k in (None, 20):
        params = SamplingParams(top_p=0.9, logprobs=k)
        sampler = sampler_with(500, *(join(r, params, seed=r) for r in range(10)))
        tokens.append(sampler.sample(x, ints(range(10))).tokens.tolist())
    assert tokens[0] == tokens[1]


def test_values_are_plain_numbers() -> None:
    sampler = sampler_with(9, join(0, SamplingParams(logprobs=2)))
    output = sampler.sample(torch.zeros(1, 9), ints([0]))
    assert output.logprobs is not None
    each = output.logprobs[0]
    kinds = {type(value) for value in (each.logprob, each.rank, each.top_ids[0], each.top_logprobs[0])}
    assert kinds == {float, int}
    assert each.logprob == np.float32(each.logprob)


def test_prompt_logprobs_of_a_position_without_a_distribution() -> None:
    sampler = sampler_with(4, join(0, SamplingParams()))
    x = torch.zeros(4, 4)
    x[1, 2] = math.nan
    x[2] = -INF
    x[3, 0] = -INF
    found = sampler.prompt_logprobs(x, ints([0, 0, 0, 0]), 4)
    assert [math.isnan(each.logprob) for each in found] == [False, True, True, False]
    assert [each.rank for each in found] == [1, 0, 0, 4]
    assert [len(each.top_ids) for each in found] == [4, 0, 0, 3]
    assert found[3].logprob == -INF


def test_which_rows_want_prompt_logprobs() -> None:
    sampler = sampler_with(4, join(0, SamplingParams()), join(1, SamplingParams(prompt_logprobs=0)))
    assert sampler.wants_prompt_logprobs(0) is None
    assert sampler.wants_prompt_logprobs(1) == 0
    sampler.join(join(1, SamplingParams(prompt_logprobs=7)))
    assert sampler.wants_prompt_logprobs(1) == 7


def test_wrong_arguments() -> None:
    sampler = sampler_with(4, join(0, SamplingParams()))
    assert sampler.prompt_logprobs(torch.empty(0, 4), ints([]), 3) == ()
    for tokens in ([4], [-1], [0, 0]):
        with pytest.raises(ValueError, match="token"):
            sampler.prompt_logprobs(torch.zeros(1, 4), ints(tokens), 1)
