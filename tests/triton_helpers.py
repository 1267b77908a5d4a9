"""Triton kernels without a GPU: the interpreter, and compiling for devices that are not there.

Where there is a CUDA device the kernel tests run on it; elsewhere Triton interprets the kernels
(``conftest`` asks for that), made quicker here and to round as a device does.
Interpreting says nothing about whether a kernel compiles, so ``compile_for`` runs a module's
``device_launches`` in a process of its own whose launches compile for a device and end there.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

triton = pytest.importorskip("triton")

INTERPRETED: bool = triton.knobs.runtime.interpret
# What a program may take; sm86 and sm89 have the least and run sm80's code.
_SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}

needs_device = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
needs_no_device = pytest.mark.skipif(DEVICE == "cuda", reason="the kernels run on the device itself")


def _multiply_bfloat16_as_float32() -> None:
    """The interpreter keeps bfloat16 as 16 bits of an integer, and multiplies matrices of those integers."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original: Callable[..., Any] = InterpreterBuilder.create_dot

    def wide(operand: Any) -> Any:
        if operand.dtype.scalar != triton.language.bfloat16:
            return operand
        return TensorHandle((operand.data.astype("uint32") << 16).view("float32"), triton.language.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return original(self, wide(a), wide(b), *others)

    InterpreterBuilder.create_dot = create_dot


def _round_to_nearest() -> None:
    """float32 to bfloat16: the interpreter cuts the lower bits off."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return original(self, source, target)
        wide = torch.from_numpy(source.data.copy())
        return TensorHandle(wide.bfloat16().view(torch.int16).numpy().view("uint16"), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast


def _leave_overflow_of_integers_alone() -> None:
    """Counting on it is what hashing does; the check doubles the cost of every sum."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_the_language_once_per_launch() -> None:
    """A call from one jitted function to another replaces all of ``triton.language`` anew, which takes milliseconds."""
    from triton.runtime import interpreter

    patched: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *arguments, **options)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **options)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.InterpretedFunction.__call__ = call


def _count_by_arrays_of_one() -> None:
    """Triton 3.6 makes whole numbers of arrays with one element, which numpy 2.4 refuses unless they have no dimension."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if INTERPRETED:
    _count_by_arrays_of_one()
    _multiply_bfloat16_as_float32()
    _round_to_nearest()
    _patch_the_language_once_per_launch()
    _leave_overflow_of_integers_alone()


def compile_for(test_file: str, capability: int) -> list[str]:
    """Compile what ``device_launches()`` of a test module launches, for a compute capability such as 90.

    Returns:
        One line per kernel: its name, warps, stages and bytes of shared memory.
    """
    command = [sys.executable, "-P", __file__, Path(test_file).stem, str(capability)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


class _AbsentDevice:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self._target = triton.backends.compiler.GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> Any:
        return self._target


def compile_only(capability: int) -> list[Any]:
    """From now on launches in this process compile and do not run; the list fills with the compiled kernels."""
    compiled: list[Any] = []
    function = triton.runtime.jit.JITFunction
    run = function.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if all(kernel is not other for other in compiled):
            compiled.append(kernel)
        return kernel

    triton.runtime.driver.set_active(_AbsentDevice(capability))
    function.run = compile_instead
    return compiled


def _main(module: str, capability: int) -> None:
    package = types.ModuleType("tests")
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules["tests"] = package
    compiled = compile_only(capability)
    importlib.import_module(f"tests.{module}").device_launches()
    for kernel in compiled:
        data = kernel.metadata
        assert data.shared <= _SHARED_BYTES[capability], f"{data.name} wants {data.shared:,} bytes of shared memory"
        print(data.name, data.num_warps, data.num_stages, data.shared)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
