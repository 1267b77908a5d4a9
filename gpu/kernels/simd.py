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

from ._jit import cgutils, extending, intrinsic, ir, types

LANES = 16

F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32S = ir.VectorType(F32, LANES)
I16S = ir.VectorType(I16, LANES)
I32S = ir.VectorType(I32, LANES)


class Lanes(types.Type):  # type: ignore[misc]  # numba is Any
    """The numba type of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


lanes = Lanes()


@extending.register_model(Lanes)
class _LanesModel(extending.models.PrimitiveModel):  # type: ignore[misc]  # numba is Any
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


@intrinsic
def pointer(typingctx: Any, address: Any, element: Any) -> Any:
    """Buffer at the integer ``address``, of the type of the scalar ``element``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(address, element), codegen


@intrinsic
def load(typingctx: Any, buffer: Any, offset: Any) -> Any:
    """Lanes ``buffer[offset : offset + 16]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir_load(builder, builder.gep(args[0], [args[1]]))

    return lanes(buffer, offset), codegen


@intrinsic
def load_part(typingctx: Any, buffer: Any, offset: Any, count: Any) -> Any:
    """Like :func:`load`, but lanes from ``count`` on are 0 and their memory is not read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = builder.gep(args[0], [args[1]])
        whole = builder.icmp_signed(">=", args[2], args[2].type(LANES))
        with builder.if_else(whole, likely=True) as (then, otherwise):
            with then:
                direct, direct_block = ir_load(builder, source), builder.block
            with otherwise:
                copied = _widen(builder, builder.call(_load_tail(builder.module, source.type), [source, args[2]]))
                copied_block = builder.block
        result = builder.phi(F32S)
        result.add_incoming(direct, direct_block)
        result.add_incoming(copied, copied_block)
        return result

    return lanes(buffer, offset, types.int64), codegen


@intrinsic
def store(typingctx: Any, buffer: Any, offset: Any, value: Any) -> Any:
    """``buffer[offset : offset + 16] = value``, rounded to the buffer's format."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ir_store(builder, args[2], builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(buffer, offset, value), codegen


@intrinsic
def store_part(typingctx: Any, buffer: Any, offset: Any, value: Any, count: Any) -> Any:
    """Like :func:`store`, but memory from lane ``count`` on is not touched."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = builder.gep(args[0], [args[1]])
        whole = builder.icmp_signed(">=", args[3], args[3].type(LANES))
        with builder.if_else(whole, likely=True) as (then, otherwise):
            with then:
                ir_store(builder, args[2], target)
            with otherwise:
                _scatter(builder, args[2], target, args[3].type(1), args[3])
        return context.get_dummy_value()

    return types.void(buffer, offset, value, types.int64), codegen


@intrinsic
def store_strided(typingctx: Any, buffer: Any, offset: Any, stride: Any, value: Any, count: Any) -> Any:
    """Lane ``i`` to ``buffer[offset + i * stride]`` for the first ``count`` lanes, rounded."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        limit = args[4].type(LANES)
        count = builder.select(builder.icmp_signed(">=", args[4], limit), limit, args[4])
        _scatter(builder, args[3], builder.gep(args[0], [args[1]]), args[2], count)
        return context.get_dummy_value()

    return types.void(buffer, offset, types.int64, value, types.int64), codegen


def _scatter(builder: Any, value: Any, target: Any, stride: Any, count: Any) -> None:
    narrow = _narrow(builder, value, target.type.pointee)
    builder.call(_store_lanes(builder.module, target.type), [narrow, target, stride, count])


def _outlined(module: Any, name: str, result: Any, *kinds: Any) -> tuple[Any, Any | None]:
    """A function shared by all uses in a module, and a builder for its body the first time.

    Partial vectors are rare; out of line they keep the code around them small and quick to compile.
    """
    if name in module.globals:
        return module.globals[name], None
    function = ir.Function(module, ir.FunctionType(result, kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function, ir.IRBuilder(function.append_basic_block("entry"))


def _load_tail(module: Any, address: Any) -> Any:
    """``(address, count) -> lanes`` in memory format, zeros behind the first ``count``."""
    kind = ir.VectorType(address.pointee, LANES)
    function, builder = _outlined(module, f"load_tail_{_bits(address)}", kind, address, I64)
    if builder is not None:
        box = builder.alloca(kind)
        builder.store(ir.Constant(kind, [0] * LANES), box)
        first = builder.bitcast(box, address)
        with cgutils.for_range(builder, function.args[1]) as loop:
            value = builder.load(builder.gep(function.args[0], [loop.index]))
            builder.store(value, builder.gep(first, [loop.index]))
        builder.ret(builder.load(box))
    return function


def _store_lanes(module: Any, address: Any) -> Any:
    """``(lanes, address, stride, count)``: lane by lane."""
    kind = ir.VectorType(address.pointee, LANES)
    function, builder = _outlined(module, f"store_lanes_{_bits(address)}", ir.VoidType(), kind, address, I64, I64)
    if builder is not None:
        value, target, stride, count = function.args
        box = builder.alloca(kind)
        builder.store(value, box)
        first = builder.bitcast(box, address)
        with cgutils.for_range(builder, count) as loop:
            lane = builder.load(builder.gep(first, [loop.index]))
            builder.store(lane, builder.gep(target, [builder.mul(loop.index, stride)]))
        builder.ret_void()
    return function


def _bits(address: Any) -> int:
    return 16 if address.pointee == I16 else 32
