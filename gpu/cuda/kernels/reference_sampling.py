"""Sampling by sorting, in plain torch, one row at a time: the definition of what the kernels choose.

The rules are those of the CPU sampler: see ``asyncsched.gpu.sampler``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ....sampling_params import SamplingParams

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_LARGEST = 3.0e38


def adjusted(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
) -> torch.Tensor:
    """Logits ``[V]`` after masks, bias and penalties, float32.

    Args:
        logits: ``[V]``, any type.
        params: What is asked for.
        prompt, output: The row's tokens so far; the output's length is its position.
        stop_ids: Suppressed below ``min_tokens``.
    """
    x = logits.float().clone()
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        x = torch.full_like(x, -math.inf).index_put((torch.tensor(allowed),), x[allowed])
    for token, bias in params.logit_bias.items():
        x[token] = _bounded(float(x[token]) + min(max(bias, -_LARGEST), _LARGEST))
    x[list(params.bad_token_ids)] = -math.inf
    if len(output) < params.min_tokens:
        x[list(stop_ids)] = -math.inf
    for token in {*prompt, *output}:
        value = float(x[token])
        value = value / params.repetition_penalty if value > 0.0 else value * params.repetition_penalty
        if token in output:
            value -= params.frequency_penalty * output.count(token) + params.presence_penalty
        x[token] = _bounded(value)
    return x


def kept(x: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Token ids that top-k, top-p and min-p keep of adjusted logits ``[V]``, likeliest first."""
    values, ids = x.sort(descending=True, stable=True)
    ids = ids[values > -math.inf]
    if params.top_k > 0:
        ids = ids[: params.top_k]
    z = (x[ids].double() - float(x[ids[0]])) / params.temperature
    if params.top_p < 1.0:
        mass = z.exp().cumsum(0)
        ids = ids[: int((mass < params.top_p * mass[-1]).sum()) + 1]
    return ids[z[: len(ids)] >= math.log(params.min_p)] if params.min_p > 0.0 else ids


def noise(seed: int, position: int, token: int) -> float:
    """The Gumbel noise of one token at one output position."""
    stream = _mix(_mix((seed + _GAMMA) & _MASK) + (position + 1) * _GAMMA)
    u = ((_mix(stream + (token + 1) * _GAMMA) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(u))


def choose(x: torch.Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token that adjusted logits ``[V]`` give at one seed and position."""
    if params.temperature == 0.0:
        return int(x.argmax())
    ids = kept(x, params).tolist()
    top = float(x.max())
    return int(max(ids, key=lambda token: (float(x[token]) - top) / params.temperature + noise(seed, position, token)))


def _bounded(value: float) -> float:
    return value if value == -math.inf else min(max(value, -_LARGEST), _LARGEST)


def _mix(h: int) -> int:
    h &= _MASK
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
    return h ^ (h >> 31)
