"""A slow, obvious sampler to compare with, and short ways to drive the real one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncsched.contract import IntArray, RowJoin
from asyncsched.gpu.sampler import Sampler
from asyncsched.sampling_params import SamplingParams

Logits = NDArray[np.float32]

MASK_64 = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def ints(values: Sequence[int] | range | IntArray) -> IntArray:
    return np.asarray(values, np.int32)


def join(
    row: int,
    params: SamplingParams,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    generated: int | None = None,
    stop_ids: tuple[int, ...] = (),
) -> RowJoin:
    history = ints([*prompt, *output] if params.counts_tokens else ())
    count = len(output) if generated is None else generated
    return RowJoin(row, row, ints(()), 0, params, seed, stop_ids, count, history)


def sampler_with(vocab: int, *joins: RowJoin) -> Sampler:
    sampler = Sampler(max((j.row for j in joins), default=0) + 1, vocab)
    for each in joins:
        sampler.join(each)
    return sampler


def rounded(logits: Logits) -> tuple[Logits, torch.Tensor]:
    """The logits as bfloat16, once as float32 numbers and once as the tensor."""
    tensor = torch.from_numpy(logits).bfloat16()
    return tensor.float().numpy(), tensor


# -- the reference -----------------------------------------------------------------------------


def _mix(h: int) -> int:
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK_64
    return h ^ (h >> 31)


def noise(seed: int, position: int, token: int) -> float:
    stream = _mix((_mix((seed + GAMMA) & MASK_64) + (position + 1) * GAMMA) & MASK_64)
    bits = _mix((stream + (token + 1) * GAMMA) & MASK_64)
    u = ((bits >> 12) + 0.5) / 2**52
    return -math.log(-math.log(u))


def adjusted(
    logits: Logits,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    position: int | None = None,
    stop_ids: Sequence[int] = (),
) -> Logits:
    """Logits after masks, bias and penalties, one token at a time."""
    x = logits.astype(np.float32).copy()
    position = len(output) if position is None else position
    for token in range(x.size):
        value = float(x[token])
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = -math.inf
        bias = min(max(params.logit_bias.get(token, 0.0), -3e38), 3e38)
        value = float(np.float32(value + np.float32(bias)))
        if token in params.bad_token_ids or (token in stop_ids and position < params.min_tokens):
            value = -math.inf
        if token in output or token in prompt:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if token in output:
            value -= params.frequency_penalty * output.count(token) + params.presence_penalty
        x[token] = value
    return x


def survivors(x: Logits, params: SamplingParams) -> list[list[int]]:
    """Token ids that top-k, top-p and min-p keep; two answers where rounding may decide top-p either way."""
    order = sorted((t for t in range(x.size) if x[t] > -math.inf), key=lambda t: (-x[t], t))
    if params.top_k > 0:
        order = order[: params.top_k]
    z = (x[order].astype(np.float64) - float(x[order[0]])) / params.temperature
    mass = np.cumsum(np.exp(z)) / np.exp(z).sum()
    answers = []
    for target in (params.top_p - 2e-6, params.top_p + 2e-6) if params.top_p < 1.0 else (2.0,):
        count = int(np.argmax(mass >= target)) + 1 if (mass >= target).any() else len(order)
        kept = order[:count]
        if params.min_p > 0.0:
            kept = [token for token, each in zip(kept, z, strict=False) if each >= math.log(params.min_p)]
        answers.append(kept)
    return answers


def choices(x: Logits, params: SamplingParams, seed: int, position: int) -> set[int]:
    """The tokens that adjusted logits may give at one seed and position: one, or two next to a top-p boundary."""
    if params.temperature == 0.0:
        return {int(np.argmax(x))}
    top = float(x.max())
    answers = set()
    for kept in survivors(x, params):
        scores = {t: (float(x[t]) - top) / params.temperature + noise(seed, position, t) for t in kept}
        answers.add(max(scores, key=lambda t: (scores[t], -t)))
    return answers
