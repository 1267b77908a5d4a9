"""Triton helpers that put the logits of a row into one total order, as integers.

As in the CPU's kernels: the bits of a float, with the magnitude of negative ones negated, compare
as integers the way the floats compare (both zeros are equal). A key holds that and the token id:
larger logit first, and of equal logits the lower id first. So a set of the most likely tokens is
one number, the key of its last member.
"""

from __future__ import annotations

import triton
import triton.language as tl

OK, HAS_NAN, HAS_INFINITY, NOTHING_FINITE, ALL_MASKED = range(5)
"""What became of a row; the same numbers as on the CPU."""

INFINITY_ORDER: tl.constexpr = tl.constexpr(0x7F800000)
MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
SIGN: tl.constexpr = tl.constexpr(-0x80000000)
LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)
LEAST_KEY: tl.constexpr = tl.constexpr(-0x8000000000000000)
NO_CUT: tl.constexpr = tl.constexpr(-(0x7F7FFFFF << 32))


@triton.jit
def magnitude_of(x: tl.tensor) -> tl.tensor:
    """The bits of float32 ``x`` without its sign: above infinity's for NaN."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def order_of(x: tl.tensor) -> tl.tensor:
    """An int32 that sorts as float32 ``x`` does."""
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31
    return ((bits & MAGNITUDE) ^ sign) - sign


@triton.jit
def value_of(order: tl.tensor) -> tl.tensor:
    """The float32 of an order."""
    return tl.where(order >= 0, order, -order | SIGN).to(tl.float32, bitcast=True)


@triton.jit
def key_of(order: tl.tensor, token: tl.tensor) -> tl.tensor:
    """An int64 that sorts by order, then by lower token id; all keys of a row differ."""
    return lowest_key_of(order) | (token ^ LAST).to(tl.int64)


@triton.jit
def lowest_key_of(order: tl.tensor) -> tl.tensor:
    """The key of the last of all tokens of one order: it and what is over it are the tokens at least so large."""
    return order.to(tl.int64) << 32


@triton.jit
def order_in(key: tl.tensor) -> tl.tensor:
    """The order in a key."""
    return (key >> 32).to(tl.int32)


@triton.jit
def token_in(key: tl.tensor) -> tl.tensor:
    """The token id in a key."""
    return (key & LAST).to(tl.int32) ^ LAST
