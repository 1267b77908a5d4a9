"""Arithmetic on 16 float32 lanes: what :mod:`simd` loads and stores.

Every function rounds as IEEE 754 says, in the order written; reductions add in one fixed tree.
Compute thread only, inside compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._jit import intrinsic, ir, types
from .simd import F32S, I32, I32S, LANES, floats, ints, ir_fma, ir_splat, lanes

# 2**f on [-1/2, 1/2], relative error 2e-9 before rounding: Lawson's weighted least squares with the constant
# term fixed at 1, so that exp2(0) is exactly 1.
_EXP2 = (
    0.00015353361959569156,
    0.0013398875016719103,
    0.00961843691766262,
    0.055503323674201965,
    0.24022647738456726,
    0.6931471824645996,
    1.0,
)
_LOG2E = 1.4426950216293335
_LOG2E_REST = 1.92596298909109e-08
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low mantissa bits


def _binary(emit: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    def typing(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args[0], args[1])

        return lanes(a, b), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


add = _binary(lambda b, x, y: b.fadd(x, y), "``a + b``.")
sub = _binary(lambda b, x, y: b.fsub(x, y), "``a - b``.")
mul = _binary(lambda b, x, y: b.fmul(x, y), "``a * b``.")
div = _binary(lambda b, x, y: b.fdiv(x, y), "``a / b``.")
larger = _binary(_larger, "The larger of the two, or ``b`` if either is NaN.")


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir_fma(builder, *args)

    return lanes(a, b, c), codegen


@intrinsic
def splat(typingctx: Any, scalar: Any) -> Any:
    """The float32 ``scalar`` in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir_splat(builder, args[0])

    return lanes(types.float32), codegen


def _reduction(emit: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    def typing(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            result, width = args[0], LANES
            while width > 1:
                width //= 2
                other = ir.Constant(I32S, [(i + width) % LANES for i in range(LANES)])
                result = emit(builder, result, builder.shuffle_vector(result, result, other))
            return builder.extract_element(result, ir.Constant(I32, 0))

        return types.float32(value), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


total = _reduction(lambda b, x, y: b.fadd(x, y), "The sum of all lanes, halves first.")
largest = _reduction(_larger, "The largest lane.")


@intrinsic
def between(typingctx: Any, value: Any, low: Any, high: Any, otherwise: Any) -> Any:
    """Lane ``i`` of ``value`` where ``low <= i <= high``, elsewhere the float32 ``otherwise``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index = ir.Constant(I32S, list(range(LANES)))
        low, high = (ir_splat(builder, builder.trunc(a, I32)) for a in args[1:3])
        inside = builder.and_(builder.icmp_signed(">=", index, low), builder.icmp_signed("<=", index, high))
        return builder.select(inside, args[0], ir_splat(builder, args[3]))

    return lanes(value, types.int64, types.int64, types.float32), codegen


def _power_of_two(builder: Any, exponent: Any, magic: Any, fraction: Any) -> Any:
    """``2 ** fraction`` scaled by the integer that ``magic`` holds in its low bits; ``exponent`` bounds it."""
    result = floats(_EXP2[0])
    for coefficient in _EXP2[1:]:
        result = ir_fma(builder, result, fraction, floats(coefficient))
    scale = builder.add(builder.shl(builder.bitcast(magic, I32S), ints(23)), ints(0x3F800000))
    result = builder.fmul(result, builder.bitcast(scale, F32S))
    return builder.select(builder.fcmp_ordered("<", exponent, floats(-126.0)), floats(0.0), result)


def _at_most_128(builder: Any, value: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", value, floats(128.0)), floats(128.0), value)


@intrinsic
def exp2(typingctx: Any, value: Any) -> Any:
    """``2 ** value`` to 1e-7 relative; 0 below the normal range, infinity from 2**127.5 on, NaN of NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _at_most_128(builder, args[0])
        magic = builder.fadd(x, floats(_ROUND))
        return _power_of_two(builder, x, magic, builder.fsub(x, builder.fsub(magic, floats(_ROUND))))

    return lanes(value), codegen


def _exp(builder: Any, value: Any) -> Any:
    x = builder.select(builder.fcmp_ordered(">", value, floats(88.75)), floats(88.75), value)
    exponent = builder.fmul(x, floats(_LOG2E))
    magic = builder.fadd(exponent, floats(_ROUND))
    whole = builder.fsub(magic, floats(_ROUND))
    fraction = ir_fma(builder, x, floats(_LOG2E), builder.fneg(whole))
    fraction = ir_fma(builder, x, floats(_LOG2E_REST), fraction)
    return _power_of_two(builder, exponent, magic, fraction)


@intrinsic
def exp(typingctx: Any, value: Any) -> Any:
    """``e ** value`` to 1e-7 relative; 0 below the normal range, infinity from 2**127.5 on, NaN of NaN.

    The fraction is taken from ``value`` by fused multiply-adds with log2(e) in two parts (after
    Cody and Waite, Software Manual for the Elementary Functions, 1980), so large arguments lose
    no accuracy.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _exp(builder, args[0])

    return lanes(value), codegen


@intrinsic
def tanh(typingctx: Any, value: Any) -> Any:
    """Hyperbolic tangent to 2e-7 absolute."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        grown = _exp(builder, builder.fadd(args[0], args[0]))
        return builder.fsub(floats(1.0), builder.fdiv(floats(2.0), builder.fadd(grown, floats(1.0))))

    return lanes(value), codegen
