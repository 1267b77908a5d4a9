"""How kernels are compiled: one decorator per role.

Results must not depend on how a loop happens to be compiled, so no kernel uses ``fastmath``.
Only entry points are kept in numba's cache on disk, with everything they call inside; the parts
are compiled when an entry point is. By itself the cache notices a change of the file that holds an
entry point, but not of the files it calls into, so a digest of all of them is made part of its key.

Arguments of compiled functions are annotated ``Any``: they are numba's types, and one function
serves several of them.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, TypeVar

from ...logs import get_logger
from ._fragment import PartCompiler

F = TypeVar("F", bound=Callable[..., Any])

# Imported by name because numba is typed in part, and more with every release: here all of it is Any.
numba: Any = import_module("numba")
types: Any = import_module("numba.core.types")
caching: Any = import_module("numba.core.caching")
cgutils: Any = import_module("numba.core.cgutils")
extending: Any = import_module("numba.extending")
runtime: Any = import_module("numba.core.runtime").rtsys
ir: Any = import_module("llvmlite.ir")
llvm: Any = import_module("llvmlite.binding")

_SOURCES = sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def _with_sources(function: FunctionType) -> FunctionType:
    """The function with the digest as one more closure variable: numba's cache compares their values."""
    code = function.__code__
    code = code.replace(co_freevars=(*code.co_freevars, "kernel_sources"))
    closure = (*(function.__closure__ or ()), CellType(_SOURCES))
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__doc__, copy.__qualname__ = function.__doc__, function.__qualname__
    return copy


class _Cache(caching.FunctionCache):  # type: ignore[misc]  # numba is Any
    """Numba's cache on disk, which costs less when it has the code and is not missed when it cannot keep it."""

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The compiled code, if there is any. Its base would first load all that compiling may need, and running does not."""
        runtime.initialize(context)
        return self._load_overload(signature, context)

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep the compiled code, unless the disk is full, say."""
        try:
            super().save_overload(signature, result)
        except OSError as error:
            _warn(error)


def _warn(error: Exception) -> None:
    get_logger("kernels").warning("no kernel cache", reason=str(error), hint="set NUMBA_CACHE_DIR to a writable folder")


def kernel(function: F) -> F:
    """An entry point: callable from Python, releases the GIL, cached on disk per set of argument types.

    Where no folder for the cache can be written, the function is compiled anew in every process.
    """
    assert isinstance(function, FunctionType)
    options = {"nogil": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    compiled: Any = numba.njit(**options)(_with_sources(function))
    try:
        compiled._cache = _Cache(compiled.py_func)
    except RuntimeError as error:
        _warn(error)
    entry: F = compiled
    return entry


def part(function: F) -> F:
    """A function that only compiled functions call: it has no Python wrapper, nor code of its own."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy", "pipeline_class": PartCompiler}
    compiled: F = numba.njit(**options)(function)
    return compiled


def inlined(function: F) -> F:
    """A part that is merged into its callers before they are compiled; the cheapest way to split a function."""
    compiled: F = numba.njit(inline="always", error_model="numpy")(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Any:
    """An operation of compiled code, as a function of numba's typing context and argument types.

    It returns a signature and a generator of LLVM code.
    """
    return extending.intrinsic(function)
