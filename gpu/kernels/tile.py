"""Tiles of accumulators for the attention kernel: ``rows`` × ``columns`` vectors held in registers.

Numba unrolls nothing by itself, so a tile is a tuple of vectors (row-major) whose sizes are
static: ``rows`` and ``columns`` are *markers*, tuples of ``None`` of which only the
length counts. Each accumulator is updated by its own chain of fused multiply-adds; the tile's shape
decides how many chains run side by side, never the arithmetic of one.

Compute thread only, inside compiled functions.
"""

from __future__ import annotations

from typing import Any

from ._jit import cgutils, intrinsic, ir, types
from .simd import I32, floats, ir_fma, ir_load, ir_splat, ir_store, lanes

_BYTES = ir.IntType(8).as_pointer()


def _at(builder: Any, buffer: Any, offset: Any, step: Any, index: int) -> Any:
    """Address of ``buffer[offset + index * step]``."""
    return builder.gep(buffer, [builder.add(offset, builder.mul(step, step.type(index)))])


@intrinsic
def zeros(typingctx: Any, rows: Any, columns: Any) -> Any:
    """A tile of zeros."""
    kind = types.UniTuple(lanes, rows.count * columns.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return cgutils.pack_array(builder, [floats(0.0)] * kind.count)

    return kind(rows, columns), codegen


@intrinsic
def load_tile(typingctx: Any, rows: Any, columns: Any, buffer: Any, offset: Any, stride: Any) -> Any:
    """The tile whose row ``r`` begins at ``buffer[offset + r * stride]``, its columns one behind the other."""
    kind = types.UniTuple(lanes, rows.count * columns.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts = [_at(builder, args[2], args[3], args[4], row) for row in range(rows.count)]
        parts = [ir_load(builder, builder.gep(s, [args[3].type(16 * c)])) for s in starts for c in range(columns.count)]
        return cgutils.pack_array(builder, parts)

    return kind(rows, columns, buffer, offset, stride), codegen


@intrinsic
def store_tile(typingctx: Any, rows: Any, columns: Any, tile: Any, buffer: Any, offset: Any, stride: Any) -> Any:
    """Inverse of :func:`load_tile`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = cgutils.unpack_tuple(builder, args[2])
        for row in range(rows.count):
            start = _at(builder, args[3], args[4], args[5], row)
            for column in range(columns.count):
                ir_store(builder, parts[row * columns.count + column], builder.gep(start, [args[4].type(16 * column)]))
        return context.get_dummy_value()

    return types.void(rows, columns, tile, buffer, offset, stride), codegen


@intrinsic
def load_row(typingctx: Any, columns: Any, buffer: Any, offset: Any) -> Any:
    """A row of vectors, one behind the other from ``buffer[offset]``."""
    kind = types.UniTuple(lanes, columns.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offsets = [builder.add(args[2], args[2].type(16 * c)) for c in range(columns.count)]
        return cgutils.pack_array(builder, [ir_load(builder, builder.gep(args[1], [o])) for o in offsets])

    return kind(columns, buffer, offset), codegen


@intrinsic
def load_indirect(typingctx: Any, columns: Any, buffer: Any, bases: Any, first: Any, offset: Any) -> Any:
    """A row of vectors: column ``c`` is at ``buffer[bases[first + c] + offset]``."""
    kind = types.UniTuple(lanes, columns.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, buffer, bases, first, offset = args
        starts = [builder.load(builder.gep(bases, [builder.add(first, first.type(c))])) for c in range(columns.count)]
        return cgutils.pack_array(builder, [ir_load(builder, builder.gep(buffer, [builder.add(s, offset)])) for s in starts])

    return kind(columns, buffer, bases, first, offset), codegen


@intrinsic
def fma_tile(typingctx: Any, tile: Any, scalars: Any, offset: Any, stride: Any, row: Any) -> Any:
    """Add the outer product: ``tile[r, c] += scalars[offset + r * stride] * row[c]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = cgutils.unpack_tuple(builder, args[0])
        vectors = cgutils.unpack_tuple(builder, args[4])
        for index, part in enumerate(parts):
            if index % row.count == 0:
                scalar = builder.load(_at(builder, args[1], args[2], args[3], index // row.count))
                factor = ir_splat(builder, scalar)
            parts[index] = ir_fma(builder, factor, vectors[index % row.count], part)
        return cgutils.pack_array(builder, parts)

    return tile(tile, scalars, offset, stride, row), codegen


@intrinsic
def prefetch_indirect(typingctx: Any, columns: Any, buffer: Any, bases: Any, first: Any, offset: Any) -> Any:
    """Ask for the memory that :func:`load_indirect` would read, into the second-level cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, buffer, bases, first, offset = args
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        for column in range(columns.count):
            start = builder.load(builder.gep(bases, [builder.add(first, first.type(column))]))
            address = builder.bitcast(builder.gep(buffer, [builder.add(start, offset)]), _BYTES)
            builder.call(function, [address, I32(0), I32(2), I32(1)])
        return context.get_dummy_value()

    return types.void(columns, buffer, bases, first, offset), codegen
