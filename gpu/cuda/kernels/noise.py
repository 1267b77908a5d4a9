"""Gumbel noise from a counter: the same number for a seed, output position and token id as on the CPU.

SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) of the three gives 52 bits, ``u`` in (0, 1), and
``-log(-log(u))`` follows the Gumbel distribution. Adding it to the logits and taking the largest
draws from their softmax (Gumbel, 1954; Maddison, Tarlow, Minka, arXiv:1411.0030).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

_GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_LOG_2: tl.constexpr = tl.constexpr(math.log(2.0))

MAX_NOISE: tl.constexpr = tl.constexpr(36.8)  # -log(-log(u)) at the largest u, 1 - 2**-53, rounded up


@triton.jit
def _mix(h: tl.tensor) -> tl.tensor:
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return h ^ (h >> 31)


@triton.jit
def noise_stream(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The counter's base for one output position (int32) of one request, uint64."""
    return _mix(_mix(seed + _GAMMA) + (position + 1).to(tl.uint64) * _GAMMA)


@triton.jit
def noise_bits(stream: tl.tensor, token: tl.tensor) -> tl.tensor:
    """64 random bits for a token id (int32)."""
    return _mix(stream + (token + 1).to(tl.uint64) * _GAMMA)


@triton.jit
def noise_of(bits: tl.tensor) -> tl.tensor:
    """The noise, float64."""
    u = ((bits >> 12).to(tl.float64) + 0.5) * 2.0**-52
    return -tl.log(-tl.log(u))


@triton.jit
def noise_bound(bits: tl.tensor) -> tl.tensor:
    """At least the noise, float32, and hardly more of what may win: as ``-log(u) >= 1 - u``, it is at most ``-log(1 - u)``.

    A hundredth covers every rounding in float32 and an approximate logarithm.
    """
    rest = (bits ^ 0xFFFFFFFFFFFFFFFF) >> 32  # (1 - u) * 2**32, rounded down
    return (32.0 - tl.log2(tl.maximum(rest.to(tl.float32), 2.0**-22))) * _LOG_2 + 0.01
