"""Divide a kernel's work among the threads that torch already has.

torch's CPU operators run on an OpenMP pool. A second pool beside it would fight for the same
cores, so the kernels borrow that one: :func:`parallel` calls ``GOMP_parallel`` of the very
OpenMP runtime torch is linked to (GCC's own entry point, also exported by LLVM's and Intel's
runtimes), from the thread whose workers torch keeps warm. Without such a runtime the same work
runs serially.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ._jit import cgutils, intrinsic, ir, types

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()


def _find_fork() -> int:
    """Address of ``GOMP_parallel`` in torch's dependencies, 0 if there is none."""
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


FORK = _find_fork()


def team(work: int, least: int) -> tuple[int, int]:
    """The fork function and number of threads for ``work`` units, when fewer than ``least`` are not worth a fork."""
    return (FORK, torch.get_num_threads()) if FORK and work >= least else (0, 1)


@intrinsic
def parallel(typingctx: Any, task: Any, fork: Any, threads: Any, chunks: Any, arguments: Any) -> Any:
    """Call ``task(chunk, chunks, worker, *arguments)`` for every chunk, on up to ``threads`` threads.

    Chunks are handed out in ascending order to whichever thread is free; ``worker`` tells the
    threads apart (0 … threads - 1). ``task`` is a compiled function that must not raise; ``fork``
    is :data:`FORK`, or 0 to run serially.
    """
    kinds = (types.int64, types.int64, types.int64, *arguments.types)
    task.get_call_type(typingctx, kinds, {})
    signature = types.void(task, types.int64, types.int64, types.int64, arguments)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, fork, threads, chunks, values = args
        compiled = task.dispatcher.get_compile_result(task.get_call_type(typingctx, kinds, {}))
        context.add_linking_libs([compiled.library])
        state_type = ir.LiteralStructType([_I64, _I64, _I64, values.type])
        state = cgutils.alloca_once(builder, state_type)
        zero = _I64(0)
        packed = cgutils.pack_struct(builder, [zero, zero, chunks, values])
        builder.store(packed, state)
        body = _worker_loop(context, builder.module, compiled, arguments, state_type)
        data = builder.bitcast(state, _BYTES)
        alone = builder.or_(builder.icmp_signed("<=", threads, _I64(1)), builder.icmp_signed("==", fork, _I64(0)))
        with builder.if_else(alone) as (serial, forked):
            with serial:
                builder.call(body, [data])
            with forked:
                kind = ir.FunctionType(ir.VoidType(), [body.type, _BYTES, _I32, _I32])
                function = builder.inttoptr(fork, kind.as_pointer())
                builder.call(function, [body, data, builder.trunc(threads, _I32), _I32(0)])
        return context.get_dummy_value()

    return signature, codegen


def _worker_loop(context: Any, module: Any, compiled: Any, arguments: Any, state_type: Any) -> Any:
    """The function each thread runs: take a chunk from the shared counter until none is left."""
    name = module.get_unique_name("worker_loop")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_BYTES]), name)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    state = builder.bitcast(function.args[0], state_type.as_pointer())
    field = [builder.gep(state, [_I32(0), _I32(i)], inbounds=True) for i in range(4)]
    worker = builder.atomic_rmw("add", field[1], _I64(1), "monotonic")
    chunks = builder.load(field[2])
    values = cgutils.unpack_tuple(builder, builder.load(field[3]), len(arguments))
    take = function.append_basic_block("take")
    run = function.append_basic_block("run")
    done = function.append_basic_block("done")
    builder.branch(take)
    builder.position_at_end(take)
    chunk = builder.atomic_rmw("add", field[0], _I64(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", chunk, chunks), run, done)
    builder.position_at_end(run)
    context.call_internal_no_propagate(builder, compiled.fndesc, compiled.signature, [chunk, chunks, worker, *values])
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
    return function
