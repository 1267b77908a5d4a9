"""Randomness: the right distribution, and tokens that depend on seed, position and logits alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncsched.contract import IntArray
from asyncsched.sampling_params import SamplingParams

from .sampler_helpers import Logits, ints, join, noise, sampler_with


def fits(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> bool:
    """Pearson's chi-square test at about one in 10,000 (Wilson and Hilferty's approximation, 1931)."""
    used = probabilities > 0
    assert not counts[~used].any(), "drew a token that has no probability"
    expected = probabilities[used] * counts.sum()
    assert expected.min() >= 5, "too few draws for the test to mean anything"
    freedom = expected.size - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    return bool(((counts[used] - expected) ** 2 / expected).sum() < limit)


def softmax(x: Logits, temperature: float = 1.0) -> NDArray[np.float64]:
    weights = np.exp((x.astype(np.float64) - float(x.max())) / temperature)
    return np.asarray(weights / weights.sum())


def draw_over_seeds(x: Logits, params: SamplingParams, n: int) -> IntArray:
    sampler = sampler_with(x.size, *(join(r, params, seed=r) for r in range(n)))
    return sampler.sample(torch.from_numpy(x)[None].expand(n, -1), ints(range(n))).tokens


def draw_over_positions(x: Logits, params: SamplingParams, n: int, seed: int = 5) -> IntArray:
    sampler = sampler_with(x.size, join(0, params, seed=seed))
    logits, row = torch.from_numpy(x)[None], ints([0])
    return ints([int(sampler.sample(logits, row).tokens[0]) for _ in range(n)])


@pytest.fixture
def spread() -> Logits:
    return np.linspace(0, -3, 20, dtype=np.float32)[np.random.default_rng(0).permutation(20)]


@pytest.mark.parametrize("temperature", [0.8, 1.0, 3.0])
def test_distribution_over_seeds(spread: Logits, temperature: float) -> None:
    tokens = draw_over_seeds(spread, SamplingParams(temperature=temperature), 4000)
    assert fits(np.bincount(tokens, minlength=20), softmax(spread, temperature))


def test_distribution_over_positions(spread: Logits) -> None:
    tokens = draw_over_positions(spread, SamplingParams(), 4000)
    assert fits(np.bincount(tokens, minlength=20), softmax(spread))


def test_the_test_of_the_distribution_can_fail(spread: Logits) -> None:
    tokens = draw_over_seeds(spread, SamplingParams(temperature=1.0), 4000)
    assert not fits(np.bincount(tokens, minlength=20), softmax(spread, 1.2))


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    x = np.zeros(4, np.float32)
    uniform = np.full(16, 1 / 16)
    tokens = draw_over_positions(x, SamplingParams(), 4001)
    assert fits(np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16), uniform)
    tokens = draw_over_seeds(x, SamplingParams(), 4001)
    assert fits(np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16), uniform)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=4), 4),
        (SamplingParams(top_p=0.5), None),
        (SamplingParams(min_p=0.3), None),
        (SamplingParams(top_k=8, top_p=0.6), None),
    ],
    ids=["top_k", "top_p", "min_p", "top_k + top_p"],
)
def test_distribution_over_what_is_kept(spread: Logits, params: SamplingParams, kept: int | None) -> None:
    p = softmax(spread)
    order = np.argsort(-p)
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        p[order[int(np.argmax(np.cumsum(p[order]) >= params.top_p)) + 1 :]] = 0
    if params.min_p:
        p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    assert kept in (None, np.count_nonzero(p))
    assert 1 < np.count_nonzero(p) < 20
    assert fits(np.bincount(draw_over_seeds(spread, params, 4000), minlength=20), p)


def test_uniform_over_a_large_vocabulary() -> None:
    tokens = draw_over_seeds(np.zeros(8192, np.float32), SamplingParams(), 3000)
    assert fits(np.bincount(tokens // 256, minlength=32), np.full(32, 1 / 32))
    assert fits(np.bincount(tokens % 32, minlength=32), np.full(32, 1 / 32))


def test_noise_is_standard_gumbel() -> None:
    """The reference's noise, which the sampler equals draw by draw, has Gumbel's mean and variance."""
    values = np.array([noise(3, position, token) for position in range(50) for token in range(400)])
    assert abs(values.mean() - 0.5772) < 4 * math.sqrt(math.pi**2 / 6 / values.size)
    assert abs(values.var() - math.pi**2 / 6) < 0.08


# -- a token depends on seed, position and its own logits --------------------------------------

MIX = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(frequency_penalty=0.5, logprobs=3),
    SamplingParams(temperature=0.0, min_tokens=2),
]


def run_alone(x: Logits, params: SamplingParams, seed: int) -> list[int]:
    """All steps of one request that has a sampler for itself."""
    sampler = sampler_with(x.shape[1], join(0, params, seed=seed, prompt=[1, 2], stop_ids=(3,)))
    return [int(sampler.sample(torch.from_numpy(step)[None], ints([0])).tokens[0]) for step in x]


def test_independent_of_batch_row_and_order() -> None:
    generator = np.random.default_rng(1)
    requests, steps, vocab = 21, 6, 300
    x = generator.normal(0, 2, (requests, steps, vocab)).astype(np.float32)
    alone = [run_alone(x[r], MIX[r % len(MIX)], seed=r) for r in range(requests)]
    places = generator.permutation(requests)
    sampler = sampler_with(
        vocab,
        *(join(int(places[r]), MIX[r % len(MIX)], seed=r, prompt=[1, 2], stop_ids=(3,)) for r in range(requests)),
    )
    together: list[list[int]] = [[] for _ in range(requests)]
    while any(len(tokens) < steps for tokens in together):
        waiting = [r for r in range(requests) if len(together[r]) < steps]
        batch = generator.permutation(waiting)[: int(generator.integers(1, len(waiting) + 1))]
        logits = torch.from_numpy(np.stack([x[r, len(together[r])] for r in batch]))
        for r, token in zip(batch, sampler.sample(logits, ints(places[batch])).tokens, strict=True):
            together[r].append(int(token))
    assert together == alone


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("restored_threads")
def test_independent_of_threads() -> None:
    generator = np.random.default_rng(2)
    rows, vocab = 28, 20_000
    logits = torch.from_numpy(generator.normal(0, 3, (rows, vocab)).astype(np.float32))
    outputs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sampler = sampler_with(vocab, *(join(r, MIX[r % len(MIX)], seed=r, prompt=[1, 2]) for r in range(rows)))
        outputs.append([sampler.sample(logits, ints(range(rows))) for _ in range(2)])
    for other in outputs[1:]:
        for a, b in zip(outputs[0], other, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.logprobs == b.logprobs


@pytest.mark.parametrize("params", MIX, ids=str)
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_resuming_equals_going_on(params: SamplingParams, cut: int) -> None:
    x = np.random.default_rng(cut).normal(0, 2, (8, 120)).astype(np.float32)
    tokens = run_alone(x, params, seed=77)
    resumed = sampler_with(120, join(0, params, seed=77, prompt=[1, 2], output=tokens[:cut], stop_ids=(3,)))
    rest = [int(resumed.sample(torch.from_numpy(step)[None], ints([0])).tokens[0]) for step in x[cut:]]
    assert rest == tokens[cut:]


def test_seeds_and_positions_differ() -> None:
    x = np.zeros(1000, np.float32)
    assert len(set(draw_over_seeds(x, SamplingParams(), 50).tolist())) > 40
    first, second = draw_over_positions(x, SamplingParams(), 30, seed=0), draw_over_positions(x, SamplingParams(), 30, seed=1)
    assert len(set(first.tolist())) > 20
    assert not np.array_equal(first[1:], second[:-1])  # seed + position alone would repeat


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1])
def test_extreme_seeds(seed: int) -> None:
    x = np.zeros(100, np.float32)
    tokens = draw_over_positions(x, SamplingParams(), 5, seed=seed)
    expected = [max(range(100), key=lambda t: noise(seed, position, t)) for position in range(5)]
    assert tokens.tolist() == expected
