"""Memory that loading needed and the engine does not."""

from __future__ import annotations

import ctypes


def release_freed_memory() -> None:
    """Give memory that was freed, but is kept by the C allocator for later, back to the system. Any thread; milliseconds.

    Does nothing where the C library is not glibc.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return
    trim(0)
