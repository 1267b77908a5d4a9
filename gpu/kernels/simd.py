"""A vector of 16 float32 lanes for numba, lowered by LLVM to whatever the target has.

The kernels need three things that numba's own loops cannot promise: bfloat16 in memory with
float32 in registers, fused multiply-adds in a fixed order (no re-association, so that a result
never depends on how a loop was compiled), and accumulators that stay in registers. Each function
here is one numba intrinsic. A *buffer* is a raw pointer made by :func:`pointer`; its element type
decides the conversion: ``uint16`` is the bit pattern of bfloat16, ``float32`` is itself. Offsets
count elements and are never checked.

Compute thread only, inside compiled functions.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite and numba ship no type information
from numba import types  # type: ignore[import-untyped]
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic, models, register_model  # type: ignore[import-untyped]

LANES = 16

F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
F32S = ir.VectorType(F32, LANES)
I16S = ir.VectorType(I16, LANES)
I32S = ir.VectorType(I32, LANES)


class Lanes(types.Type):  # type: ignore[misc]  # numba is untyped
    """The numba type of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]  # numba is untyped
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, F32S)


def floats(value: float) -> Any:
    """The IR constant with ``value`` in every lane."""
    return ir.Constant(F32S, [value] * LANES)


def ints(value: int) -> Any:
    """The IR constant with the int32 ``value`` in every lane."""
    return ir.Constant(I32S, [value] * LANES)


def ir_splat(builder: Any, scalar: Any) -> Any:
    """IR for ``scalar`` in every lane."""
    kind = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ints(0))


def ir_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """IR for ``a * b + c`` with one rounding."""
    kind = ir.FunctionType(F32S, [F32S] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def ir_load(builder: Any, address: Any) -> Any:
    """IR for 16 lanes at ``address``, a pointer to elements."""
    source = builder.bitcast(address, ir.PointerType(ir.VectorType(address.type.pointee, LANES)))
    return _widen(builder, builder.load(source, align=_bytes(address)))


def ir_store(builder: Any, value: Any, address: Any) -> None:
    """IR to store 16 lanes at ``address``, a pointer to elements."""
    target = builder.bitcast(address, ir.PointerType(ir.VectorType(address.type.pointee, LANES)))
    builder.store(_narrow(builder, value, address.type.pointee), target, align=_bytes(address))


def _bytes(address: Any) -> int:
    return 2 if address.type.pointee == I16 else 4


def _widen(builder: Any, raw: Any) -> Any:
    """Memory format to float32: bfloat16 is the upper half of a float32."""
    if raw.type != I16S:
        return raw
    return builder.bitcast(builder.shl(builder.zext(raw, I32S), ints(16)), F32S)


def _narrow(builder: Any, value: Any, element: Any) -> Any:
    """Float32 to memory format: round to nearest even; NaN stays NaN."""
    if element != I16:
        return value
    bits = builder.bitcast(value, I32S)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, ints(0x7FFF))), ints(16))
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(nan, ints(0x7FC0), rounded), I16S)


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped, here and below
def pointer(typingctx: Any, address: Any, element: Any) -> Any:
    """Buffer at the integer ``address``, of the type of the scalar ``element``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(address, element), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load(typingctx: Any, buffer: Any, offset: Any) -> Any:
    """Lanes ``buffer[offset : offset + 16]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir_load(builder, builder.gep(args[0], [args[1]]))

    return lanes(buffer, offset), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load_part(typingctx: Any, buffer: Any, offset: Any, count: Any) -> Any:
    """Like :func:`load`, but lanes from ``count`` on are 0 and their memory is not read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = builder.gep(args[0], [args[1]])
        box = cgutils.alloca_once(builder, ir.VectorType(source.type.pointee, LANES))
        first = builder.bitcast(box, source.type)
        whole = builder.icmp_signed(">=", args[2], ir.Constant(args[2].type, LANES))
        with builder.if_else(whole, likely=True) as (then, otherwise):
            with then:
                direct, direct_block = ir_load(builder, source), builder.block
            with otherwise:
                builder.store(ir.Constant(box.type.pointee, [0] * LANES), box)
                with cgutils.for_range(builder, args[2]) as loop:
                    builder.store(builder.load(builder.gep(source, [loop.index])), builder.gep(first, [loop.index]))
                copied, copied_block = ir_load(builder, first), builder.block
        result = builder.phi(F32S)
        result.add_incoming(direct, direct_block)
        result.add_incoming(copied, copied_block)
        return result

    return lanes(buffer, offset, count), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store(typingctx: Any, buffer: Any, offset: Any, value: Any) -> Any:
    """``buffer[offset : offset + 16] = value``, rounded to the buffer's format."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ir_store(builder, args[2], builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(buffer, offset, value), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_part(typingctx: Any, buffer: Any, offset: Any, value: Any, count: Any) -> Any:
    """Like :func:`store`, but memory from lane ``count`` on is not touched."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = builder.gep(args[0], [args[1]])
        box = cgutils.alloca_once(builder, ir.VectorType(target.type.pointee, LANES))
        first = builder.bitcast(box, target.type)
        whole = builder.icmp_signed(">=", args[3], ir.Constant(args[3].type, LANES))
        with builder.if_else(whole, likely=True) as (then, otherwise):
            with then:
                ir_store(builder, args[2], target)
            with otherwise:
                ir_store(builder, args[2], first)
                with cgutils.for_range(builder, args[3]) as loop:
                    builder.store(builder.load(builder.gep(first, [loop.index])), builder.gep(target, [loop.index]))
        return context.get_dummy_value()

    return types.void(buffer, offset, value, count), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_strided(typingctx: Any, buffer: Any, offset: Any, stride: Any, value: Any, count: Any) -> Any:
    """Lane ``i`` to ``buffer[offset + i * stride]`` for the first ``count`` lanes, rounded."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = builder.gep(args[0], [args[1]])
        box = cgutils.alloca_once(builder, ir.VectorType(target.type.pointee, LANES))
        first = builder.bitcast(box, target.type)
        ir_store(builder, args[3], first)
        whole = builder.icmp_signed(">=", args[4], args[4].type(LANES))
        with cgutils.for_range(builder, builder.select(whole, args[4].type(LANES), args[4])) as loop:
            value = builder.load(builder.gep(first, [loop.index]))
            builder.store(value, builder.gep(target, [builder.mul(loop.index, args[2])]))
        return context.get_dummy_value()

    return types.void(buffer, offset, stride, value, count), codegen
