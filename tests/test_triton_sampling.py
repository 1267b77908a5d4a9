"""The GPU's sampler against the CPU's, which draws the same tokens, and against sorting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from asyncsched.errors import UnsupportedModelError
from asyncsched.gpu.cuda.kernels import order
from asyncsched.gpu.cuda.kernels import reference_sampling as reference
from asyncsched.gpu.cuda.kernels.logprobs import token_logprobs
from asyncsched.gpu.cuda.kernels.noise import noise_bits, noise_bound, noise_of, noise_stream
from asyncsched.gpu.cuda.kernels.sampling import Sampled, SamplingWorkspace, sample
from asyncsched.gpu.kernels import logits as cpu
from asyncsched.gpu.sampler import Sampler
from asyncsched.gpu.sampling_failures import FAILURES
from asyncsched.sampling_params import SamplingParams

from .sampler_helpers import join
from .test_sampler_reference import PARAMS
from .triton_helpers import DEVICE
from .triton_sampling import Pair

# Overflow to infinity and the like are silent on a device; NumPy, which interprets, warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

GREEDY = SamplingParams(temperature=0.0)
INF, NAN = float("inf"), float("nan")
HISTORY: dict[str, Any] = {"prompt": [1, 2, 3, 3, 20], "output": [5, 5, 20, 11]}


def normal(*shape: int, seed: int = 7, scale: float = 2.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32))


@pytest.mark.parametrize("options", PARAMS, ids=str)
def test_one_parameter(options: dict[str, Any]) -> None:
    x, params = normal(50), SamplingParams(**options)
    history = HISTORY | {"stop_ids": (int(x.argmax()), 6)}
    pair = Pair(50, *(join(r, params, seed=1000 + r, **history) for r in range(3)))
    tokens = pair.same(x.repeat(3, 1), [0, 1, 2])
    changed = reference.adjusted(x, params, **history)
    assert tokens == [reference.choose(changed, params, 1000 + r, 4) for r in range(3)]


def combination(generator: np.random.Generator) -> dict[str, Any]:
    """About half of all parameters, each at random."""
    ids = [tuple(generator.integers(0, 50, n).tolist()) for n in (4, 20, 5)]
    every: dict[str, Any] = {
        "temperature": float(generator.choice([0.0, 0.05, 0.7, 2.5])),
        "top_k": int(generator.choice([1, 2, 5, 30, 50, 1000])),
        "top_p": float(generator.choice([0.05, 0.31, 0.777, 0.95, 0.999])),
        "min_p": float(generator.choice([0.001, 0.07, 0.5, 1.0])),
        "min_tokens": int(generator.choice([3, 8])),
        "presence_penalty": float(generator.choice([-1.0, 0.7])),
        "frequency_penalty": float(generator.choice([-0.4, 1.3])),
        "repetition_penalty": float(generator.choice([0.8, 1.3])),
        "logit_bias": dict(zip(ids[0], generator.choice([-50.0, -1.5, 0.25, 4.0, 1e5], 4).tolist(), strict=True)),
        "allowed_token_ids": ids[1],
        "bad_token_ids": ids[2],
    }
    return {name: value for name, value in every.items() if generator.random() < 0.5}


@pytest.mark.parametrize("seed", range(36))
def test_combinations(seed: int) -> None:
    generator = np.random.default_rng(seed)
    options = combination(generator)
    vocab = int(generator.choice([50, 64, 65, 130]))
    x = normal(vocab, seed=seed, scale=float(generator.choice([0.2, 1.0, 3.0, 20.0])))
    grain = float(generator.choice([0.0, 0.0, 0.25, 1.0]))
    if grain:
        x = torch.round(x / grain) * grain  # many equal logits
    x[torch.from_numpy(generator.random(vocab) < generator.choice([0.0, 0.3]))] = -INF
    logits = x.bfloat16() if seed % 3 == 0 else x
    prompt, output, stops = ([int(t) for t in generator.integers(0, 50, n)] for n in (6, 6, 3))
    history: dict[str, Any] = {"prompt": prompt, "output": output, "stop_ids": tuple(stops)}
    params = SamplingParams(**options)
    pair = Pair(vocab, *(join(r, params, seed=r, **history) for r in range(2)))
    pair.same(logits.repeat(2, 1), [0, 1])
    changed = reference.adjusted(logits, params, **history)
    cut = params.temperature > 0.0 and params.top_k != 1 and (0 < params.top_k < vocab or params.top_p < 1.0)
    if cut and changed.max() > -INF:
        without = SamplingParams(**{name: value for name, value in options.items() if name != "min_p"})
        assert pair.kept(changed, 0) >= set(reference.kept(changed, without).tolist())
        finite = set(torch.nonzero(changed > -INF).flatten().tolist())
        assert pair.kept(changed, 0) & finite == set(reference.kept(changed, without).tolist())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("normal", {}),
        ("flat", {}),
        ("normal", {"top_k": 50, "top_p": 0.9, "temperature": 0.8}),
        ("zipf", {"top_k": 50, "top_p": 0.9, "temperature": 0.8}),
        ("dead", {"top_k": 50, "top_p": 0.9, "temperature": 0.8}),
        ("coarse", {"top_k": 3000, "top_p": 0.95, "temperature": 1.7}),
        ("flat", {"top_k": 3000, "top_p": 0.3}),
        ("dead", {"top_k": 3000}),
        ("normal", {"top_p": 0.3, "temperature": 8.0}),
        ("coarse", {"top_p": 0.97}),
        ("flat", {"top_p": 0.5}),
        ("zipf", {"min_p": 0.001, "frequency_penalty": 1.0}),
        ("coarse", {"temperature": 0.0, "presence_penalty": 1.0}),
    ],
    ids=str,
)
def test_large_vocabulary(shape: str, options: dict[str, Any]) -> None:
    """Rows of several parts, searches of several passes, and bands that are gathered."""
    generator = np.random.default_rng(3)
    vocab = 10_007
    dead = np.full(vocab, -np.inf)
    dead[[100, 9000, 9999]] = [0.0, 0.1, 0.2]
    shapes = {
        "normal": generator.normal(0, 2.5, vocab),
        "zipf": -1.5 * np.log(generator.permutation(vocab) + 1.0) + 20,
        "flat": np.zeros(vocab),
        "coarse": np.round(generator.normal(0, 1.5, vocab)),
        "dead": dead,
    }
    x, params = torch.from_numpy(shapes[shape].astype(np.float32)), SamplingParams(**options)
    pair = Pair(vocab, *(join(r, params, seed=r, prompt=[5], output=[9000, 9000]) for r in range(2)))
    pair.same(x[None], [1])
    if params.top_k or params.top_p < 1.0:
        finite = set(torch.nonzero(x > -INF).flatten().tolist())
        assert pair.kept(x, 0) & finite == set(reference.kept(x, params).tolist())


def test_top_p_next_to_one_does_not_undo_top_k() -> None:
    params = SamplingParams(top_k=10, top_p=1.0 - 2.0**-53)
    pair = Pair(100, *(join(r, params, seed=r) for r in range(2)))
    pair.draw(torch.zeros(2, 100), [0, 1])
    assert pair.kept(torch.zeros(100), 0) == set(range(10))


# -- greedy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 65, 10_000])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.0, bad_token_ids=(5,))], ids=["plain", "masked"])
def test_greedy_takes_the_first_of_equal_logits(dtype: torch.dtype, vocab: int, params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-6, 4, (4, vocab), generator=generator).to(dtype)
    expected = logits.float()
    if params.bad_token_ids and vocab > 5:
        expected[:, 5] = -INF
    pair = Pair(vocab, *(join(r, params) for r in range(4)))
    tokens = pair.draw(logits, [0, 1, 2, 3], greedy=params is GREEDY).tokens
    assert tokens.tolist() == np.argmax(expected.numpy(), axis=1).tolist()


def test_both_zeros_are_equal() -> None:
    pair = Pair(4, join(0, GREEDY), join(1, GREEDY))
    assert pair.same(torch.tensor([[-1.0, -0.0, 0.0, -2.0], [-1.0, 0.0, -0.0, -2.0]]), [0, 1]) == [1, 1]


# -- failures ----------------------------------------------------------------------------------


def test_statuses_are_the_cpus() -> None:
    for name in ("OK", "HAS_NAN", "HAS_INFINITY", "NOTHING_FINITE", "ALL_MASKED"):
        assert getattr(order, name) == getattr(cpu, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9, bad_token_ids=(3,))], ids=["plain", "drawn"])
@pytest.mark.parametrize(("value", "reason"), [(NAN, "NaN"), (-NAN, "NaN"), (INF, "+inf")])
def test_a_bad_row_fails_alone(dtype: torch.dtype, params: SamplingParams, value: float, reason: str) -> None:
    logits = normal(3, 200).to(dtype)
    logits[1, 199] = value
    pair = Pair(200, *(join(r, params, seed=r) for r in range(3)))
    pair.same(logits, [0, 1, 2])
    out = pair.draw(logits, [0, 1, 2], decoding=2)
    assert reason in FAILURES[int(out.status[1])]
    assert [pair.record(row)["position"][0] for row in range(3)] == [2, 0, 2]
    assert pair.state.length.tolist()[:3] == [1, 1, 0]
    assert pair.state.last_token.tolist()[:3] == out.tokens.tolist()


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(),
        SamplingParams(allowed_token_ids=(1, 2), bad_token_ids=(2, 1)),
        SamplingParams(temperature=0.0, bad_token_ids=tuple(range(10))),
        SamplingParams(allowed_token_ids=(3,), min_tokens=1, top_k=2),
        SamplingParams(allowed_token_ids=(99,)),
        SamplingParams(temperature=0.0, allowed_token_ids=(99,)),
    ],
    ids=str,
)
def test_nothing_to_sample(params: SamplingParams) -> None:
    logits = torch.full((2, 10), -INF)
    logits[1] = torch.arange(10)
    pair = Pair(10, *(join(r, params, stop_ids=(3,)) for r in range(2)))
    pair.same(logits, [0, 1])
    assert pair.draw(logits, [0, 1]).status[0] == order.NOTHING_FINITE


# -- rows and steps ----------------------------------------------------------------------------


def test_padding_rows_are_left_alone() -> None:
    pair = Pair(30, join(0, SamplingParams(top_k=4)), join(3, GREEDY))
    before = pair.state._words.clone()
    out = pair.draw(normal(3, 30), [-1, -1, -1], decoding=3)
    assert out.tokens.tolist() == out.status.tolist() == [99, 99, 99]
    assert torch.equal(pair.state._words, before)
    out = pair.draw(normal(3, 30), [3, -1, 0], decoding=2)
    assert out.status.tolist() == [0, 99, 0]
    assert pair.state.length.tolist()[:4] == [0, 0, 0, 1]


def test_many_steps_with_growing_counts() -> None:
    """Positions and counts stay right while rows come and go."""
    vocab = 60
    generator = np.random.default_rng(11)
    options = [
        SamplingParams(temperature=1.5, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0),
        SamplingParams(temperature=2.0, logit_bias={3: 4.0, 9: -2.0}, bad_token_ids=(5,), min_tokens=4),
        SamplingParams(temperature=3.0, presence_penalty=-0.5, allowed_token_ids=tuple(range(0, 60, 2))),
        GREEDY,
    ]

    def newcomer(row: int, number: int) -> Any:
        prompt = generator.integers(0, vocab, 12).tolist()
        return join(row, options[number % len(options)], seed=number, prompt=prompt, stop_ids=(1, 2, 3))

    pair = Pair(vocab, *(newcomer(row, row) for row in range(5)))
    for step in range(14):
        if step % 3 == 2:
            pair.join(newcomer(int(generator.integers(5)), 5 + step))
        pair.same(normal(5, vocab, seed=step, scale=1.0), [0, 1, 2, 3, 4], decoding=5)
    assert pair.state.length.max() >= 8


def test_logits_are_left_alone_and_may_be_part_of_a_wider_buffer() -> None:
    buffer = normal(2, 128).to(DEVICE)
    before = buffer.clone()
    pair = Pair(100, join(0, SamplingParams(bad_token_ids=(1,))), join(1, GREEDY))
    pair.same(buffer[:, :100].cpu(), [0, 1])
    assert pair.draw(buffer[:, :100], [1, 0]).tokens[0] == int(buffer[0, :100].argmax())
    assert torch.equal(buffer, before)


def test_draws_do_not_depend_on_the_batch() -> None:
    params = SamplingParams(top_p=0.9)
    logits = normal(4, 40)
    together = Pair(40, *(join(r, params, seed=r) for r in range(4))).draw(logits, [2, 0, 3, 1]).tokens.tolist()
    alone = Pair(40, *(join(r, params, seed=r) for r in range(4)))
    assert together == [int(alone.draw(logits[i : i + 1], [row]).tokens[0]) for i, row in enumerate([2, 0, 3, 1])]


# -- noise -------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _noise_kernel(seeds: tl.tensor, position: tl.tensor, noise: tl.tensor, bound: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    bits = noise_bits(noise_stream(tl.load(seeds).to(tl.uint64), position), i)
    tl.store(noise + i, noise_of(bits))
    tl.store(bound + i, noise_bound(bits))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (5, 1), (2**63 - 1, 123_456), (-1, 7)])
def test_noise_is_the_cpus(seed: int, position: int) -> None:
    n = 4096
    noise, bound = torch.zeros(n, dtype=torch.float64, device=DEVICE), torch.zeros(n, device=DEVICE)
    _noise_kernel[(1,)](torch.tensor([seed], device=DEVICE), position, noise, bound, N=n)
    expected = torch.tensor([reference.noise(seed % 2**64, position, token) for token in range(n)], dtype=torch.float64)
    torch.testing.assert_close(noise.cpu(), expected, rtol=1e-14, atol=1e-14)
    assert (bound.cpu() > expected).all()
    large = expected > 3.0  # where it decides
    assert (bound.cpu()[large] - expected[large] < 0.05).all()


# -- log-probabilities -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs(dtype: torch.dtype, k: int) -> None:
    logits = normal(6, 300).to(dtype)
    logits[1] = torch.round(logits[1].float())
    logits[2, 4:] = -INF
    logits[3, 7], logits[4, 8], logits[5] = NAN, INF, -INF
    tokens = torch.tensor([int(logits[0].argmax()), 17, 9, 1, 1, 1], dtype=torch.int32)
    expected = Sampler(1, 300).prompt_logprobs(logits, tokens.numpy(), k)
    actual = token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), k).cpu()
    for i, each in enumerate(expected):
        entry = actual.entry(i, k)
        assert (entry.rank, entry.top_ids) == (each.rank, each.top_ids)
        assert entry.top_logprobs == pytest.approx(each.top_logprobs, abs=2e-6)
        assert entry.logprob == pytest.approx(each.logprob, abs=2e-6, nan_ok=True)
    assert actual.entry(0, 0).rank == 1


# -- arguments ---------------------------------------------------------------------------------


def test_arguments_are_checked() -> None:
    pair = Pair(10, join(0, GREEDY), most=2)
    with pytest.raises(UnsupportedModelError, match=r"not torch\.float64"):
        pair.draw(torch.zeros(1, 10).double(), [0])
    with pytest.raises(ValueError, match="do not fit 1 rows of 10"):
        pair.draw(torch.zeros(1, 11), [0])
    with pytest.raises(ValueError, match="workspace of 2"):
        pair.draw(torch.zeros(3, 10), [0, -1, -1])
    out = Sampled(torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="status"):
        sample(torch.zeros(1, 10), torch.zeros(1, dtype=torch.int32), pair.state, pair.workspace, out, decoding=0)
    pair.workspace = SamplingWorkspace(2, 10, torch.device(DEVICE), greedy_only=True)
    with pytest.raises(ValueError, match="greedy_only"):
        pair.draw(torch.zeros(1, 10), [0])
    assert pair.draw(torch.eye(10)[3:4], [0], greedy=True).tokens.tolist() == [3]
    assert pair.draw(torch.zeros(0, 10), [], greedy=True).tokens.tolist() == []
    with pytest.raises(UnsupportedModelError, match="vocabularies"):
        SamplingWorkspace(1, 10**6, torch.device(DEVICE))
