"""How large the page pool is, and its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..config import EngineConfig
from ..errors import NotEnoughMemoryError
from .models.base import CacheShape, KVPool

_DEFAULT_SHARE = 0.25
_MEMORY_INFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file "),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file "),
)


def page_bytes(shapes: Sequence[CacheShape], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    return sum(2 * shape.kv_heads * shape.head_dim for shape in shapes) * page_size * dtype.itemsize


def pool_pages(
    config: EngineConfig, max_model_len: int, bytes_per_page: int, available: int, share: float = _DEFAULT_SHARE
) -> int:
    """Pages the pool gets.

    As configured (``pages``, ``pool_bytes`` or ``pool_fraction`` of what is available), otherwise
    enough for every row at full length, but at most ``share`` of what is available.

    Args:
        config: Which of the sizes was given, and rows and page size.
        max_model_len: Longest sequence, in tokens.
        bytes_per_page: From ``page_bytes``.
        available: Bytes this process can still take.

    Raises:
        NotEnoughMemoryError: not even one page fits, or more was asked for than there is.
    """
    if config.pages is not None:
        pages = config.pages
    elif config.pool_bytes is not None:
        pages = config.pool_bytes // bytes_per_page
    elif config.pool_fraction is not None:
        pages = int(config.pool_fraction * available) // bytes_per_page
    else:
        wanted = config.max_rows * -(-max_model_len // config.page_size)
        pages = min(wanted, int(share * available) // bytes_per_page)
    if pages < 1 or pages * bytes_per_page > available:
        raise NotEnoughMemoryError(
            f"the page pool needs at least one page of {bytes_per_page:,} bytes ({config.page_size} tokens), was to have "
            f"{pages:,} pages ({pages * bytes_per_page:,} bytes), and {available:,} bytes are available; change pages, "
            "pool_bytes, pool_fraction or page_size, or free memory"
        )
    return pages


def allocate_pools(shapes: Sequence[CacheShape], pages: int, page_size: int, dtype: torch.dtype) -> list[KVPool]:
    """One pair of zeroed pools per layer.

    The memory is mapped, not touched: a page takes real memory when it is first written.

    Raises:
        NotEnoughMemoryError: the system refused the mapping.
    """
    plain = np.dtype(f"u{dtype.itemsize}")  # numpy has no bfloat16, and zero has the same bits in every type

    def zeros(*shape: int) -> torch.Tensor:
        return torch.from_numpy(np.zeros(shape, plain)).view(dtype)

    try:
        return [
            (
                zeros(pages, shape.kv_heads, shape.head_dim, page_size),
                zeros(pages, shape.kv_heads, page_size, shape.head_dim),
            )
            for shape in shapes
        ]
    except MemoryError as error:
        size = pages * page_bytes(shapes, page_size, dtype)
        raise NotEnoughMemoryError(f"the system refused {size:,} bytes for a pool of {pages:,} pages; ask for fewer") from error


def available_memory(meminfo: Path = _MEMORY_INFO, cgroup: Path = _CGROUP) -> int:
    """Bytes this process can take without swapping: what the machine has free, within the control group's limit."""
    available = _machine_available(meminfo)
    for limit, usage, statistics, reclaimable in _CGROUP_FILES:
        try:
            allowed = int((cgroup / limit).read_text("ascii"))
            used = int((cgroup / usage).read_text("ascii"))
            lines = (cgroup / statistics).read_text("ascii").splitlines()
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue
        # Files read lately (the weights, say) count as used but give way when memory is asked for.
        used -= sum(int(line.removeprefix(reclaimable)) for line in lines if line.startswith(reclaimable))
        available = min(available, max(allowed - used, 0))
    return available


def _machine_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
