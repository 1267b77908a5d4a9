"""How every kernel is compiled: one decorator for plain functions, one for parallel launchers.

Results must not depend on how a loop happens to be compiled, so no kernel uses ``fastmath``.
Compiled code is kept in numba's cache on disk. The cache notices a change of the file that holds
a function, not of the files it calls into: after editing :mod:`simd`, touch its users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba  # type: ignore[import-untyped]  # numba ships no type information

F = TypeVar("F", bound=Callable[..., Any])

prange: type[range] = numba.prange


def kernel(function: F) -> F:
    """Compile ``function`` on first call for each set of argument types; the GIL is released."""
    compiled: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


def launcher(function: F) -> F:
    """Like :func:`kernel`, for functions that divide their work with ``prange``."""
    compiled: F = numba.njit(nogil=True, cache=True, error_model="numpy", parallel=True)(function)
    return compiled


def inlined(function: F) -> F:
    """A part of kernels, merged into its callers before they are compiled."""
    compiled: F = numba.njit(inline="always", error_model="numpy")(function)
    return compiled
