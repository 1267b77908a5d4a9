"""The sampler against the slow reference: every parameter alone and in combination."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncsched.gpu.kernels.logits import fill_peaks, logit_of, prefix_cut
from asyncsched.sampling_params import SamplingParams

from .sampler_helpers import Logits, adjusted, choices, ints, join, rounded, sampler_with

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"temperature": 1e-6},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 40, "temperature": 2.0},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 0.8},
    {"top_p": 1e-6},
    {"top_p": 0.9999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    {"logit_bias": {0: 5.0, 3: -5.0, 7: 1e30, 8: -1e300}},
    {"bad_token_ids": (0, 1, 2, 3), "temperature": 2.0},
    {"allowed_token_ids": (9, 4, 4, 30), "logit_bias": {4: 2.0}},
    {"repetition_penalty": 1.7, "temperature": 0.0},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"frequency_penalty": 2.0, "repetition_penalty": 1.2, "top_p": 0.7, "min_tokens": 9},
    {"min_tokens": 30, "temperature": 0.0},
]


def draws_match(x: Logits, tensor: torch.Tensor, params: SamplingParams, *, rows: int, **state: Any) -> None:
    """Compare ``rows`` draws from the same logits, each with its own seed."""
    changed = adjusted(x, params, **state)
    position = len(state.get("output", ()))
    sampler = sampler_with(x.size, *(join(r, params, seed=1000 + r, **state) for r in range(rows)))
    output = sampler.sample(tensor[None].expand(rows, -1), ints(range(rows)))
    assert output.failed is None
    for row in range(rows):
        assert output.tokens[row] in choices(changed, params, 1000 + row, position)


@pytest.mark.parametrize("options", PARAMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_parameter(options: dict[str, Any], dtype: torch.dtype) -> None:
    generator = np.random.default_rng(7)
    x = generator.normal(0, 2, 50).astype(np.float32)
    tensor = torch.from_numpy(x)
    if dtype == torch.bfloat16:
        x, tensor = rounded(x)
    state = {"prompt": [1, 2, 3, 3, 20], "output": [5, 5, 20, 11], "stop_ids": (int(np.argmax(x)), 6)}
    draws_match(x, tensor, SamplingParams(**options), rows=40, **state)


TOKENS = st.integers(0, 49)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.5]),
        "top_k": st.sampled_from([1, 2, 5, 30, 50, 1000]),
        "top_p": st.sampled_from([0.05, 0.31, 0.777, 0.95, 0.999]),
        "min_p": st.sampled_from([0.001, 0.07, 0.5, 1.0]),
        "min_tokens": st.sampled_from([3, 8]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.4, 1.3]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-50.0, -1.5, 0.25, 4.0, 1e5]), max_size=4),
        "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=20).map(tuple),
        "bad_token_ids": st.lists(TOKENS, max_size=5).map(tuple),
    },
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    options=OPTIONS,
    draw=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.2, 1.0, 3.0, 20.0]),
    grain=st.sampled_from([0.0, 0.25, 1.0]),
    dead=st.sampled_from([0.0, 0.3]),
    prompt=st.lists(TOKENS, max_size=6),
    output=st.lists(TOKENS, max_size=6),
    stop_ids=st.lists(TOKENS, max_size=3).map(tuple),
    vocab=st.sampled_from([50, 64, 65, 130]),
    narrow=st.booleans(),
)
def test_combinations(
    options: dict[str, Any],
    draw: int,
    scale: float,
    grain: float,
    dead: float,
    prompt: list[int],
    output: list[int],
    stop_ids: tuple[int, ...],
    vocab: int,
    narrow: bool,
) -> None:
    generator = np.random.default_rng(draw)
    x = generator.normal(0, scale, vocab).astype(np.float32)
    if grain:
        x = np.round(x / grain).astype(np.float32) * np.float32(grain)  # many equal logits
    x[generator.random(vocab) < dead] = -np.inf
    tensor = torch.from_numpy(x)
    if narrow:
        x, tensor = rounded(x)
    params = SamplingParams(**options)
    state: dict[str, Any] = {"prompt": prompt, "output": output, "stop_ids": stop_ids}
    assume((adjusted(x, params, **state) > -np.inf).any())
    draws_match(x, tensor, params, rows=12, **state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 50, "top_p": 0.9, "temperature": 0.8},
        {"top_k": 700},
        {"top_k": 3000, "top_p": 0.95, "temperature": 1.7},
        {"top_p": 0.3, "temperature": 8.0},
        {"top_p": 0.97},
        {"min_p": 0.001},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", ["normal", "zipf", "flat", "coarse"])
def test_large_vocabulary(options: dict[str, Any], shape: str) -> None:
    """Block skipping, bisection and quickselect are exact where they are at work."""
    generator = np.random.default_rng(3)
    vocab = 20_011
    shapes = {
        "normal": generator.normal(0, 2.5, vocab),
        "zipf": -1.5 * np.log(generator.permutation(vocab) + 1.0) + 20,
        "flat": np.zeros(vocab),
        "coarse": np.round(generator.normal(0, 1.5, vocab)),
    }
    x = shapes[shape].astype(np.float32)
    params = SamplingParams(**options)
    rows = 6
    sampler = sampler_with(vocab, *(join(r, params, seed=r) for r in range(rows)))
    tokens = sampler.sample(torch.from_numpy(x)[None].repeat(rows, 1), ints(range(rows))).tokens
    for row in range(rows):
        assert tokens[row] in choices(x, params, row, 0)


def test_many_steps_with_growing_counts() -> None:
    """Counts stay right while rows come and go and their lists outgrow their place."""
    vocab, rows = 200, 5
    generator = np.random.default_rng(11)
    options = [
        SamplingParams(temperature=1.5, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0),
        SamplingParams(temperature=2.0, logit_bias={3: 4.0, 9: -2.0}, bad_token_ids=(5,)),
        SamplingParams(temperature=3.0, presence_penalty=-0.5, allowed_token_ids=tuple(range(0, 200, 2))),
    ]
    owners: dict[int, tuple[SamplingParams, int, list[int], list[int]]] = {}
    sampler = sampler_with(vocab, *(join(r, SamplingParams()) for r in range(rows)))
    for step in range(400):
        row = int(generator.integers(rows))
        if step < rows or (step % 37 == 0 and row in owners):
            row = step if step < rows else row
            sampler.leave(row)
            params = options[int(generator.integers(len(options)))]
            prompt = generator.integers(0, vocab, 30).tolist()
            owners[row] = (params, step, prompt, [])
            sampler.join(join(row, params, seed=step, prompt=prompt))
        active = sorted(owners)
        x = generator.normal(0, 1.0, (len(active), vocab)).astype(np.float32)
        tokens = sampler.sample(torch.from_numpy(x), ints(active)).tokens
        for i, each in enumerate(active):
            params, seed, prompt, output = owners[each]
            if step % 7 == 0:  # the reference is slow
                changed = adjusted(x[i], params, prompt=prompt, output=output)
                assert tokens[i] in choices(changed, params, seed, len(output)), (step, each)
            output.append(int(tokens[i]))


def test_top_p_next_to_one_does_not_undo_top_k() -> None:
    params = SamplingParams(top_k=10, top_p=1.0 - 2.0**-53)
    sampler = sampler_with(100, *(join(r, params, seed=r) for r in range(200)))
    tokens = sampler.sample(torch.zeros(200, 100), ints(range(200))).tokens
    assert set(tokens.tolist()) == set(range(10))


def test_few_finite_logits_among_many_with_top_k() -> None:
    x = np.full(20_000, -np.inf, np.float32)
    x[[100, 9000, 19_999]] = [0.0, 0.1, 0.2]
    for options in ({"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"top_k": 2}, {"top_k": 5000}, {"top_p": 0.5}):
        params = SamplingParams(**options)
        sampler = sampler_with(x.size, *(join(r, params, seed=r) for r in range(30)))
        tokens = sampler.sample(torch.from_numpy(x)[None].expand(30, -1), ints(range(30))).tokens
        for row in range(30):
            assert tokens[row] in choices(x, params, row, 0)


@numba.njit
def lowest_kept(x: Any, peaks: Any, keys: Any, weights: Any, target: Any) -> Any:
    cut = prefix_cut(x, peaks, fill_peaks(x, peaks), np.float32(-1.0), weights, target, keys)
    return logit_of(cut)


def test_a_target_that_rounding_puts_out_of_reach_keeps_everything() -> None:
    x = np.random.default_rng(0).uniform(5, 6, 64 * 40).astype(np.float32)
    peaks, keys = np.empty(40, np.float32), np.empty(x.size, np.int64)
    assert lowest_kept(x, peaks, keys, np.ones(x.size, np.float32), x.size + 1e-3) <= x.min()
    assert lowest_kept(x, peaks, keys, np.ones(x.size, np.float32), 100.0) == np.sort(x)[-100]
