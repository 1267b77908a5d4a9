"""What the sampler promises beyond a single draw: greedy ties, failures, masks, rows, arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncsched.gpu.sampler import Sampler
from asyncsched.sampling_params import SamplingParams

from .sampler_helpers import ints, join, sampler_with

GREEDY = SamplingParams(temperature=0.0)
INF = float("inf")
NAN = float("nan")


def one(params: SamplingParams, logits: list[float], **state: object) -> int:
    sampler = sampler_with(len(logits), join(0, params, **state))  # type: ignore[arg-type]  # plain keyword passing
    output = sampler.sample(torch.tensor([logits]), ints([0]))
    assert output.failed is None
    return int(output.tokens[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.0, bad_token_ids=(5,))], ids=["plain", "masked"])
@pytest.mark.parametrize("vocab", [1, 7, 64, 65, 1024, 5000])
def test_greedy_takes_the_first_of_equal_logits(dtype: torch.dtype, params: SamplingParams, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-6, 4, (40, vocab), generator=generator).to(dtype)
    expected = logits.float()
    if params.bad_token_ids and vocab > 5:
        expected[:, 5] = -INF
    sampler = sampler_with(vocab, *(join(r, params) for r in range(40)))
    tokens = sampler.sample(logits, ints(range(40))).tokens
    assert tokens.dtype == np.int32
    assert tokens.tolist() == np.argmax(expected.numpy(), axis=1).tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.0, logprobs=0)], ids=["plain", "full"])
def test_both_zeros_are_equal(params: SamplingParams) -> None:
    assert one(params, [-1.0, -0.0, 0.0, -2.0]) == 1
    assert one(params, [-1.0, 0.0, -0.0, -2.0]) == 1


def test_all_negative_logits() -> None:
    assert one(GREEDY, [-5.0, -1.5, -1.25, -30.0]) == 2


def test_bfloat16_and_float32_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    narrow = (torch.randn(30, 3000, generator=generator) * 3).bfloat16()
    many = [GREEDY, SamplingParams(top_p=0.9, logprobs=4), SamplingParams(top_k=30, frequency_penalty=1.0)]
    results = []
    for logits in (narrow, narrow.float()):
        sampler = sampler_with(3000, *(join(r, many[r % 3], seed=r) for r in range(30)))
        results.append([sampler.sample(logits, ints(range(30))) for _ in range(3)])
    for a, b in zip(*results, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.logprobs == b.logprobs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_left_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = logits.clone()
    sampler = sampler_with(100, join(0, SamplingParams(bad_token_ids=(1,))), join(1, GREEDY))
    sampler.sample(logits, ints([0, 1]))
    assert torch.equal(logits, before)


def test_padded_logits_buffer() -> None:
    buffer = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    sampler = sampler_with(100, *(join(r, GREEDY) for r in range(4)))
    assert sampler.sample(buffer[:, :100], ints(range(4))).tokens.tolist() == buffer[:, :100].argmax(1).tolist()


# -- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9), SamplingParams(logprobs=2)], ids=str)
@pytest.mark.parametrize("where", [0, 63, 64, 2047, 2999])
@pytest.mark.parametrize(("value", "reason"), [(NAN, "NaN"), (-NAN, "NaN"), (INF, r"+inf")])
def test_a_bad_row_fails_alone(dtype: torch.dtype, params: SamplingParams, where: int, value: float, reason: str) -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(3)).to(dtype)
    bad = logits.clone()
    bad[2, where] = value
    clean, hurt = (sampler_with(3000, *(join(r, params, seed=r) for r in range(5))) for _ in range(2))
    expected = clean.sample(logits, ints(range(5)))
    output = hurt.sample(bad, ints(range(5)))
    assert output.failed is not None
    assert list(output.failed) == [2]
    assert reason in output.failed[2]
    others = [0, 1, 3, 4]
    assert output.tokens[others].tolist() == expected.tokens[others].tolist()
    assert output.tokens[2] == 0
    if params.logprobs is not None:
        assert output.logprobs is not None
        assert sorted(output.logprobs) == others


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()], ids=["greedy", "drawn"])
def test_nothing_finite(params: SamplingParams) -> None:
    sampler = sampler_with(10, join(0, params), join(1, params))
    output = sampler.sample(torch.tensor([[-INF] * 10, [-INF] * 9 + [0.0]]), ints([0, 1]))
    assert output.failed is not None
    assert "no finite value" in output.failed[0]
    assert list(output.failed) == [0]
    assert output.tokens[1] == 9


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=(1, 2), bad_token_ids=(2, 1)),
        SamplingParams(temperature=0.0, bad_token_ids=(0, 1, 2, 3)),
        SamplingParams(allowed_token_ids=(3,), min_tokens=1),
        SamplingParams(allowed_token_ids=(99,)),
    ],
    ids=str,
)
def test_everything_masked(params: SamplingParams) -> None:
    sampler = sampler_with(4, join(0, params, stop_ids=(3,)), join(1, GREEDY))
    output = sampler.sample(torch.zeros(2, 4), ints([0, 1]))
    assert output.failed is not None
    assert list(output.failed) == [0]
    assert "masked" in output.failed[0]


def test_a_failed_row_does_not_advance() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(4))
    sampler, other = sampler_with(50, join(0, params)), sampler_with(50, join(0, params))
    sampler.sample(torch.full((1, 50), NAN), ints([0]))
    assert sampler.sample(x, ints([0])).tokens == other.sample(x, ints([0])).tokens


# -- masks, bias, penalties --------------------------------------------------------------------


def test_bias_decides() -> None:
    flat = [0.0] * 6
    assert one(SamplingParams(temperature=0.0, logit_bias={4: 100.0}), flat) == 4
    assert one(SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(5), -1e300)), flat) == 5
    assert one(SamplingParams(logit_bias={4: 1e300}), flat) == 4
    assert one(SamplingParams(logit_bias=dict.fromkeys(range(5), -1e300), top_p=0.9, logprobs=2), flat) == 5


def test_bias_does_not_undo_a_mask() -> None:
    assert one(SamplingParams(temperature=0.0, logit_bias={2: 1e5}, bad_token_ids=(2,)), [1.0, 0.0, 5.0]) == 0
    assert one(SamplingParams(temperature=0.0, logit_bias={2: 1e5}, allowed_token_ids=(0, 1)), [1.0, 0.0, 5.0]) == 0


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={-1: 9.0, 3: 9.0, 10**12: 9.0}, bad_token_ids=(-2, 3, 2), min_tokens=1)
    assert one(params, [0.0, 1.0, 5.0], stop_ids=(7, -1)) == 1


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}], ids=str)
def test_min_tokens_suppresses_stop_ids_until_reached(options: dict[str, float]) -> None:
    params = SamplingParams(**options, min_tokens=2)  # type: ignore[arg-type]  # the options are valid
    sampler = sampler_with(4, join(0, params, stop_ids=(3, 1)))
    logits = torch.tensor([[0.0, 5.0, 1.0, 9.0]])
    assert [int(sampler.sample(logits, ints([0])).tokens[0]) for _ in range(4)] == [2, 2, 3, 3]


def test_min_tokens_counts_what_came_before_a_preemption() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    logits = [0.0, 5.0, 1.0, 9.0]
    assert one(params, logits, stop_ids=(3, 1), generated=1) == 2
    assert one(params, logits, stop_ids=(3, 1), generated=2) == 3


def test_repetition_penalty_reads_the_prompt_and_others_do_not() -> None:
    logits = [2.0, 1.9, 0.5]
    assert one(SamplingParams(temperature=0.0, repetition_penalty=1.5), logits, prompt=[0]) == 1
    assert one(SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0), logits, prompt=[0]) == 0
    assert one(SamplingParams(temperature=0.0, presence_penalty=2.0), logits, output=[0]) == 1


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    assert one(SamplingParams(temperature=0.0, repetition_penalty=2.0), [-1.0, -1.5], prompt=[0]) == 1
    assert one(SamplingParams(temperature=0.0, repetition_penalty=0.5), [-1.0, -1.5], prompt=[1]) == 1


def test_frequency_penalty_grows_with_every_occurrence() -> None:
    sampler = sampler_with(3, join(0, SamplingParams(temperature=0.0, frequency_penalty=1.0)))
    logits = torch.tensor([[2.5, 0.0, -1.2]])
    assert [int(sampler.sample(logits, ints([0])).tokens[0]) for _ in range(6)] == [0, 0, 0, 1, 0, 1]


def test_memory_follows_what_rows_ask_for() -> None:
    sampler = Sampler(1000, 50_000)
    for row in range(500):
        sampler.join(join(row, SamplingParams(top_p=0.9)))
    assert sampler._table.ids.size == 0
    sampler.join(join(500, SamplingParams(frequency_penalty=1.0)))
    assert sampler._table.ids.size < 5000
    for turn in range(300):  # rows that come and go reuse the pool
        sampler.join(join(turn % 3, SamplingParams(repetition_penalty=1.1), prompt=range(200)))
    assert sampler._table.ids.size < 5000


# -- rows and arguments ------------------------------------------------------------------------


def test_a_row_is_reused_from_scratch() -> None:
    x = torch.randn(1, 80, generator=torch.Generator().manual_seed(5))
    sampler = sampler_with(80, join(0, SamplingParams(bad_token_ids=tuple(range(40)), prompt_logprobs=3, logprobs=1)))
    sampler.sample(x, ints([0]))
    sampler.leave(0)
    assert sampler.wants_prompt_logprobs(0) is None
    sampler.join(join(0, SamplingParams(), seed=9))
    output = sampler.sample(x, ints([0]))
    assert output.logprobs is None
    assert output.tokens == sampler_with(80, join(0, SamplingParams(), seed=9)).sample(x, ints([0])).tokens


def test_leaving_twice_is_harmless() -> None:
    sampler = sampler_with(5, join(0, GREEDY))
    sampler.leave(0)
    sampler.leave(0)


def test_no_rows() -> None:
    output = sampler_with(9, join(0, GREEDY)).sample(torch.empty(0, 9), ints([]))
    assert output.tokens.shape == (0,)
    assert output.failed is None


def test_wrong_arguments() -> None:
    sampler = sampler_with(9, join(0, GREEDY), join(1, GREEDY))
    sampler.leave(1)
    good = torch.zeros(1, 9)
    for logits, rows, message in [
        (torch.zeros(1, 8), [0], "shape"),
        (torch.zeros(9), [0], "shape"),
        (good.double(), [0], "float64"),
        (good, [0, 0], "one row index"),
        (good, [1], "must join"),
        (good, [2], "must join"),
        (good, [-1], "must join"),
    ]:
        with pytest.raises(ValueError, match=message):
            sampler.sample(logits, ints(rows))
