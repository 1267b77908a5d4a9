"""Triton's interpreter, made quicker and to round as a device does. Does nothing where kernels are compiled.

Test modules import what they need of ``triton_helpers`` from here, before Triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .triton_helpers import DEVICE as DEVICE
from .triton_helpers import INTERPRETED
from .triton_helpers import compile_for as compile_for
from .triton_helpers import needs_device as needs_device
from .triton_helpers import needs_no_device as needs_no_device

import torch  # isort: skip


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


if INTERPRETED:
    _round_to_nearest()
    _patch_the_language_once_per_launch()
    _leave_overflow_of_integers_alone()
